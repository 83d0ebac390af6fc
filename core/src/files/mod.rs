//! Files that survive a crash, for both planes: written beside or in hiding, brought to the disk, then renamed.
//!
//! Nothing is durable before it was asked for: a file with [`FileWriter::finish`], a name in a folder with
//! [`Files::sync_folder`]. Every operation that changes something is counted, so that a test can make each of them fail
//! ([`Fault`]); [`Files::real`] never fails by itself. Checksums are xxh3 (64 bits), sixteen hexadecimal digits: they find
//! damage, not forgery.

mod fault;

use std::fs::File;
use std::hash::Hasher as _;
use std::io::{self, ErrorKind, Read as _, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

pub use fault::Fault;
use fault::{Faults, Kind};

/// Bytes that are gathered before they are written, and read at once.
const BUFFER_BYTES: usize = 1 << 20;

/// The system refused something about a file.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {error}")]
pub struct FileError {
    /// Which file or folder.
    pub path: PathBuf,
    /// What the system said.
    pub error: io::Error,
}

impl FileError {
    fn at(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        move |error| Self { path: path.to_owned(), error }
    }
}

/// What became of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// Its length.
    pub bytes: u64,
    /// Its checksum.
    pub xxh3: String,
}

/// xxh3 of bytes that come in pieces.
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
    /// Takes in the next piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The checksum of all so far.
    pub fn hex(&self) -> String {
        format!("{:016x}", self.0.finish())
    }
}

/// Length and checksum of a file, read from its start to its end.
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

/// The file system, or one that fails on purpose.
#[derive(Debug, Clone, Default)]
pub struct Files {
    faults: Option<Faults>,
}

impl Files {
    /// The file system as it is.
    pub fn real() -> Self {
        Self::default()
    }

    /// Counts operations, from 0, and breaks with the `operation`th.
    pub fn failing(fault: Fault, operation: u64) -> Self {
        Self { faults: Some(Faults::new(fault, operation)) }
    }

    /// The fault has struck.
    pub fn has_failed(&self) -> bool {
        self.faults.as_ref().is_some_and(Faults::has_struck)
    }

    fn allow(&self, kind: Kind, path: &Path) -> Result<(), FileError> {
        self.faults.as_ref().map_or(Ok(()), |faults| faults.allow(kind)).map_err(FileError::at(path))
    }

    /// Makes a folder; one that exists is fine. Its name is durable once its parent is synced.
    pub fn create_folder(&self, path: &Path) -> Result<(), FileError> {
        self.allow(Kind::Write, path)?;
        match std::fs::create_dir(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
            other => other.map_err(FileError::at(path)),
        }
    }

    /// Makes a folder and those above it; the names of all that are new are durable.
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

    /// A new file, or an empty one in the place of the old.
    pub fn create(&self, path: &Path) -> Result<FileWriter, FileError> {
        self.allow(Kind::Write, path)?;
        let file = File::create(path).map_err(FileError::at(path))?;
        if let Some(faults) = &self.faults {
            faults.unsynced(path);
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

    /// Makes the names in a folder durable.
    pub fn sync_folder(&self, path: &Path) -> Result<(), FileError> {
        self.allow(Kind::Other, path)?;
        File::open(path).and_then(|folder| folder.sync_all()).map_err(FileError::at(path))
    }

    /// Puts a small file in place, whole and durable, or leaves the old one.
    pub fn write_whole(&self, path: &Path, bytes: &[u8]) -> Result<Written, FileError> {
        let beside = beside(path);
        let written = self.write_new(&beside, bytes).and_then(|written| {
            self.rename(&beside, path)?;
            Ok(written)
        });
        if written.is_err() {
            // The disk may be full: half a file is of no use to anyone.
            let _ = self.remove_file(&beside);
        }
        let written = written?;
        self.sync_folder(parent(path))?;
        Ok(written)
    }

    /// Writes a file under its own name and brings it to the disk.
    pub fn write_new(&self, path: &Path, bytes: &[u8]) -> Result<Written, FileError> {
        let mut writer = self.create(path)?;
        writer.put(bytes)?;
        writer.finish()
    }

    /// Renames a file or folder. Its new name is durable once the folder is synced.
    pub fn rename(&self, from: &Path, to: &Path) -> Result<(), FileError> {
        self.allow(Kind::Other, from)?;
        std::fs::rename(from, to).map_err(FileError::at(from))?;
        if let Some(faults) = &self.faults {
            faults.renamed(from, to);
        }
        Ok(())
    }

    /// Removes a file.
    pub fn remove_file(&self, path: &Path) -> Result<(), FileError> {
        self.allow(Kind::Other, path)?;
        std::fs::remove_file(path).map_err(FileError::at(path))
    }

    /// Removes a folder with all that is in it; links are removed, not followed.
    pub fn remove_folder(&self, path: &Path) -> Result<(), FileError> {
        for entry in self.entries(path)? {
            let kind = std::fs::symlink_metadata(&entry).map_err(FileError::at(&entry))?;
            if kind.is_dir() { self.remove_folder(&entry)? } else { self.remove_file(&entry)? }
        }
        self.allow(Kind::Other, path)?;
        std::fs::remove_dir(path).map_err(FileError::at(path))
    }

    /// What is in a folder, sorted.
    pub fn entries(&self, path: &Path) -> Result<Vec<PathBuf>, FileError> {
        let entries = std::fs::read_dir(path).and_then(|entries| {
            entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<PathBuf>>>()
        });
        let mut entries = entries.map_err(FileError::at(path))?;
        entries.sort();
        Ok(entries)
    }
}

/// The folder that a path is in.
pub fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    }
}

/// Where a file is written before it takes its name.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    parent(path).join(format!(".{name}{WRITING}"))
}

/// How names of files end that are being written; what is left of them may be removed.
pub const WRITING: &str = ".writing";

/// A file that is being written; it counts and hashes what it is given.
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
    /// Takes all bytes.
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

    /// All that was put is on the disk.
    pub fn finish(mut self) -> Result<Written, FileError> {
        self.flush_buffer()?;
        self.files.allow(Kind::Write, &self.path)?;
        self.file.sync_all().map_err(FileError::at(&self.path))?;
        if let Some(faults) = &self.files.faults {
            faults.synced(&self.path);
        }
        Ok(Written { bytes: self.bytes, xxh3: self.hasher.hex() })
    }

    fn flush_buffer(&mut self) -> Result<(), FileError> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let failed_before = self.files.has_failed();
        if let Err(error) = self.files.allow(Kind::Write, &self.path) {
            if !failed_before {
                // What was on its way when the fault struck arrives in part.
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
    fn a_file_is_what_was_put_and_its_checksum_is_xxh3() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("file");
        let bytes: Vec<u8> = (0..3 * BUFFER_BYTES + 17).map(|index| (index % 251) as u8).collect();
        let mut writer = Files::real().create(&path).expect("created");
        for piece in bytes.chunks(700_001) {
            writer.put(piece).expect("written");
        }
        let written = writer.finish().expect("finished");
        assert_eq!(std::fs::read(&path).expect("readable"), bytes);
        assert_eq!((written.bytes, &written), (bytes.len() as u64, &measure(&path).expect("readable")));
        assert_eq!(
            Xxh3::default().hex(),
            "2d06800538d394c2",
            "the checksum of nothing, from the specification of xxh3"
        );
    }

    #[test]
    fn writing_whole_replaces_or_leaves() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("latest");
        Files::real().write_whole(&path, b"old").expect("written");
        for fault in [Fault::Crash, Fault::PowerLoss, Fault::DiskFull] {
            for operation in 0.. {
                let files = Files::failing(fault, operation);
                let done = files.write_whole(&path, b"new");
                let text = std::fs::read(&path).expect("always there");
                assert!(text == b"old" || text == b"new", "{fault:?} at {operation}: {text:?}");
                if done.is_ok() {
                    assert_eq!(text, b"new");
                    assert!(operation > 2, "{fault:?} never struck");
                    break;
                }
                assert!(files.has_failed());
            }
            Files::real().write_whole(&path, b"old").expect("written");
        }
    }

    #[test]
    fn folders_are_made_with_all_above_them_and_removed_with_all_within() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let deep = folder.path().join("a/b/c");
        let files = Files::real();
        files.create_folders(&deep).expect("made");
        files.create_folders(&deep).expect("there already");
        files.write_new(&deep.join("x"), b"x").expect("written");
        files.remove_folder(&folder.path().join("a")).expect("removed");
        assert!(files.entries(folder.path()).expect("readable").is_empty());
        files.write_new(&folder.path().join("file"), b"").expect("written");
        assert!(files.create_folder(&folder.path().join("file")).is_err());
    }
}
