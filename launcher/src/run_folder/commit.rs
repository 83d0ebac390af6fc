//! Turns the parts that the ranks wrote into a checkpoint (commit), and removes old checkpoints (pruning).
//!
//! The files that a manifest lists are on disk before the manifest is written. The manifest is on disk before the
//! folder gets its final name, `step-NNNNNNNN`. When a checkpoint is removed, its folder is renamed before its files
//! are removed. So a folder with a final name is whole, unless it was damaged later.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use locdiff_core::files::wait_until_visible;
use locdiff_core::protocol::{
    CHECKPOINT_FORMAT, CHECKPOINT_MANIFEST, CheckpointFile, CheckpointManifest, PartsWritten, partial_name, step_name,
};

use super::lock::CheckpointUse;
use super::names::{LATEST, REMOVING, free_name, is_plain, unix_s};
use super::scan::{self, better};
use super::{RunFolder, WholeCheckpoint};
use crate::error::{LaunchError, reported};

/// How long to wait for a file that a worker on another machine has just written.
const VISIBLE_PATIENCE: Duration = Duration::from_secs(1);

/// Result of a commit.
#[derive(Debug, Clone, PartialEq)]
pub enum Commit {
    /// The checkpoint was committed.
    Done {
        /// The checkpoint.
        checkpoint: WholeCheckpoint,
        /// Names of the old checkpoints that were removed.
        pruned: Vec<String>,
    },
    /// A checkpoint of this step already exists and is kept.
    AlreadyThere(PathBuf),
}

impl RunFolder {
    /// Commits the parts that all ranks of the current attempt wrote. Parts of another attempt or step are refused and
    /// stay on disk until [`RunFolder::clean`]. If any other error occurs before the folder has its final name, the
    /// parts are removed.
    pub fn commit(&self, attempt: u32, step: u64, parts: &[PartsWritten]) -> Result<Commit, LaunchError> {
        self.refuse_stale(attempt, step, parts)?;
        self.refuse_if_superseded()?;
        let partial = self.path.join(partial_name(step, attempt));
        let folder = self.path.join(step_name(step));
        if folder.symlink_metadata().is_ok() {
            if !scan::all_stale(&self.path)?.contains(&folder) {
                self.remove_or_warn(&partial);
                return Ok(Commit::AlreadyThere(folder));
            }
            self.set_aside_stale(&folder)?;
        }
        let manifest = match self.put_in_place(attempt, step, parts, &partial, &folder) {
            Ok(manifest) => manifest,
            Err(error) => {
                self.remove_or_warn(&partial);
                return Err(error);
            }
        };
        self.files.sync_folder(&self.path)?;
        self.refuse_if_superseded()?;
        let written = self.write_latest(&step_name(step));
        let pruned = self.prune()?;
        if written.is_err() {
            // Try again, because pruning may have freed disk space.
            self.write_latest(&step_name(step))?;
        }
        Ok(Commit::Done { checkpoint: WholeCheckpoint { path: folder, manifest }, pruned })
    }

    /// Fails if `attempt` is not the current attempt, or if a part is from another attempt or step.
    fn refuse_stale(&self, attempt: u32, step: u64, parts: &[PartsWritten]) -> Result<(), LaunchError> {
        let stale = parts.iter().find(|part| part.attempt != attempt || part.step != step);
        let (written, writer) = match stale.map(|part| (part.step, part.attempt)) {
            _ if self.attempt != Some(attempt) => (step, attempt),
            Some(other) => other,
            None => return Ok(()),
        };
        let current = self.attempt.map_or_else(|| "none".to_owned(), |current| current.to_string());
        Err(reported!(
            WorkerFailed,
            "step {step} is not committed: got parts from step {written} of attempt {writer}, wanted parts from step \
             {step} of attempt {current}"
        ))
    }

    fn put_in_place(
        &self,
        attempt: u32,
        step: u64,
        parts: &[PartsWritten],
        partial: &Path,
        folder: &Path,
    ) -> Result<CheckpointManifest, LaunchError> {
        let mut files: Vec<CheckpointFile> = parts.iter().flat_map(|part| part.files.iter().cloned()).collect();
        files.sort_by(|a, b| a.name.cmp(&b.name));
        check_parts(partial, &files)?;
        let manifest = CheckpointManifest {
            format: CHECKPOINT_FORMAT,
            step,
            attempt,
            version: locdiff_core::VERSION.to_owned(),
            revision: locdiff_core::REVISION.to_owned(),
            committed_unix_s: unix_s(SystemTime::now()),
            score: parts.iter().find_map(|part| part.score).filter(|score| score.is_finite()),
            files,
        };
        let text = serde_json::to_vec_pretty(&manifest).expect("a manifest of strings and numbers is JSON");
        self.files.write_new(&partial.join(CHECKPOINT_MANIFEST), &text)?;
        self.files.sync_folder(partial)?;
        self.files.rename(partial, folder)?;
        Ok(manifest)
    }

    pub(super) fn write_latest(&self, name: &str) -> Result<(), LaunchError> {
        self.files.write_atomically(&self.path.join(LATEST), format!("{name}\n").as_bytes())?;
        Ok(())
    }

    /// Removes all checkpoints except the last `keep`, the one with the highest score, and those that an evaluation is
    /// reading. A later commit removes a checkpoint whose evaluation has ended. Damaged checkpoints are neither counted
    /// nor removed. Returns the names of the removed checkpoints.
    fn prune(&self) -> Result<Vec<String>, LaunchError> {
        let present = scan::present(&self.path)?;
        let scores: Vec<_> = present.iter().map(|manifest| (manifest.step, manifest.score)).collect();
        let mut pruned = Vec::new();
        for step in to_remove(&scores, self.keep) {
            let name = step_name(step);
            self.refuse_if_superseded()?;
            let Some(_claim) = CheckpointUse::claim(&self.path.join(&name)) else { continue };
            let hidden = free_name(&self.path, &format!("{REMOVING}{name}"));
            self.files.rename(&self.path.join(&name), &hidden)?;
            self.files.sync_folder(&self.path)?;
            self.remove_or_warn(&hidden);
            pruned.push(name);
        }
        Ok(pruned)
    }

    /// Removes a folder that is not a checkpoint. If this fails, logs a warning, and [`RunFolder::clean`] removes the
    /// folder later.
    pub(super) fn remove_or_warn(&self, folder: &Path) {
        if let Err(error) = self.files.remove_folder(folder)
            && error.error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!("cannot remove a folder that is no longer needed: {error}");
        }
    }
}

/// Checks the files that the ranks wrote: each must have a plain name, a name of its own, and the reported length.
fn check_parts(partial: &Path, files: &[CheckpointFile]) -> Result<(), LaunchError> {
    let fail = |reason: String| Err(reported!(Corrupt, "{}: {reason}; the step is not committed", partial.display()));
    if files.is_empty() {
        return fail("no rank wrote any file".into());
    }
    let mut names = BTreeSet::new();
    for file in files {
        let name = file.name.as_str();
        if !is_plain(name) || name == CHECKPOINT_MANIFEST {
            return fail(format!("{name:?} is not a valid name for a part"));
        }
        if !names.insert(name) {
            return fail(format!("{name} was written twice"));
        }
        let path = partial.join(name);
        wait_until_visible(&path, VISIBLE_PATIENCE);
        let found = std::fs::symlink_metadata(&path).map_err(LaunchError::at(&path))?;
        if !found.is_file() || found.len() != file.bytes {
            return fail(format!("{name} has {} bytes, but its rank reported {}", found.len(), file.bytes));
        }
    }
    Ok(())
}

/// The steps of the checkpoints to remove: all except the last `keep` and the one with the highest score. `checkpoints`
/// has the step and score of each checkpoint, oldest first.
fn to_remove(checkpoints: &[(u64, Option<f64>)], keep: usize) -> Vec<u64> {
    let best = checkpoints.iter().filter_map(|(step, score)| score.map(|score| (score, *step)));
    let best = best.max_by(|a, b| better(*a, *b)).map(|(_, step)| step);
    let old = &checkpoints[..checkpoints.len().saturating_sub(keep)];
    old.iter().map(|(step, _)| *step).filter(|step| Some(*step) != best).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_and_the_best_are_kept() {
        let checkpoints = [(10, Some(1.0)), (20, Some(7.0)), (30, None), (40, Some(2.0)), (50, None)];
        assert_eq!(to_remove(&checkpoints, 2), [10, 30]);
        assert_eq!(to_remove(&checkpoints, 1), [10, 30, 40]);
        assert_eq!(to_remove(&checkpoints, 9), Vec::<u64>::new());
        assert_eq!(to_remove(&checkpoints[2..3], 1), Vec::<u64>::new());
        assert_eq!(to_remove(&[(10, Some(1.0)), (20, Some(1.0)), (30, None)], 1), [10], "the older score won the tie");
    }
}
