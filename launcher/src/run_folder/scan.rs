//! Checkpoints of a run as they lie there. Nothing here changes a file.
//!
//! Only what proves that bytes are not those that were written makes a checkpoint damaged: a checksum, a length, a file
//! that is listed and not there, a manifest that cannot be understood. What the system refuses to read says nothing about it.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files;
use locdiff_core::protocol::{CHECKPOINT_FORMAT, CHECKPOINT_MANIFEST, CheckpointFile, CheckpointManifest};
use serde::{Deserialize, Serialize};

use super::names::{is_plain, set_aside_step_of, step_of};
use crate::error::{LaunchError, refuse, reported};

/// Waits between the tries to read what the system refused.
const RETRY_WAITS: [Duration; 3] = [Duration::from_millis(50), Duration::from_millis(200), Duration::from_millis(500)];

/// No manifest is larger.
const MANIFEST_BYTES_MAX: u64 = 16 << 20;

/// How closely to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// The manifest, and the length of each file.
    Lengths,
    /// Every byte.
    Checksums,
}

/// What a look at a checkpoint found.
#[derive(Debug, Clone, PartialEq)]
pub enum Condition {
    /// All is as it was written.
    Whole(CheckpointManifest),
    /// It is not, and this is why.
    Damaged(String),
    /// It was removed while it was looked at.
    Gone,
}

/// A checkpoint that is whole.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    /// Its folder.
    pub path: PathBuf,
    /// What is in it.
    pub manifest: CheckpointManifest,
}

/// One line of `checkpoint list` and `checkpoint verify`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CheckpointRow {
    /// Steps made.
    pub step: u64,
    /// Name of its folder.
    pub name: String,
    /// `present` (lengths fit), `whole` (checksums fit), `damaged`, or `set-aside` (damaged, found when the run was resumed).
    pub state: &'static str,
    /// What is wrong with it.
    pub reason: Option<String>,
    /// Length of all its files.
    pub bytes: u64,
    /// Validation score, where it was measured at this step.
    pub score: Option<f64>,
    /// When it was committed, seconds since 1970.
    pub committed_unix_s: Option<u64>,
    /// The attempt that wrote it.
    pub attempt: Option<u32>,
    /// It has the highest score.
    pub best: bool,
}

/// Folders of committed checkpoints with their steps, oldest first.
pub(super) fn committed(run: &Path) -> Result<Vec<(u64, PathBuf)>, LaunchError> {
    folders(run, step_of)
}

/// Folders that were set aside, oldest first.
pub(super) fn set_aside(run: &Path) -> Result<Vec<(u64, PathBuf)>, LaunchError> {
    folders(run, set_aside_step_of)
}

fn folders(run: &Path, step_of: impl Fn(&str) -> Option<u64>) -> Result<Vec<(u64, PathBuf)>, LaunchError> {
    let io = LaunchError::at(run);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(run).map_err(&io)? {
        let path = entry.map_err(&io)?.path();
        let step = path.file_name().and_then(|name| step_of(name.to_str()?));
        found.extend(step.filter(|_| path.is_dir()).map(|step| (step, path)));
    }
    found.sort();
    Ok(found)
}

/// The whole checkpoints of a run by their lengths, oldest first.
pub(super) fn present(run: &Path) -> Result<Vec<CheckpointManifest>, LaunchError> {
    let mut found = Vec::new();
    for (_, folder) in committed(run)? {
        if let Condition::Whole(manifest) = examine(&folder, Depth::Lengths)? {
            found.push(manifest);
        }
    }
    Ok(found)
}

/// Looks at one checkpoint; an error is what the system still refuses after some tries, or a later version's format.
pub fn examine(folder: &Path, depth: Depth) -> Result<Condition, LaunchError> {
    let mut found = examine_once(folder, depth);
    for wait in RETRY_WAITS {
        match &found {
            Err(error) if error.exit_code() == ExitCode::Io => tracing::warn!("{error}; trying again"),
            _ => break,
        }
        std::thread::sleep(wait);
        found = examine_once(folder, depth);
    }
    found
}

fn examine_once(folder: &Path, depth: Depth) -> Result<Condition, LaunchError> {
    let found = read_manifest(folder).and_then(|manifest| {
        check_manifest(folder, &manifest)?;
        manifest.files.iter().try_for_each(|file| check_file(folder, file, depth))?;
        Ok(manifest)
    });
    match found {
        Ok(manifest) => Ok(Condition::Whole(manifest)),
        Err(error) if error.exit_code() != ExitCode::Corrupt => Err(error),
        // Somebody who holds the run has removed it in the meantime.
        Err(_) if !folder.exists() => Ok(Condition::Gone),
        Err(damage) => Ok(Condition::Damaged(damage.to_string())),
    }
}

/// What a manifest of any version has.
#[derive(Deserialize)]
struct Version {
    format: u64,
}

/// An error `Corrupt` tells of damage, any other says nothing about the checkpoint; so with all checks.
fn read_manifest(folder: &Path) -> Result<CheckpointManifest, LaunchError> {
    let path = folder.join(CHECKPOINT_MANIFEST);
    let io = LaunchError::at(&path);
    match std::fs::metadata(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            refuse!(Corrupt, "no {CHECKPOINT_MANIFEST}");
        }
        Err(error) => return Err(io(error)),
        Ok(found) if found.len() > MANIFEST_BYTES_MAX => {
            refuse!(Corrupt, "{CHECKPOINT_MANIFEST} has {} bytes", found.len());
        }
        Ok(_) => {}
    }
    let bytes = std::fs::read(&path).map_err(io)?;
    if let Ok(Version { format: later }) = serde_json::from_slice(&bytes)
        && later > u64::from(CHECKPOINT_FORMAT)
    {
        let path = path.display();
        refuse!(BadData, "{path}: format {later} is that of a later version, wanted {CHECKPOINT_FORMAT}");
    }
    serde_json::from_slice(&bytes)
        .map_err(|error| reported!(Corrupt, "{CHECKPOINT_MANIFEST} cannot be understood: {error}"))
}

fn check_manifest(folder: &Path, manifest: &CheckpointManifest) -> Result<(), LaunchError> {
    if manifest.format != CHECKPOINT_FORMAT {
        refuse!(Corrupt, "{CHECKPOINT_MANIFEST} says format {}, wanted {CHECKPOINT_FORMAT}", manifest.format);
    }
    let named = folder.file_name().and_then(|name| name.to_str());
    let step = named.and_then(|name| step_of(name).or_else(|| set_aside_step_of(name)));
    if step.is_some_and(|step| step != manifest.step) {
        refuse!(Corrupt, "{CHECKPOINT_MANIFEST} says step {}", manifest.step);
    }
    if manifest.files.is_empty() {
        refuse!(Corrupt, "{CHECKPOINT_MANIFEST} lists no file");
    }
    if let Some(file) = manifest.files.iter().find(|file| !is_plain(&file.name)) {
        refuse!(Corrupt, "{CHECKPOINT_MANIFEST} lists {:?}, which is no plain name", file.name);
    }
    Ok(())
}

fn check_file(folder: &Path, want: &CheckpointFile, depth: Depth) -> Result<(), LaunchError> {
    let path = folder.join(&want.name);
    let failed = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound => reported!(Corrupt, "{} is missing", want.name),
        _ => LaunchError::at(&path)(error),
    };
    let found = std::fs::metadata(&path).map_err(failed)?;
    if !found.is_file() {
        return Err(failed(ErrorKind::IsADirectory.into()));
    }
    if found.len() != want.bytes {
        refuse!(Corrupt, "{} has {} bytes, {CHECKPOINT_MANIFEST} says {}", want.name, found.len(), want.bytes);
    }
    if depth == Depth::Lengths {
        return Ok(());
    }
    let got = files::measure(&path).map_err(|error| failed(error.error))?;
    if got.xxh3 == want.xxh3 && got.bytes == want.bytes {
        return Ok(());
    }
    Err(reported!(Corrupt, "{}: xxh3 is {}, {CHECKPOINT_MANIFEST} says {}", want.name, got.xxh3, want.xxh3))
}

/// Every checkpoint of a run, oldest first, also those that were set aside.
pub fn checkpoints(run: &Path, depth: Depth) -> Result<Vec<CheckpointRow>, LaunchError> {
    let mut rows = Vec::new();
    for (step, folder) in committed(run)? {
        rows.extend(row(step, &folder, examine(&folder, depth)?, depth));
    }
    let best = rows.iter().filter_map(|row| row.score.map(|score| (score, row.step))).max_by(|a, b| better(*a, *b));
    for row in &mut rows {
        row.best = best.is_some_and(|(_, step)| step == row.step);
    }
    for (step, folder) in set_aside(run)? {
        let reason = Condition::Damaged("found damaged when the run was resumed".into());
        rows.extend(row(step, &folder, reason, depth).map(|row| CheckpointRow { state: "set-aside", ..row }));
    }
    rows.sort_by(|a, b| (a.step, &a.name).cmp(&(b.step, &b.name)));
    Ok(rows)
}

/// The higher score; of equal ones the later step.
pub(super) fn better(a: (f64, u64), b: (f64, u64)) -> std::cmp::Ordering {
    a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))
}

fn row(step: u64, folder: &Path, condition: Condition, depth: Depth) -> Option<CheckpointRow> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (state, reason, manifest) = match condition {
        Condition::Whole(manifest) if depth == Depth::Lengths => ("present", None, Some(manifest)),
        Condition::Whole(manifest) => ("whole", None, Some(manifest)),
        Condition::Damaged(reason) => ("damaged", Some(reason), None),
        Condition::Gone => return None,
    };
    Some(CheckpointRow {
        step,
        name,
        state,
        reason,
        bytes: manifest.iter().flat_map(|manifest| &manifest.files).map(|file| file.bytes).sum(),
        score: manifest.as_ref().and_then(|manifest| manifest.score),
        committed_unix_s: manifest.as_ref().map(|manifest| manifest.committed_unix_s),
        attempt: manifest.as_ref().map(|manifest| manifest.attempt),
        best: false,
    })
}

/// The newest whole checkpoint of a run, and a line for each that was passed over. Nothing is set aside.
pub fn newest_whole(run: &Path) -> Result<(Checkpoint, Vec<String>), LaunchError> {
    let mut passed_over = Vec::new();
    for (_, folder) in committed(run)?.into_iter().rev() {
        match examine(&folder, Depth::Checksums)? {
            Condition::Whole(manifest) => return Ok((Checkpoint { path: folder, manifest }, passed_over)),
            Condition::Damaged(reason) => passed_over.push(format!("{}: {reason}; passed over", folder.display())),
            Condition::Gone => {}
        }
    }
    let set_aside = set_aside(run)?.into_iter().map(|(_, folder)| format!("{}: set aside", folder.display()));
    passed_over.extend(set_aside);
    Err(none_whole(run, &passed_over))
}

/// The whole checkpoint that a folder stands for: itself, or the newest of a run; and a line for each that was passed over.
pub fn whole_checkpoint(target: &Path) -> Result<(Checkpoint, Vec<String>), LaunchError> {
    let named = target.file_name().and_then(|name| name.to_str());
    let is_checkpoint = target.join(CHECKPOINT_MANIFEST).exists() || named.is_some_and(|name| step_of(name).is_some());
    if !is_checkpoint {
        return newest_whole(target);
    }
    match examine(target, Depth::Checksums)? {
        Condition::Whole(manifest) => Ok((Checkpoint { path: target.to_owned(), manifest }, Vec::new())),
        Condition::Damaged(reason) => Err(reported!(Corrupt, "{}: {reason}", target.display())),
        Condition::Gone => Err(reported!(NoData, "no checkpoint at {}", target.display())),
    }
}

/// No checkpoint, or none that is whole.
pub(super) fn none_whole(run: &Path, damaged: &[String]) -> LaunchError {
    let run = run.display();
    if damaged.is_empty() {
        return reported!(NoData, "run {run} has no checkpoint yet");
    }
    reported!(
        Corrupt,
        "run {run} has no checkpoint that is whole:\n  {}\nput a copy of one in place, or train anew with `--run NAME`",
        damaged.join("\n  ")
    )
}
