//! Reads the parts of a checkpoint, and exported files. Every read of a part compares the file with the length and, unless
//! another process on this machine does so ([`Checkpoint::unchecked`]), with the checksum in the manifest, and every read of an exported file compares it with the checksum in its metadata.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use locdiff_core::exported::{ExportReader, HEADER_BYTES_MAX, ModelState};
use locdiff_core::files::{FileError, HashedReader, TakeError, Xxh3, wait_until_visible};
use locdiff_core::protocol::{CHECKPOINT_FORMAT, CHECKPOINT_MANIFEST, CheckpointFile, CheckpointManifest};
use serde_json::Value;
use tch::Tensor;

use super::error::CheckpointError;
use super::header::{Header, HeaderError, TensorEntry};
use super::pieces::{NamedTensors, join};
use super::{STATE, piece_name};

/// How long to wait for the manifest of a checkpoint that another machine has just written.
const PATIENCE: Duration = Duration::from_secs(1);

/// A committed checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: CheckpointManifest,
    xxh3: String,
    /// Whether the files are compared with their checksums when they are read.
    is_checked: bool,
}

impl Checkpoint {
    /// Opens the checkpoint in `folder` and reads its manifest. A listed file is verified when it is read.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(CHECKPOINT_MANIFEST);
        wait_until_visible(&path, PATIENCE);
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
        let mut hasher = Xxh3::default();
        hasher.update(&text);
        Ok(Self { folder: folder.to_owned(), manifest, xxh3: hasher.hex(), is_checked: true })
    }

    /// The checkpoint, for a process that need not compare the files with their checksums, because another process on
    /// this machine does so.
    #[must_use]
    pub fn unchecked(self) -> Self {
        Self { is_checked: false, ..self }
    }

    /// The manifest.
    pub fn manifest(&self) -> &CheckpointManifest {
        &self.manifest
    }

    /// Checksum of the manifest. It identifies the checkpoint, because the manifest has the checksums of all files.
    pub fn xxh3(&self) -> &str {
        &self.xxh3
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
            return load(&self.folder, file, self.is_checked).map(|(_, tensors)| Some(tensors));
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
            loaded.push(load(&self.folder, self.required_file(&piece_name(part, piece, pieces))?, self.is_checked)?);
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

    /// The part of `state.json` that a prediction needs. Fails if the checkpoint comes from a version of the program
    /// that has different configuration fields.
    pub fn model_state(&self) -> Result<ModelState, CheckpointError> {
        let state = self.json(STATE)?;
        serde_json::from_value(state).map_err(|error| CheckpointError::bad(&self.folder.join(STATE), error))
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

/// An open file of a checkpoint, which is compared with the manifest.
struct Checked<'a> {
    file: HashedReader,
    want: &'a CheckpointFile,
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
        let file = HashedReader::open(&path).map_err(|error| match error.error.kind() {
            ErrorKind::NotFound => CheckpointError::corrupt(&path, "is missing"),
            _ => error.into(),
        })?;
        if file.left() != want.bytes {
            let reason = format!("the file has {} bytes, but {CHECKPOINT_MANIFEST} says {}", file.left(), want.bytes);
            return Err(CheckpointError::corrupt(&path, reason));
        }
        Ok(Self { file, want })
    }

    fn take(&mut self, bytes: u64) -> Result<Vec<u8>, CheckpointError> {
        self.file.take(bytes).map_err(|error| match error {
            TakeError::Short(reason) => CheckpointError::corrupt(self.file.path(), reason),
            TakeError::Io(error) => error.into(),
        })
    }

    fn finish(self) -> Result<(), CheckpointError> {
        let got = self.file.hex();
        if self.file.left() == 0 && (got == self.want.xxh3 || !self.file.is_hashing()) {
            return Ok(());
        }
        let reason = format!("the xxh3 checksum is {got}, but {CHECKPOINT_MANIFEST} says {}", self.want.xxh3);
        Err(CheckpointError::corrupt(self.file.path(), reason))
    }
}

/// Reads the tensors of a safetensors file into main memory, in the order in which the file stores them.
pub fn load_tensors(folder: &Path, want: &CheckpointFile) -> Result<Vec<(String, Tensor)>, CheckpointError> {
    load(folder, want, true).map(|(_, tensors)| tensors)
}

/// Like [`load_tensors`], but also returns the header of the file, and compares the file with its checksum only if
/// `is_checked`.
fn load(folder: &Path, want: &CheckpointFile, is_checked: bool) -> Result<(Header, NamedTensors), CheckpointError> {
    let mut file = Checked::open(folder, want)?;
    if !is_checked {
        file.file.stop_hashing();
    }
    let size = file.take(8)?.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
    if size > HEADER_BYTES_MAX {
        let reason = format!("the header has {size} bytes, wanted at most {HEADER_BYTES_MAX}");
        return Err(CheckpointError::corrupt(file.file.path(), reason));
    }
    let text = file.take(size)?;
    let header = parse_header(file.file.path(), &text, file.file.left())?;
    let tensors = tensors_of(&header, |bytes| file.take(bytes))?;
    file.finish()?;
    Ok((header, tensors))
}

/// Reads the tensors of an exported file into main memory, in the order in which the file stores them.
pub fn load_export(path: &Path) -> Result<NamedTensors, CheckpointError> {
    let mut file = ExportReader::open(path)?;
    let header = parse_header(path, file.header(), file.left())?;
    let tensors = tensors_of(&header, |bytes| Ok(file.take(bytes)?))?;
    file.finish()?;
    Ok(tensors)
}

fn parse_header(path: &Path, text: &[u8], data_bytes: u64) -> Result<Header, CheckpointError> {
    Header::parse(text, data_bytes).map_err(|error| match error {
        HeaderError::Malformed(_) => CheckpointError::corrupt(path, error),
        HeaderError::Unsupported(_) => CheckpointError::bad(path, error),
    })
}

/// The tensors of a file. `take` reads the next bytes of the file.
fn tensors_of(
    header: &Header,
    mut take: impl FnMut(u64) -> Result<Vec<u8>, CheckpointError>,
) -> Result<NamedTensors, CheckpointError> {
    let tensor = |entry: &TensorEntry| {
        let bytes = take(entry.bytes)?;
        Ok((entry.name.clone(), Tensor::f_from_data_size(&bytes, &entry.shape, entry.kind)?))
    };
    header.tensors.iter().map(tensor).collect()
}

/// Reads all bytes of a file.
pub fn load_bytes(folder: &Path, want: &CheckpointFile) -> Result<Vec<u8>, CheckpointError> {
    let mut file = Checked::open(folder, want)?;
    let bytes = file.take(want.bytes)?;
    file.finish()?;
    Ok(bytes)
}
