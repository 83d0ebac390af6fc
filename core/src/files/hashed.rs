//! Reads a file from its start to its end, and computes the checksum of what was read.

use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::Path;

use super::{FileError, Xxh3};

/// An open file. Counts and hashes the bytes that are read.
#[derive(Debug)]
pub struct HashedReader {
    path: std::path::PathBuf,
    file: File,
    hasher: Xxh3,
    is_hashing: bool,
    left: u64,
}

/// Why bytes cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TakeError {
    /// The file is too short.
    #[error("{0}")]
    Short(String),
    /// The operating system reports an error.
    #[error(transparent)]
    Io(#[from] FileError),
}

impl HashedReader {
    /// Opens a file. Fails if `path` is not a regular file.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let file = File::open(path).map_err(FileError::at(path))?;
        let found = file.metadata().map_err(FileError::at(path))?;
        if !found.is_file() {
            return Err(FileError::at(path)(ErrorKind::IsADirectory.into()));
        }
        Ok(Self { path: path.to_owned(), file, hasher: Xxh3::default(), is_hashing: true, left: found.len() })
    }

    /// Computes no checksum from now on.
    pub fn stop_hashing(&mut self) {
        self.is_hashing = false;
    }

    /// Whether the checksum covers all bytes that were read.
    pub fn is_hashing(&self) -> bool {
        self.is_hashing
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of bytes that are not read yet.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Reads exactly `bytes` bytes. If fewer bytes are left in the file, this fails before it allocates memory.
    pub fn take(&mut self, bytes: u64) -> Result<Vec<u8>, TakeError> {
        let length = usize::try_from(bytes).ok().filter(|_| bytes <= self.left).ok_or_else(|| {
            let left = self.left;
            TakeError::Short(format!(
                "the file ends too early: {bytes} more bytes are needed, but only {left} are left"
            ))
        })?;
        let mut buffer = vec![0; length];
        self.file.read_exact(&mut buffer).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => TakeError::Short("the file ended during the read".to_owned()),
            _ => FileError::at(&self.path)(error).into(),
        })?;
        if self.is_hashing {
            self.hasher.update(&buffer);
        }
        self.left -= bytes;
        Ok(buffer)
    }

    /// Counts `bytes` in the checksum instead of all bytes that were read so far.
    pub fn hash_instead(&mut self, bytes: &[u8]) {
        self.hasher = Xxh3::default();
        self.hasher.update(bytes);
    }

    /// The checksum, sixteen hexadecimal digits.
    pub fn hex(&self) -> String {
        self.hasher.hex()
    }
}
