//! Reads and checks the checkpoints of a run. The functions of this module change no files.
//!
//! A checkpoint counts as damaged only if its content is provably wrong: a checksum or a length differs, a listed file
//! is missing, or the manifest is missing or invalid. An I/O error does not prove damage and is reported as an error.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files;
use locdiff_core::protocol::{CHECKPOINT_FORMAT, CHECKPOINT_MANIFEST, CheckpointFile, CheckpointManifest};
use serde::{Deserialize, Serialize};

use super::names::{is_plain, set_aside_step_of, step_of};
use super::records::{claims, counts};
use crate::error::{LaunchError, refuse, reported};

/// How long to wait before each retry after an I/O error.
const RETRY_WAITS: [Duration; 3] = [Duration::from_millis(50), Duration::from_millis(200), Duration::from_millis(500)];

/// Largest size of a manifest, bytes. A larger manifest counts as damaged.
const MANIFEST_BYTES_MAX: u64 = 16 << 20;

/// How thoroughly to check a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Check the manifest and the length of each file.
    Lengths,
    /// Check the manifest, and the length and checksum of each file.
    Checksums,
}

/// Result of checking a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub enum Condition {
    /// All files match the manifest. [`Depth`] says what was compared.
    Whole(CheckpointManifest),
    /// The checkpoint is damaged, for this reason.
    Damaged(String),
    /// The checkpoint was removed during the check.
    Gone,
}

/// A checkpoint whose files all match its manifest.
#[derive(Debug, Clone, PartialEq)]
pub struct WholeCheckpoint {
    /// The folder.
    pub path: PathBuf,
    /// The manifest.
    pub manifest: CheckpointManifest,
}

/// One line of `checkpoint list` and `checkpoint verify`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CheckpointRow {
    /// Training step.
    pub step: u64,
    /// Name of the folder.
    pub name: String,
    /// `present` (lengths match), `whole` (checksums match), `damaged`, or `set-aside` (found damaged when the run was
    /// resumed).
    pub state: &'static str,
    /// Why the checkpoint is damaged.
    pub reason: Option<String>,
    /// Total length of the files in bytes, or 0 if the checkpoint is damaged.
    pub bytes: u64,
    /// Validation score, if it was measured at this step.
    pub score: Option<f64>,
    /// When the checkpoint was committed, seconds since 1970.
    pub committed_unix_s: Option<u64>,
    /// The attempt that wrote the checkpoint.
    pub attempt: Option<u32>,
    /// Whether the checkpoint has the highest score of the run.
    pub best: bool,
}

/// Steps and folders of the committed checkpoints that count, oldest first.
pub(super) fn committed(run: &Path) -> Result<Vec<(u64, PathBuf)>, LaunchError> {
    let mut found = folders(run, step_of)?;
    let stale = stale(run, &found)?;
    found.retain(|(_, folder)| !stale.contains(folder));
    Ok(found)
}

/// The folders of the checkpoints that do not count, because an earlier attempt committed them after the next one had
/// begun.
pub(super) fn all_stale(run: &Path) -> Result<Vec<PathBuf>, LaunchError> {
    stale(run, &folders(run, step_of)?)
}

/// Step and attempt of each checkpoint that counts, whole or damaged. The attempt is unknown if the manifest cannot be
/// read.
pub(super) fn listed(run: &Path) -> Result<Vec<(u64, Option<u32>)>, LaunchError> {
    let attempt = |folder: &Path| read_manifest(folder).ok().map(|manifest| manifest.attempt);
    Ok(committed(run)?.into_iter().map(|(step, folder)| (step, attempt(&folder))).collect())
}

/// The stale checkpoints among `found`. A checkpoint whose manifest cannot be read is damaged, not stale.
fn stale(run: &Path, found: &[(u64, PathBuf)]) -> Result<Vec<PathBuf>, LaunchError> {
    let (claims, mut stale) = (claims(run)?, Vec::new());
    for (_, folder) in found.iter().filter(|_| !claims.is_empty()) {
        if let Ok(manifest) = read_manifest(folder)
            && !counts(run, &claims, &manifest)?
        {
            stale.push(folder.clone());
        }
    }
    Ok(stale)
}

/// Steps and folders of checkpoints that were set aside, oldest first.
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

/// Manifests of the committed checkpoints whose files have the lengths in the manifest, oldest first.
pub(super) fn present(run: &Path) -> Result<Vec<CheckpointManifest>, LaunchError> {
    let mut found = Vec::new();
    for (_, folder) in committed(run)? {
        if let Condition::Whole(manifest) = examine(&folder, Depth::Lengths)? {
            found.push(manifest);
        }
    }
    Ok(found)
}

/// Checks one checkpoint. Fails if an I/O error persists after several retries, or if the checkpoint has the format of
/// a later version.
pub fn examine(folder: &Path, depth: Depth) -> Result<Condition, LaunchError> {
    let mut found = examine_once(folder, depth);
    for wait in RETRY_WAITS {
        match &found {
            Err(error) if error.exit_code() == ExitCode::Io => tracing::warn!("{error}; retrying"),
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
        // The launcher that holds the run has removed the checkpoint in the meantime.
        Err(_) if !folder.exists() => Ok(Condition::Gone),
        Err(damage) => Ok(Condition::Damaged(damage.to_string())),
    }
}

/// The only field that every version of the manifest has.
#[derive(Deserialize)]
struct ManifestFormat {
    format: u64,
}

/// Reads the manifest of a checkpoint. If this function, `check_manifest` or `check_file` fails with the exit code
/// `Corrupt`, the checkpoint is damaged. An error with any other code does not mean damage.
fn read_manifest(folder: &Path) -> Result<CheckpointManifest, LaunchError> {
    let path = folder.join(CHECKPOINT_MANIFEST);
    let io = LaunchError::at(&path);
    match std::fs::metadata(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            refuse!(Corrupt, "it has no {CHECKPOINT_MANIFEST}");
        }
        Err(error) => return Err(io(error)),
        Ok(found) if found.len() > MANIFEST_BYTES_MAX => {
            refuse!(Corrupt, "{CHECKPOINT_MANIFEST} has {} bytes, wanted at most {MANIFEST_BYTES_MAX}", found.len());
        }
        Ok(_) => {}
    }
    let bytes = std::fs::read(&path).map_err(io)?;
    if let Ok(ManifestFormat { format: later }) = serde_json::from_slice(&bytes)
        && later > u64::from(CHECKPOINT_FORMAT)
    {
        let path = path.display();
        refuse!(
            BadData,
            "{path}: format {later} is from a later version, wanted {CHECKPOINT_FORMAT}; use the version that wrote it"
        );
    }
    serde_json::from_slice(&bytes)
        .map_err(|error| reported!(Corrupt, "{CHECKPOINT_MANIFEST} cannot be parsed: {error}"))
}

fn check_manifest(folder: &Path, manifest: &CheckpointManifest) -> Result<(), LaunchError> {
    if manifest.format != CHECKPOINT_FORMAT {
        refuse!(Corrupt, "{CHECKPOINT_MANIFEST} has format {}, wanted {CHECKPOINT_FORMAT}", manifest.format);
    }
    let named = folder.file_name().and_then(|name| name.to_str());
    let step = named.and_then(|name| step_of(name).or_else(|| set_aside_step_of(name)));
    if let Some(step) = step.filter(|step| *step != manifest.step) {
        let got = manifest.step;
        refuse!(Corrupt, "{CHECKPOINT_MANIFEST} is for step {got}, but the folder is named for step {step}");
    }
    if manifest.files.is_empty() {
        refuse!(Corrupt, "{CHECKPOINT_MANIFEST} lists no files");
    }
    if let Some(file) = manifest.files.iter().find(|file| !is_plain(&file.name)) {
        refuse!(Corrupt, "{CHECKPOINT_MANIFEST} lists {:?}, which is not a valid file name", file.name);
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
        refuse!(Corrupt, "{} has {} bytes, but {CHECKPOINT_MANIFEST} says {}", want.name, found.len(), want.bytes);
    }
    if depth == Depth::Lengths {
        return Ok(());
    }
    let got = files::measure(&path).map_err(|error| failed(error.error))?;
    if got.xxh3 == want.xxh3 && got.bytes == want.bytes {
        return Ok(());
    }
    Err(reported!(Corrupt, "{} has checksum {}, but {CHECKPOINT_MANIFEST} says {}", want.name, got.xxh3, want.xxh3))
}

/// All checkpoints of a run, oldest first, including those that were set aside.
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

/// Compares two (score, step) pairs. The higher score is better. If the scores are equal, the later step is better.
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

/// The newest whole checkpoint of a run, and one line for each newer checkpoint that was skipped because it is damaged.
/// Changes no files.
pub fn newest_whole(run: &Path) -> Result<(WholeCheckpoint, Vec<String>), LaunchError> {
    let mut skipped = Vec::new();
    for (_, folder) in committed(run)?.into_iter().rev() {
        match examine(&folder, Depth::Checksums)? {
            Condition::Whole(manifest) => return Ok((WholeCheckpoint { path: folder, manifest }, skipped)),
            Condition::Damaged(reason) => skipped.push(format!("{}: {reason}; skipped", folder.display())),
            Condition::Gone => {}
        }
    }
    let set_aside =
        set_aside(run)?.into_iter().map(|(_, folder)| format!("{}: found damaged earlier", folder.display()));
    skipped.extend(set_aside);
    Err(no_whole_checkpoint(run, &skipped))
}

/// If `target` is a checkpoint, returns it, or fails if it is damaged. If `target` is a run, returns the same as
/// [`newest_whole`].
pub fn whole_checkpoint(target: &Path) -> Result<(WholeCheckpoint, Vec<String>), LaunchError> {
    let named = target.file_name().and_then(|name| name.to_str());
    let is_checkpoint = target.join(CHECKPOINT_MANIFEST).exists() || named.is_some_and(|name| step_of(name).is_some());
    if !is_checkpoint {
        return newest_whole(target);
    }
    match examine(target, Depth::Checksums)? {
        Condition::Whole(manifest) => Ok((WholeCheckpoint { path: target.to_owned(), manifest }, Vec::new())),
        Condition::Damaged(reason) => Err(reported!(Corrupt, "{}: {reason}", target.display())),
        Condition::Gone => Err(reported!(NoData, "no checkpoint at {}", target.display())),
    }
}

/// The error for a run that has no whole checkpoint. `damaged` has one line for each damaged checkpoint.
pub(super) fn no_whole_checkpoint(run: &Path, damaged: &[String]) -> LaunchError {
    let name = run.file_name().unwrap_or_default().display();
    let run = run.display();
    if damaged.is_empty() {
        return reported!(
            NoData,
            "run {run} has no checkpoint yet; train it first with `locdiff-launch --run {name} train`"
        );
    }
    reported!(
        Corrupt,
        "run {run} has no whole checkpoint:\n  {}\nrestore one from a copy, or start a new run with `--run NAME`",
        damaged.join("\n  ")
    )
}
