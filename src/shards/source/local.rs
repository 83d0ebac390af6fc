//! Files on disk.
//!
//! Files are not memory-mapped: if a file is truncated or a disk fails, a read returns an error, but access to mapped
//! memory would kill the process. The number of open files is limited.

use locdiff_core::pulse;
use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::bytes::ByteSource;
use crate::shards::error::{ShardsError, Spot};

/// Maximum number of open files.
const OPEN_FILES_MAX: usize = 64;

/// Files on disk.
#[derive(Debug)]
pub struct LocalFiles {
    paths: Vec<PathBuf>,
    open: Mutex<VecDeque<(usize, Arc<File>)>>,
}

impl LocalFiles {
    /// Numbers the files in the given order.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        Self { paths, open: Mutex::default() }
    }

    /// Returns an open file and marks it as most recently used. Opens the file if necessary. If too many files are
    /// open, the least recently used file is closed.
    fn file(&self, file: usize) -> Result<Arc<File>, ShardsError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = open.iter().position(|(number, _)| *number == file) {
            let found = open.remove(index).expect("`index` is a position in this list");
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
        let is_file = |found: fs::Metadata| {
            if found.is_file() { Ok(found) } else { Err(io::Error::other("it is not a regular file")) }
        };
        let found = found.and_then(is_file).map_err(|error| ShardsError::io(&self.paths[file], error))?;
        Ok(found.len())
    }

    fn read_at(&self, file: usize, offset: u64, into: &mut [u8]) -> Result<(), ShardsError> {
        let read = self.file(file)?.read_exact_at(into, offset);
        pulse::advance();
        read.map_err(|error| {
            if error.kind() == ErrorKind::UnexpectedEof {
                let reason = format!("the file ends before byte {}: it was cut short", offset + into.len() as u64);
                return ShardsError::corrupt(Spot::file(self.name(file)), reason);
            }
            ShardsError::io(&self.paths[file], error)
        })
    }

    fn reads_pieces(&self) -> bool {
        true
    }

    /// The version is the inode number and the ctime. Unlike the modification time, the ctime cannot be set back.
    fn version(&self, file: usize) -> Result<String, ShardsError> {
        let found = fs::metadata(&self.paths[file]).map_err(|error| ShardsError::io(&self.paths[file], error))?;
        Ok(format!("{}-{}.{:09}", found.ino(), found.ctime(), found.ctime_nsec()))
    }
}
