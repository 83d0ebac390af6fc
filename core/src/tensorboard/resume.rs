//! What of earlier attempts stays when a run goes on: nothing of a step that will be made again.
//!
//! Steps never go back within a file, so that everything behind the first record of a later step goes with it. A crash in
//! between leaves files that the next resume cuts further.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::path::{Path, PathBuf};

use prost::Message;

use super::error::BoardError;
use super::event::Stamp;
use super::hparams;
use super::record::{HEADER_BYTES, Next, Reader, header};
use crate::files::FileError;

/// How the name of every event file begins.
pub(super) const PREFIX: &str = "events.out.tfevents.";
/// Data of the first record: a wall time and `brain.Event:2`.
pub(super) const FIRST_RECORD_BYTES: u64 = 24;

/// The event files of a folder, by name, but that of the hyperparameters: it has no steps.
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

/// What of a file may stay.
#[derive(Debug, PartialEq, Eq)]
struct Kept {
    /// Length of what stays.
    bytes: u64,
    /// Records that stay, besides the first.
    records: u64,
}

/// Removes whatever has a step after `last_step` (all steps where there is none), and records that were not written to their
/// end. A damaged file is set aside: curves are worth a warning, not the run. All files are looked at before the first is
/// changed.
pub(super) fn trim(files: &[PathBuf], last_step: Option<u64>) -> Result<(), BoardError> {
    let look = |path: &PathBuf| match kept_part(path, last_step) {
        Err(BoardError::Corrupt { reason, .. }) => Ok(Err(reason)),
        found => found.map(Ok),
    };
    let kept: Result<Vec<Result<Kept, String>>, BoardError> = files.iter().map(look).collect();
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

/// Gives a file a name that TensorBoard does not look at.
fn set_aside(path: &Path, reason: &str) -> Result<(), BoardError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().replace("tfevents", "damaged");
    let aside = path.with_file_name(name);
    std::fs::rename(path, &aside).map_err(FileError::at(path))?;
    tracing::warn!("{}: {reason}; set aside as {}", path.display(), aside.display());
    Ok(())
}

fn kept_part(path: &Path, last_step: Option<u64>) -> Result<Kept, BoardError> {
    let mut reader = File::open(path).and_then(Reader::new).map_err(FileError::at(path))?;
    let nothing = Kept { bytes: 0, records: 0 };
    match reader.next().map_err(FileError::at(path))? {
        Next::Record(data) if is_first(&data) => {}
        Next::End => return Ok(nothing),
        Next::Torn if begins_as_ours(path)? => return Ok(nothing),
        _ => return Err(BoardError::corrupt(path, "is no TensorBoard event file")),
    }
    let mut records = 0;
    loop {
        let place = reader.place();
        match reader.next().map_err(FileError::at(path))? {
            Next::Record(data) => {
                let stamp = Stamp::decode(data.as_slice())
                    .map_err(|error| BoardError::corrupt(path, format!("byte {place}: {error}")))?;
                if last_step.is_none_or(|last| u64::try_from(stamp.step).is_ok_and(|step| step > last)) {
                    return Ok(Kept { bytes: place, records });
                }
                records += 1;
            }
            Next::End | Next::Torn => return Ok(Kept { bytes: place, records }),
            Next::Damaged(reason) => return Err(BoardError::corrupt(path, format!("byte {place}: {reason}"))),
        }
    }
}

fn is_first(data: &[u8]) -> bool {
    let version = Stamp::decode(data).ok().and_then(|stamp| stamp.file_version);
    version.is_some_and(|version| version.starts_with("brain.Event:"))
}

/// Whether a file without a whole record could be one that was cut, or whose end reads as zeros: anything else that lies here is not ours to remove.
fn begins_as_ours(path: &Path) -> Result<bool, BoardError> {
    let mut found = Vec::new();
    let head = File::open(path).and_then(|file| file.take(HEADER_BYTES as u64).read_to_end(&mut found));
    head.map_err(FileError::at(path))?;
    let written = found.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    Ok(header(FIRST_RECORD_BYTES).starts_with(&found[..written]))
}
