//! The trait [`ByteSource`] and a pool of read buffers. A [`ByteSource`] is a list of numbered files that any thread
//! can read at any offset.

use std::sync::{Arc, Mutex, PoisonError};

use crate::shards::error::ShardsError;

/// Numbered files, on disk or on a server.
pub trait ByteSource: Send + Sync {
    /// Number of files.
    fn files(&self) -> usize;
    /// Path or URL of a file, for messages.
    fn name(&self, file: usize) -> String;
    /// Size of a file in bytes.
    fn len(&self, file: usize) -> Result<u64, ShardsError>;
    /// Fills `into` with the bytes of a file from `offset` on. It is an error if the file ends before `into` is full.
    fn read_at(&self, file: usize, offset: u64, into: &mut [u8]) -> Result<(), ShardsError>;
    /// Whether reading bytes in several pieces is as fast as reading them at once.
    fn reads_pieces(&self) -> bool {
        false
    }
    /// Number of files to read concurrently while opening a data set.
    fn files_at_once(&self) -> usize {
        1
    }
    /// Text with which a file can be opened later without a request to the server. An index stores this text. `None` if
    /// the name of the file is enough.
    fn indexed(&self, file: usize) -> Option<String> {
        let _ = file;
        None
    }
    /// Version of a file. If the file changes, its version changes too. The version may also change when the bytes of
    /// the file stay the same.
    fn version(&self, file: usize) -> Result<String, ShardsError>;
}

/// Numbered files and the text of the manifest that lists them. The text is `None` if there is no manifest.
pub(super) type Listed = (Arc<dyn ByteSource>, Option<Vec<u8>>);

/// Maximum number of buffers kept for reuse.
const POOLED_MAX: usize = 16;

/// A pool of reusable buffers, so that not every read allocates memory.
#[derive(Debug, Default)]
pub(crate) struct BufferPool(Mutex<Vec<Vec<u8>>>);

impl BufferPool {
    /// Takes a buffer of the given size from the pool, or allocates one. Its contents are undefined.
    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> PooledBuffer {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Take the smallest buffer that is large enough, and leave the large buffers for large reads.
        let fitting =
            (0..free.len()).filter(|&index| free[index].len() >= bytes).min_by_key(|&index| free[index].len());
        let memory = fitting.map_or_else(|| vec![0; bytes], |index| free.swap_remove(index));
        PooledBuffer { memory, bytes, pool: Arc::clone(self) }
    }
}

/// A buffer that returns to its pool when dropped.
#[derive(Debug)]
pub(crate) struct PooledBuffer {
    memory: Vec<u8>,
    bytes: usize,
    pool: Arc<BufferPool>,
}

impl PooledBuffer {
    pub(crate) fn as_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.bytes]
    }
}

impl AsRef<[u8]> for PooledBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.memory[..self.bytes]
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let mut free = self.pool.0.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() == POOLED_MAX {
            // Replace the smallest buffer: it is the cheapest to allocate again.
            let smallest = (0..free.len()).min_by_key(|&index| free[index].len());
            if let Some(index) = smallest.filter(|&index| free[index].len() < self.memory.len()) {
                free[index] = std::mem::take(&mut self.memory);
            }
            return;
        }
        free.push(std::mem::take(&mut self.memory));
    }
}
