//! Reads the parts of a checkpoint. Every read compares the file with the length and checksum in the manifest.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use locdiff_core::files::{FileError, Xxh3};
use locdiff_core::protocol::{CHECKPOINT_FORMAT, CHECKPOINT_MANIFEST, CheckpointFile, CheckpointManifest};
use serde_json::Value;
use tch::Tensor;

use super::error::CheckpointError;
use super::header::{HEADER_BYTES_MAX, Header, HeaderError};
use super::piece_name;
use super::pieces::{NamedTensors, join};

/// A committed checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: CheckpointManifest,
}

impl Checkpoint {
    /// Opens the checkpoint in `folder` and reads its manifest. A listed file is verified when it is read.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(CHECKPOINT_MANIFEST);
        let text = std::fs::read(&path).map_err(FileError::at(&path))?;
        let value: Value = serde_json::from_slice(&text).map_err(|error| CheckpointError::corrupt(&path, error))?;
        if let Some(later) = value["format"].as_u64().filter(|format| *format > u64::from(CHECKPOINT_FORMAT)) {
            let reason = format!(
                "the checkpoint has format {later}, but this version reads formats up to {CHECKPOINT_FORMAT}; \
                 use a newer version of locdiff-launch"
            );
            return Err(CheckpointError::bad(&path, reason));
        }
        let manifest: CheckpointManifest =
            serde_json::from_value(value).map_err(|error| CheckpointError::corrupt(&path, error))?;
        if let Some(file) = manifest.files.iter().find(|file| !is_plain_name(&file.name)) {
            return Err(CheckpointError::corrupt(
                &path,
                format!("lists the file {:?}, whose name is empty, begins with a dot or contains a slash", file.name),
            ));
        }
        Ok(Self { folder: folder.to_owned(), manifest })
    }

    /// The manifest.
    pub fn manifest(&self) -> &CheckpointManifest {
        &self.manifest
    }

    /// The manifest entry of the file `name`; `None` if the manifest does not list the file.
    pub fn file(&self, name: &str) -> Option<&CheckpointFile> {
        self.manifest.files.iter().find(|file| file.name == name)
    }

    fn required_file(&self, name: &str) -> Result<&CheckpointFile, CheckpointError> {
        let missing = || CheckpointError::bad(&self.folder, format!("{CHECKPOINT_MANIFEST} does not list {name}"));
        self.file(name).ok_or_else(missing)
    }

    /// The whole tensors of a part such as `weights`, joined if they were written in pieces. `None` if the checkpoint
    /// does not have the part.
    pub fn find_tensors(&self, part: &str) -> Result<Option<Vec<(String, Tensor)>>, CheckpointError> {
        if let Some(file) = self.file(&piece_name(part, 0, 1)) {
            return load_tensors(&self.folder, file).map(Some);
        }
        let counts: BTreeSet<u32> = self.manifest.files.iter().filter_map(|file| pieces_of(part, &file.name)).collect();
        let pieces = match (counts.first(), counts.len()) {
            (None, _) => return Ok(None),
            (Some(pieces), 1) => *pieces,
            _ => {
                let reason = format!(
                    "{CHECKPOINT_MANIFEST} lists pieces of {part} that disagree on the number of pieces: \
                     {counts:?}"
                );
                return Err(CheckpointError::bad(&self.folder, reason));
            }
        };
        let mut loaded = Vec::new();
        for piece in 0..pieces {
            loaded.push(load(&self.folder, self.required_file(&piece_name(part, piece, pieces))?)?);
        }
        let (headers, tensors): (Vec<Header>, Vec<NamedTensors>) = loaded.into_iter().unzip();
        let metadata: Vec<_> = headers.into_iter().map(|header| header.metadata).collect();
        let first = self.folder.join(piece_name(part, 0, pieces));
        join(&metadata, tensors).map(Some).map_err(|reason| CheckpointError::bad(&first, reason))
    }

    /// The whole tensors of a part; an error if the checkpoint does not have the part.
    pub fn tensors(&self, part: &str) -> Result<Vec<(String, Tensor)>, CheckpointError> {
        let found = self.find_tensors(part)?;
        let missing = || {
            let reason = format!("{CHECKPOINT_MANIFEST} does not list {}", piece_name(part, 0, 1));
            CheckpointError::bad(&self.folder, reason)
        };
        found.ok_or_else(missing)
    }

    /// Reads and parses a JSON file of the checkpoint, such as `state.json`.
    pub fn json(&self, name: &str) -> Result<Value, CheckpointError> {
        let bytes = load_bytes(&self.folder, self.required_file(name)?)?;
        serde_json::from_slice(&bytes).map_err(|error| CheckpointError::corrupt(&self.folder.join(name), error))
    }
}

/// The number of pieces of `part`, taken from the file name of one piece. `None` if the file `name` is not a piece of
/// `part`.
fn pieces_of(part: &str, name: &str) -> Option<u32> {
    let rest = name.strip_prefix(part)?.strip_prefix('-')?.strip_suffix(".safetensors")?;
    let (piece, pieces) = rest.split_once("-of-")?;
    let (piece, pieces) = (piece.parse::<u32>().ok()?, pieces.parse::<u32>().ok()?);
    (piece < pieces).then_some(pieces)
}

fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

/// An open file of a checkpoint. Counts and hashes the bytes that are read, so that [`Checked::finish`] can verify the
/// checksum.
struct Checked<'a> {
    path: PathBuf,
    want: &'a CheckpointFile,
    file: File,
    hasher: Xxh3,
    left: u64,
}

impl<'a> Checked<'a> {
    fn open(folder: &Path, want: &'a CheckpointFile) -> Result<Self, CheckpointError> {
        let path = folder.join(&want.name);
        if !is_plain_name(&want.name) {
            return Err(CheckpointError::corrupt(
                &path,
                "the file name is empty, begins with a dot or contains a slash",
            ));
        }
        let file = File::open(&path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => CheckpointError::corrupt(&path, "is missing"),
            _ => FileError::at(&path)(error).into(),
        })?;
        let found = file.metadata().map_err(FileError::at(&path))?;
        if !found.is_file() {
            return Err(FileError::at(&path)(ErrorKind::IsADirectory.into()).into());
        }
        if found.len() != want.bytes {
            let reason = format!("the file has {} bytes, but {CHECKPOINT_MANIFEST} says {}", found.len(), want.bytes);
            return Err(CheckpointError::corrupt(&path, reason));
        }
        Ok(Self { path, want, file, hasher: Xxh3::default(), left: want.bytes })
    }

    /// Reads exactly `bytes` bytes. If fewer bytes are left in the file, this fails before it allocates memory.
    fn take(&mut self, bytes: u64) -> Result<Vec<u8>, CheckpointError> {
        if bytes > self.left {
            let reason =
                format!("the file ends too early: {bytes} more bytes are needed, but only {} are left", self.left);
            return Err(CheckpointError::corrupt(&self.path, reason));
        }
        let length = usize::try_from(bytes).map_err(|error| CheckpointError::bad(&self.path, error))?;
        let mut buffer = vec![0; length];
        self.file.read_exact(&mut buffer).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => CheckpointError::corrupt(&self.path, "the file ended during the read"),
            _ => FileError::at(&self.path)(error).into(),
        })?;
        self.hasher.update(&buffer);
        self.left -= bytes;
        Ok(buffer)
    }

    fn finish(self) -> Result<(), CheckpointError> {
        let got = self.hasher.hex();
        if self.left == 0 && got == self.want.xxh3 {
            return Ok(());
        }
        let reason = format!("the xxh3 checksum is {got}, but {CHECKPOINT_MANIFEST} says {}", self.want.xxh3);
        Err(CheckpointError::corrupt(&self.path, reason))
    }
}

/// Reads the tensors of a safetensors file into main memory, in the order in which the file stores them.
pub fn load_tensors(folder: &Path, want: &CheckpointFile) -> Result<Vec<(String, Tensor)>, CheckpointError> {
    load(folder, want).map(|(_, tensors)| tensors)
}

/// Like [`load_tensors`], but also returns the header of the file.
fn load(folder: &Path, want: &CheckpointFile) -> Result<(Header, NamedTensors), CheckpointError> {
    let mut file = Checked::open(folder, want)?;
    let size = file.take(8)?.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
    if size > HEADER_BYTES_MAX {
        let reason = format!("the header has {size} bytes, wanted at most {HEADER_BYTES_MAX}");
        return Err(CheckpointError::corrupt(&file.path, reason));
    }
    let text = file.take(size)?;
    let header = Header::parse(&text, file.left).map_err(|error| match error {
        HeaderError::Malformed(_) => CheckpointError::corrupt(&file.path, error),
        HeaderError::Unsupported(_) => CheckpointError::bad(&file.path, error),
    })?;
    let mut tensors = Vec::with_capacity(header.tensors.len());
    for entry in &header.tensors {
        let bytes = file.take(entry.bytes)?;
        tensors.push((entry.name.clone(), Tensor::f_from_data_size(&bytes, &entry.shape, entry.kind)?));
    }
    file.finish()?;
    Ok((header, tensors))
}

/// Reads all bytes of a file.
pub fn load_bytes(folder: &Path, want: &CheckpointFile) -> Result<Vec<u8>, CheckpointError> {
    let mut file = Checked::open(folder, want)?;
    let bytes = file.take(want.bytes)?;
    file.finish()?;
    Ok(bytes)
}
