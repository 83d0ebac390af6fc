//! Where bytes come from: numbered files that any thread reads at any offset.
//!
//! Nothing is mapped into memory, so that a file that shrinks or fails is an error and not a signal. Few files are open at once,
//! however many there are.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::error::{ShardsError, Spot};

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

/// Files that are open at once.
const OPEN_FILES_MAX: usize = 64;

/// Files on disk.
#[derive(Debug)]
pub struct LocalFiles {
    paths: Vec<PathBuf>,
    open: Mutex<VecDeque<(usize, Arc<File>)>>,
}

impl LocalFiles {
    /// These, in this order.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        Self { paths, open: Mutex::default() }
    }

    /// The open file, which becomes the last to be closed.
    fn file(&self, file: usize) -> Result<Arc<File>, ShardsError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = open.iter().position(|(number, _)| *number == file) {
            let found = open.remove(index).expect("found above");
            let handle = Arc::clone(&found.1);
            open.push_back(found);
            return Ok(handle);
        }
        let path = &self.paths[file];
        let handle = Arc::new(File::open(path).map_err(|error| ShardsError::io(path, error))?);
        if open.len() == OPEN_FILES_MAX {
            open.pop_front();
        }
        open.push_back((file, Arc::clone(&handle)));
        Ok(handle)
    }
}

impl ByteSource for LocalFiles {
    fn files(&self) -> usize {
        self.paths.len()
    }

    fn name(&self, file: usize) -> String {
        self.paths[file].display().to_string()
    }

    fn len(&self, file: usize) -> Result<u64, ShardsError> {
        let found = self.file(file)?.metadata();
        let found = found.map_err(|error| ShardsError::io(&self.paths[file], error))?;
        if !found.is_file() {
            let error = io::Error::other("is no file");
            return Err(ShardsError::io(&self.paths[file], error));
        }
        Ok(found.len())
    }

    fn read_at(&self, file: usize, offset: u64, into: &mut [u8]) -> Result<(), ShardsError> {
        self.file(file)?.read_exact_at(into, offset).map_err(|error| {
            if error.kind() == ErrorKind::UnexpectedEof {
                let spot = Box::new(Spot { file: self.name(file), row_group: None, column: None, row: None });
                let reason = format!("ends before byte {}: it was cut short", offset + into.len() as u64);
                return ShardsError::Corrupt { spot, reason };
            }
            ShardsError::io(&self.paths[file], error)
        })
    }

    fn reads_pieces(&self) -> bool {
        true
    }

    /// Which file it is, and when it was last touched in any way: the time of modification can be set back, this cannot.
    fn version(&self, file: usize) -> Result<String, ShardsError> {
        let found = fs::metadata(&self.paths[file]).map_err(|error| ShardsError::io(&self.paths[file], error))?;
        Ok(format!("{}-{}.{:09}", found.ino(), found.ctime(), found.ctime_nsec()))
    }
}

/// Buffers that are kept for the next read.
const POOLED_MAX: usize = 16;

/// Memory that goes from read to read, so that a stream of blocks allocates nothing.
#[derive(Debug, Default)]
pub(super) struct BufferPool(Mutex<Vec<Vec<u8>>>);

impl BufferPool {
    /// A buffer of so many bytes, whatever they are.
    pub(super) fn take(self: &Arc<Self>, bytes: usize) -> PooledBuffer {
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
pub(super) struct PooledBuffer {
    memory: Vec<u8>,
    bytes: usize,
    pool: Arc<BufferPool>,
}

impl PooledBuffer {
    pub(super) fn as_mut(&mut self) -> &mut [u8] {
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
