//! A trait for numbered files that any thread can read at any offset, and a pool of read buffers.

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
    /// Fills `into` with the bytes at an offset. A file that ends too early is an error.
    fn read_at(&self, file: usize, offset: u64, into: &mut [u8]) -> Result<(), ShardsError>;
    /// Whether reading a chunk in several pieces costs no more than reading it at once.
    fn reads_pieces(&self) -> bool {
        false
    }
    /// Number of files to read concurrently while opening a data set.
    fn files_at_once(&self) -> usize {
        1
    }
    /// What an index stores about a file, so that opening from the index needs no request. `None` if the name is
    /// enough.
    fn indexed(&self, file: usize) -> Option<String> {
        let _ = file;
        None
    }
    /// Version of a file. It changes whenever the file does, and may change when the file does not.
    fn version(&self, file: usize) -> Result<String, ShardsError>;
}

/// Files, and the text of the manifest that lists them, if there is one.
pub(super) type Listed = (Arc<dyn ByteSource>, Option<Vec<u8>>);

/// Maximum number of buffers kept for reuse.
const POOLED_MAX: usize = 16;

/// A pool of reusable buffers, so that reading many blocks does not allocate each time.
#[derive(Debug, Default)]
pub(crate) struct BufferPool(Mutex<Vec<Vec<u8>>>);

impl BufferPool {
    /// Takes a buffer of the given size. Its contents are undefined.
    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> PooledBuffer {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Take the smallest buffer that fits. Otherwise one large read could make all buffers large.
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
