//! Trims the event files of earlier attempts when a run resumes: removes all steps that the run will repeat.
//!
//! Steps never decrease within a file, so a file is cut at the first record whose step will be repeated. If a crash
//! interrupts the trimming, the next resume finishes it.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::path::{Path, PathBuf};

use prost::Message;

use super::error::BoardError;
use super::event::Stamp;
use super::hparams;
use super::record::{HEADER_BYTES, Next, RecordReader, header};
use crate::files::FileError;

/// Prefix of the name of every event file.
pub(super) const PREFIX: &str = "events.out.tfevents.";
/// Length of the data in a file's first record, in bytes. This record holds a wall time and the text `brain.Event:2`.
pub(super) const FIRST_RECORD_BYTES: u64 = 24;

/// The event files of a folder, sorted by name. The file with the hyperparameters is left out, because it has no steps.
pub(super) fn event_files(folder: &Path) -> Result<Vec<PathBuf>, BoardError> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(FileError::at(folder))? {
        let entry = entry.map_err(FileError::at(folder))?;
        let name = entry.file_name();
        if name.to_string_lossy().starts_with(PREFIX) && name != hparams::FILE {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

/// How much of an event file is kept. The kept part begins at the start of the file.
#[derive(Debug, PartialEq, Eq)]
struct KeptPrefix {
    /// Length of the kept part, in bytes.
    bytes: u64,
    /// Number of records in the kept part, not counting the first record of the file.
    records: u64,
}

/// Removes all records with a step after `last_step` (all records if `last_step` is `None`), incomplete records, and
/// files without a remaining record. A damaged file is renamed with a warning: a run should not fail because the curves
/// of an earlier attempt are lost. All files are examined before the first one is changed.
pub(super) fn trim(files: &[PathBuf], last_step: Option<u64>) -> Result<(), BoardError> {
    let examine = |path: &PathBuf| match kept_part(path, last_step) {
        Err(BoardError::Corrupt { reason, .. }) => Ok(Err(reason)),
        found => found.map(Ok),
    };
    let kept: Result<Vec<Result<KeptPrefix, String>>, BoardError> = files.iter().map(examine).collect();
    for (path, kept) in files.iter().zip(kept?) {
        let kept = match kept {
            Ok(kept) => kept,
            Err(reason) => {
                set_aside(path, &reason)?;
                continue;
            }
        };
        if kept.records == 0 {
            std::fs::remove_file(path).map_err(FileError::at(path))?;
            continue;
        }
        let file = OpenOptions::new().write(true).open(path).map_err(FileError::at(path))?;
        if file.metadata().map_err(FileError::at(path))?.len() > kept.bytes {
            file.set_len(kept.bytes).and_then(|()| file.sync_all()).map_err(FileError::at(path))?;
        }
    }
    Ok(())
}

/// Renames a damaged file so that TensorBoard ignores it.
fn set_aside(path: &Path, reason: &str) -> Result<(), BoardError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().replace("tfevents", "damaged");
    let aside = path.with_file_name(name);
    std::fs::rename(path, &aside).map_err(FileError::at(path))?;
    tracing::warn!("{}: {reason}; renamed to {}", path.display(), aside.display());
    Ok(())
}

fn kept_part(path: &Path, last_step: Option<u64>) -> Result<KeptPrefix, BoardError> {
    let mut reader = File::open(path).and_then(RecordReader::new).map_err(FileError::at(path))?;
    let nothing = KeptPrefix { bytes: 0, records: 0 };
    match reader.next().map_err(FileError::at(path))? {
        Next::Record(data) if is_first(&data) => {}
        Next::End => return Ok(nothing),
        Next::Torn if starts_like_ours(path)? => return Ok(nothing),
        _ => return Err(BoardError::corrupt(path, "not a TensorBoard event file")),
    }
    let mut records = 0;
    loop {
        let offset = reader.offset();
        match reader.next().map_err(FileError::at(path))? {
            Next::Record(data) => {
                let stamp = Stamp::decode(data.as_slice())
                    .map_err(|error| BoardError::corrupt(path, format!("byte {offset}: {error}")))?;
                if last_step.is_none_or(|last| u64::try_from(stamp.step).is_ok_and(|step| step > last)) {
                    return Ok(KeptPrefix { bytes: offset, records });
                }
                records += 1;
            }
            Next::End | Next::Torn => return Ok(KeptPrefix { bytes: offset, records }),
            Next::Damaged(reason) => return Err(BoardError::corrupt(path, format!("byte {offset}: {reason}"))),
        }
    }
}

fn is_first(data: &[u8]) -> bool {
    let version = Stamp::decode(data).ok().and_then(|stamp| stamp.file_version);
    version.is_some_and(|version| version.starts_with("brain.Event:"))
}

/// Whether a file without a complete record may be the truncated or zero-filled start of a file that this project
/// wrote. Other files must not be removed.
fn starts_like_ours(path: &Path) -> Result<bool, BoardError> {
    let mut found = Vec::new();
    let head = File::open(path).and_then(|file| file.take(HEADER_BYTES as u64).read_to_end(&mut found));
    head.map_err(FileError::at(path))?;
    let written = found.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    Ok(header(FIRST_RECORD_BYTES).starts_with(&found[..written]))
}
