//! Crash-safe file writing: [`Files::write_atomically`] writes a file under a temporary name, syncs it to disk, and
//! then renames it.
//!
//! Data is durable if it survives a power loss. The contents of a file are durable after [`FileWriter::finish`]. A new
//! name in a folder is durable after [`Files::sync_folder`].
//!
//! Operations that change or sync files and folders are counted, so that a test can make any one of them fail
//! ([`Fault`]). [`Files::real`] injects no faults.
//!
//! Checksums are 64-bit xxh3, written as sixteen hexadecimal digits. They detect accidental damage, but not deliberate
//! changes.

mod fault;
mod hashed;

use crate::exit_code::{ExitCode, FailureKind, HasExitCode};
use crate::pulse;
use std::fs::File;
use std::hash::Hasher as _;
use std::io::{self, ErrorKind, Read as _, Seek as _, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

pub use fault::Fault;
use fault::{Faults, FileOperation, Meanwhile};
pub use hashed::{HashedReader, TakeError};

/// Size of write and read buffers.
const BUFFER_BYTES: usize = 1 << 20;

/// An I/O error with the path of the file or folder.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {error}")]
pub struct FileError {
    /// The file or folder.
    pub path: PathBuf,
    /// The error of the operating system.
    pub error: io::Error,
}

impl FileError {
    /// Returns a closure for `map_err` that adds `path` to an I/O error.
    pub fn at(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |error| Self { path: path.to_owned(), error }
    }
}

impl HasExitCode for FileError {
    fn exit_code(&self) -> ExitCode {
        ExitCode::Io
    }

    fn failure_kind(&self) -> FailureKind {
        FailureKind::of_io(&self.error)
    }
}

/// Length and checksum of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// Length of the file.
    pub bytes: u64,
    /// xxh3 checksum, sixteen hexadecimal digits.
    pub xxh3: String,
}

/// Incremental xxh3 checksum.
#[derive(Clone)]
pub struct Xxh3(XxHash3_64);

impl Default for Xxh3 {
    fn default() -> Self {
        Self(XxHash3_64::new())
    }
}

impl std::fmt::Debug for Xxh3 {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Xxh3({})", self.hex())
    }
}

impl Xxh3 {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The checksum of all bytes added so far, sixteen hexadecimal digits.
    pub fn hex(&self) -> String {
        format!("{:016x}", self.0.finish())
    }
}

/// Reads a whole file and returns its length and checksum.
pub fn measure(path: &Path) -> Result<Written, FileError> {
    let mut file = File::open(path).map_err(FileError::at(path))?;
    let (mut hasher, mut bytes, mut buffer) = (Xxh3::default(), 0_u64, vec![0; BUFFER_BYTES]);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(Written { bytes, xxh3: hasher.hex() }),
            Ok(count) => {
                hasher.update(&buffer[..count]);
                bytes += count as u64;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(FileError::at(path)(error)),
        }
    }
}

/// Waits until `path` exists, at most for the time `patience`. A client of a file server may remember for a while that a
/// file does not exist; it asks the server again when the folder is listed.
pub fn wait_until_visible(path: &Path, patience: Duration) {
    let begun = Instant::now();
    while !path.exists() && begun.elapsed() < patience {
        let _ = std::fs::read_dir(parent(path)).map(|entries| entries.count());
        if !path.exists() {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// The file system, with or without injected faults.
#[derive(Debug, Clone, Default)]
pub struct Files {
    faults: Option<Faults>,
}

impl Files {
    /// The file system without injected faults.
    pub fn real() -> Self {
        Self::default()
    }

    /// The file system with `fault` injected at operation number `operation`, counted from 0.
    pub fn failing(fault: Fault, operation: u64) -> Self {
        Self { faults: Some(Faults::new(fault, operation, None)) }
    }

    /// The file system for a process that is stopped just before operation number `operation`, counted from 0. It wakes
    /// up when `meanwhile` has returned.
    pub fn pausing(operation: u64, meanwhile: impl FnOnce() + Send + 'static) -> Self {
        Self { faults: Some(Faults::new(Fault::Pause, operation, Some(Meanwhile(Box::new(meanwhile))))) }
    }

    /// Whether the injected fault has occurred.
    pub fn has_failed(&self) -> bool {
        self.faults.as_ref().is_some_and(Faults::has_triggered)
    }

    fn allow(&self, kind: FileOperation, path: &Path) -> Result<(), FileError> {
        self.faults.as_ref().map_or(Ok(()), |faults| faults.allow(kind)).map_err(FileError::at(path))
    }

    /// Creates a folder unless it exists. The new name is durable once the parent folder is synced.
    pub fn create_folder(&self, path: &Path) -> Result<(), FileError> {
        self.allow(FileOperation::Write, path)?;
        match std::fs::create_dir(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => return Ok(()),
            other => other.map_err(FileError::at(path))?,
        }
        if let Some(faults) = &self.faults {
            faults.created(path);
        }
        Ok(())
    }

    /// Creates a folder and its missing parents, and makes their names durable.
    pub fn create_folders(&self, path: &Path) -> Result<(), FileError> {
        if path.is_dir() {
            return Ok(());
        }
        let parent = parent(path);
        if parent != path {
            self.create_folders(parent)?;
        }
        self.create_folder(path)?;
        self.sync_folder(parent)
    }

    /// Creates a file, or truncates an existing one.
    pub fn create(&self, path: &Path) -> Result<FileWriter, FileError> {
        self.allow(FileOperation::Write, path)?;
        let is_new = self.faults.is_some() && !path.exists();
        let file = File::create(path).map_err(FileError::at(path))?;
        if let Some(faults) = &self.faults {
            faults.unsynced(path);
            if is_new {
                faults.created(path);
            }
        }
        Ok(FileWriter {
            files: self.clone(),
            path: path.to_owned(),
            file,
            buffer: Vec::new(),
            hasher: Xxh3::default(),
            bytes: 0,
        })
    }

    /// Replaces bytes of a file, beginning with byte `position`, and syncs the file to disk.
    pub fn replace_bytes(&self, path: &Path, position: u64, bytes: &[u8]) -> Result<(), FileError> {
        self.allow(FileOperation::Write, path)?;
        let file = File::options().write(true).open(path);
        let replace = |mut file: File| {
            file.seek(SeekFrom::Start(position))?;
            file.write_all(bytes)?;
            file.sync_all()
        };
        file.and_then(replace).map_err(FileError::at(path))
    }

    /// Makes the names of all files and folders in a folder durable.
    pub fn sync_folder(&self, path: &Path) -> Result<(), FileError> {
        self.allow(FileOperation::Other, path)?;
        File::open(path).and_then(|folder| folder.sync_all()).map_err(FileError::at(path))?;
        if let Some(faults) = &self.faults {
            faults.synced_folder(path);
        }
        Ok(())
    }

    /// Creates an empty file, and makes its name durable. Returns whether this call created it: of several launchers that
    /// claim the same name, on one machine or on several, exactly one succeeds.
    pub fn claim(&self, path: &Path) -> Result<bool, FileError> {
        self.allow(FileOperation::Write, path)?;
        match File::create_new(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(false),
            created => drop(created.map_err(FileError::at(path))?),
        }
        if let Some(faults) = &self.faults {
            faults.created(path);
        }
        self.sync_folder(parent(path))?;
        Ok(true)
    }

    /// Writes a small file atomically and durably, unless it exists. Returns whether this call wrote it: of several
    /// launchers that write the same file, exactly one succeeds.
    pub fn write_unless_exists(&self, path: &Path, bytes: &[u8]) -> Result<bool, FileError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = parent(path).join(format!(".{name}-{}{WRITING}", std::process::id()));
        let linked = self.write_new(&temporary, bytes).and_then(|_| {
            self.allow(FileOperation::Write, path)?;
            match std::fs::hard_link(&temporary, path) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(false),
                linked => linked.map_err(FileError::at(path))?,
            }
            if let Some(faults) = &self.faults {
                faults.created(path);
            }
            Ok(true)
        });
        let _ = self.remove_file(&temporary);
        let is_written = linked?;
        self.sync_folder(parent(path))?;
        Ok(is_written)
    }

    /// Writes a small file atomically and durably, replacing an existing file. After an error or a crash, the file has
    /// its old or its new contents, never a mixture.
    pub fn write_atomically(&self, path: &Path, bytes: &[u8]) -> Result<Written, FileError> {
        let temporary = temporary_path(path);
        let written = self.write_new(&temporary, bytes).and_then(|written| {
            self.rename(&temporary, path)?;
            Ok(written)
        });
        if written.is_err() {
            // Remove the incomplete file: it is useless, and the disk may be full.
            let _ = self.remove_file(&temporary);
        }
        let written = written?;
        self.sync_folder(parent(path))?;
        Ok(written)
    }

    /// Writes a file directly under its final name, overwriting an existing file, and syncs it to disk.
    pub fn write_new(&self, path: &Path, bytes: &[u8]) -> Result<Written, FileError> {
        let mut writer = self.create(path)?;
        writer.put(bytes)?;
        writer.finish()
    }

    /// Renames a file or folder. The new name is durable once the folder that contains it is synced.
    pub fn rename(&self, from: &Path, to: &Path) -> Result<(), FileError> {
        self.allow(FileOperation::Other, from)?;
        let replaced = self.faults.as_ref().and_then(|_| std::fs::read(to).ok());
        std::fs::rename(from, to).map_err(FileError::at(from))?;
        if let Some(faults) = &self.faults {
            faults.renamed(from, to, replaced);
        }
        Ok(())
    }

    /// Removes a file.
    pub fn remove_file(&self, path: &Path) -> Result<(), FileError> {
        self.allow(FileOperation::Other, path)?;
        std::fs::remove_file(path).map_err(FileError::at(path))
    }

    /// Removes a folder and its contents. Symbolic links are removed, not followed.
    pub fn remove_folder(&self, path: &Path) -> Result<(), FileError> {
        for entry in self.entries(path)? {
            let kind = std::fs::symlink_metadata(&entry).map_err(FileError::at(&entry))?;
            if kind.is_dir() { self.remove_folder(&entry)? } else { self.remove_file(&entry)? }
        }
        self.allow(FileOperation::Other, path)?;
        std::fs::remove_dir(path).map_err(FileError::at(path))
    }

    /// Paths of all entries of a folder, sorted.
    pub fn entries(&self, path: &Path) -> Result<Vec<PathBuf>, FileError> {
        let entries = std::fs::read_dir(path).and_then(|entries| {
            entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<PathBuf>>>()
        });
        let mut entries = entries.map_err(FileError::at(path))?;
        entries.sort();
        Ok(entries)
    }
}

/// The folder that contains `path`: `.` if `path` is a bare name, and `path` itself if it is the root.
pub fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    }
}

/// Path of the temporary file for `path`: a hidden file in the same folder, which is renamed to `path` when it is
/// complete.
fn temporary_path(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    parent(path).join(format!(".{name}{WRITING}"))
}

/// Suffix of the names of temporary files. A crash may leave such files behind; they can be removed.
pub const WRITING: &str = ".writing";

/// Writes a file and computes its length and checksum.
#[derive(Debug)]
pub struct FileWriter {
    files: Files,
    path: PathBuf,
    file: File,
    buffer: Vec<u8>,
    hasher: Xxh3,
    bytes: u64,
}

impl FileWriter {
    /// Appends bytes.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        for piece in bytes.chunks(BUFFER_BYTES) {
            if self.buffer.len() + piece.len() > BUFFER_BYTES {
                self.flush_buffer()?;
            }
            self.buffer.extend_from_slice(piece);
        }
        Ok(())
    }

    /// Writes the buffered bytes and syncs the file to disk. Returns the length and checksum of the file.
    pub fn finish(mut self) -> Result<Written, FileError> {
        self.flush_buffer()?;
        self.files.allow(FileOperation::Write, &self.path)?;
        self.file.sync_all().map_err(FileError::at(&self.path))?;
        if let Some(faults) = &self.files.faults {
            faults.synced(&self.path);
        }
        Ok(Written { bytes: self.bytes, xxh3: self.hasher.hex() })
    }

    fn flush_buffer(&mut self) -> Result<(), FileError> {
        pulse::advance();
        if self.buffer.is_empty() {
            return Ok(());
        }
        let had_failed = self.files.has_failed();
        if let Err(error) = self.files.allow(FileOperation::Write, &self.path) {
            if !had_failed {
                // The fault interrupts this write, so only half of the bytes reach the file.
                let _ = self.file.write_all(&self.buffer[..self.buffer.len() / 2]);
            }
            return Err(error);
        }
        self.file.write_all(&self.buffer).map_err(FileError::at(&self.path))?;
        self.buffer.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_has_the_written_bytes_and_their_xxh3_checksum() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let path = folder.path().join("file");
        let bytes: Vec<u8> = (0..3 * BUFFER_BYTES + 17).map(|index| (index % 251) as u8).collect();
        let mut writer = Files::real().create(&path).expect("the folder is writable");
        for piece in bytes.chunks(700_001) {
            writer.put(piece).expect("the test folder is writable");
        }
        let written = writer.finish().expect("the folder is writable");
        assert_eq!(std::fs::read(&path).expect("the file can be read"), bytes);
        assert_eq!((written.bytes, &written), (bytes.len() as u64, &measure(&path).expect("the file can be read")));
        assert_eq!(
            Xxh3::default().hex(),
            "2d06800538d394c2",
            "wrong checksum of the empty input; the wanted one is from the xxh3 specification"
        );
    }

    #[test]
    fn failed_atomic_write_leaves_the_old_or_the_new_file() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let path = folder.path().join("latest");
        Files::real().write_atomically(&path, b"old").expect("the test folder is writable");
        for fault in [Fault::Crash, Fault::PowerLoss, Fault::DiskFull] {
            for operation in 0.. {
                let files = Files::failing(fault, operation);
                let done = files.write_atomically(&path, b"new");
                let text = std::fs::read(&path).expect("the file always exists");
                assert!(text == b"old" || text == b"new", "{fault:?} at {operation} left {text:?} in the file");
                if done.is_ok() {
                    assert_eq!(text, b"new");
                    assert!(operation > 2, "{fault:?} never occurred");
                    break;
                }
                assert!(files.has_failed());
            }
            Files::real().write_atomically(&path, b"old").expect("the test folder is writable");
        }
    }

    #[test]
    fn folders_are_created_with_parents_and_removed_with_contents() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let deep = folder.path().join("a/b/c");
        let files = Files::real();
        files.create_folders(&deep).expect("the folder is writable");
        files.create_folders(&deep).expect("an existing folder is not an error");
        files.write_new(&deep.join("x"), b"x").expect("the test folder is writable");
        files.remove_folder(&folder.path().join("a")).expect("the folder exists");
        assert!(files.entries(folder.path()).expect("the folder can be read").is_empty());
        files.write_new(&folder.path().join("file"), b"").expect("the test folder is writable");
        assert!(files.create_folder(&folder.path().join("file")).is_err());
    }
}
