//! Numbered files that any thread reads at any offset, and memory to read them into.

use std::sync::{Arc, Mutex, PoisonError};

use crate::shards::error::ShardsError;

/// Numbered files: on disk, or behind URLs.
pub trait ByteSource: Send + Sync {
    /// How many files there are.
    fn files(&self) -> usize;
    /// A file's path or URL, for messages.
    fn name(&self, file: usize) -> String;
    /// A file's size.
    fn len(&self, file: usize) -> Result<u64, ShardsError>;
    /// Fills `into` from an offset; fewer bytes are an error.
    fn read_at(&self, file: usize, offset: u64, into: &mut [u8]) -> Result<(), ShardsError>;
    /// Does reading a chunk in several pieces cost no more than reading it at once?
    fn reads_pieces(&self) -> bool {
        false
    }
    /// How many files are worth reading at the same time while a data set is opened.
    fn files_at_once(&self) -> usize {
        1
    }
    /// What an index keeps of a file, so that it need not be looked for again; none where the name suffices.
    fn indexed(&self, file: usize) -> Option<String> {
        let _ = file;
        None
    }
    /// Changes whenever the file does, and may change when it does not.
    fn version(&self, file: usize) -> Result<String, ShardsError>;
}

/// Files, and the text of the manifest that lists them, where one does.
pub(super) type Listed = (Arc<dyn ByteSource>, Option<Vec<u8>>);

/// Buffers that are kept for the next read.
const POOLED_MAX: usize = 16;

/// Memory that goes from read to read, so that a stream of blocks allocates nothing.
#[derive(Debug, Default)]
pub(crate) struct BufferPool(Mutex<Vec<Vec<u8>>>);

impl BufferPool {
    /// A buffer of so many bytes, whatever they are.
    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> PooledBuffer {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The smallest that is large enough, lest one large read make every buffer large.
        let fitting =
            (0..free.len()).filter(|&index| free[index].len() >= bytes).min_by_key(|&index| free[index].len());
        let memory = fitting.map_or_else(|| vec![0; bytes], |index| free.swap_remove(index));
        PooledBuffer { memory, bytes, pool: Arc::clone(self) }
    }
}

/// A buffer that goes back to its pool.
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
            // The smallest makes room: it is the cheapest to make again.
            let smallest = (0..free.len()).min_by_key(|&index| free[index].len());
            if let Some(index) = smallest.filter(|&index| free[index].len() < self.memory.len()) {
                free[index] = std::mem::take(&mut self.memory);
            }
            return;
        }
        free.push(std::mem::take(&mut self.memory));
    }
}
