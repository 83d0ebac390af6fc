//! Commit and retention: what the ranks have written becomes a checkpoint, and older ones go.
//!
//! All that the manifest lists is on the disk before the manifest is, and the manifest before the folder gets its name.
//! A checkpoint that goes loses its name before its files. So a folder named `step-NNNNNNNN` is always whole.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use locdiff_core::protocol::{
    CHECKPOINT_FORMAT, CHECKPOINT_MANIFEST, CheckpointFile, CheckpointManifest, PartsWritten, partial_name, step_name,
};

use super::names::{LATEST, REMOVING, free_name, is_plain, unix_s};
use super::scan::{self, better};
use super::{Checkpoint, RunFolder};
use crate::error::{LaunchError, reported};

/// What became of a checkpoint that was to be committed.
#[derive(Debug, Clone, PartialEq)]
pub enum Commit {
    /// It is one now.
    Done {
        /// The checkpoint.
        checkpoint: Checkpoint,
        /// Names of those that went for it.
        pruned: Vec<String>,
    },
    /// There is one of this step already; it stays.
    AlreadyThere(PathBuf),
}

impl RunFolder {
    /// Makes a checkpoint of what all ranks of the present attempt have written. Where that fails before it has its name,
    /// what was written is removed.
    pub fn commit(&self, attempt: u32, step: u64, parts: &[PartsWritten]) -> Result<Commit, LaunchError> {
        self.refuse_stale(attempt, step, parts)?;
        let partial = self.path.join(partial_name(step, attempt));
        let folder = self.path.join(step_name(step));
        if folder.symlink_metadata().is_ok() {
            self.remove_quietly(&partial);
            return Ok(Commit::AlreadyThere(folder));
        }
        let manifest = match self.put_in_place(attempt, step, parts, &partial, &folder) {
            Ok(manifest) => manifest,
            Err(error) => {
                self.remove_quietly(&partial);
                return Err(error);
            }
        };
        self.files.sync_folder(&self.path)?;
        let said = self.say_latest(&step_name(step));
        let pruned = self.prune()?;
        if said.is_err() {
            // Pruning may have made room.
            self.say_latest(&step_name(step))?;
        }
        Ok(Commit::Done { checkpoint: Checkpoint { path: folder, manifest }, pruned })
    }

    /// An error where this is not of the present attempt.
    fn refuse_stale(&self, attempt: u32, step: u64, parts: &[PartsWritten]) -> Result<(), LaunchError> {
        let strange = parts.iter().find(|part| part.attempt != attempt || part.step != step);
        let writer = match strange.map(|part| part.attempt) {
            _ if self.attempt != Some(attempt) => attempt,
            Some(other) => other,
            None => return Ok(()),
        };
        let present = self.attempt.map_or_else(|| "none".to_owned(), |present| present.to_string());
        Err(reported!(
            WorkerFailed,
            "step {step} was written by attempt {writer}, the present one is {present}; it is not committed"
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

    pub(super) fn say_latest(&self, name: &str) -> Result<(), LaunchError> {
        self.files.write_whole(&self.path.join(LATEST), format!("{name}\n").as_bytes())?;
        Ok(())
    }

    /// Removes all but the last few and the best; what cannot be read is left alone.
    fn prune(&self) -> Result<Vec<String>, LaunchError> {
        let present = scan::present(&self.path)?;
        let known: Vec<_> = present.iter().map(|manifest| (manifest.step, manifest.score)).collect();
        let mut pruned = Vec::new();
        for step in to_remove(&known, self.keep) {
            let name = step_name(step);
            let hidden = free_name(&self.path, &format!("{REMOVING}{name}"));
            self.files.rename(&self.path.join(&name), &hidden)?;
            self.files.sync_folder(&self.path)?;
            self.remove_quietly(&hidden);
            pruned.push(name);
        }
        Ok(pruned)
    }

    /// Removes a folder that is no checkpoint; what cannot be removed now goes when the run is opened again.
    pub(super) fn remove_quietly(&self, folder: &Path) {
        if let Err(error) = self.files.remove_folder(folder)
            && error.error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!("{error}: left behind");
        }
    }
}

/// What the ranks say they wrote is there: plain names, each once, of the length that they say.
fn check_parts(partial: &Path, files: &[CheckpointFile]) -> Result<(), LaunchError> {
    let fail = |reason: String| Err(reported!(Corrupt, "{}: {reason}; not committed", partial.display()));
    if files.is_empty() {
        return fail("no rank wrote anything".into());
    }
    let mut names = BTreeSet::new();
    for file in files {
        let name = file.name.as_str();
        if !is_plain(name) || name == CHECKPOINT_MANIFEST {
            return fail(format!("{name:?} is no name for a part"));
        }
        if !names.insert(name) {
            return fail(format!("{name} was written twice"));
        }
        let path = partial.join(name);
        let found = std::fs::symlink_metadata(&path).map_err(LaunchError::at(&path))?;
        if !found.is_file() || found.len() != file.bytes {
            return fail(format!("{name} has {} bytes, its rank wrote {}", found.len(), file.bytes));
        }
    }
    Ok(())
}

/// The steps that go: all but the last `keep` and the one with the highest score.
fn to_remove(known: &[(u64, Option<f64>)], keep: usize) -> Vec<u64> {
    let best = known.iter().filter_map(|(step, score)| score.map(|score| (score, *step)));
    let best = best.max_by(|a, b| better(*a, *b)).map(|(_, step)| step);
    let old = &known[..known.len().saturating_sub(keep)];
    old.iter().map(|(step, _)| *step).filter(|step| Some(*step) != best).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_and_the_best_stay() {
        let known = [(10, Some(1.0)), (20, Some(7.0)), (30, None), (40, Some(2.0)), (50, None)];
        assert_eq!(to_remove(&known, 2), [10, 30]);
        assert_eq!(to_remove(&known, 1), [10, 30, 40]);
        assert_eq!(to_remove(&known, 9), Vec::<u64>::new());
        assert_eq!(to_remove(&known[2..3], 1), Vec::<u64>::new());
        assert_eq!(to_remove(&[(10, Some(1.0)), (20, Some(1.0)), (30, None)], 1), [10], "of equals the later one");
    }
}
