//! Finds the checkpoint to resume from: the newest one whose checksums all match.

use std::path::Path;

use locdiff_core::files::WRITING;

use super::RunFolder;
use super::names::{CORRUPT, LATEST, REMOVING, attempt_of, free_name};
use super::scan::{self, Condition, Depth, WholeCheckpoint};
use crate::error::LaunchError;

/// The state from which a run is resumed.
#[derive(Debug, Clone, PartialEq)]
pub struct ResumePoint {
    /// The newest whole checkpoint. If `None`, training starts at the first step.
    pub checkpoint: Option<WholeCheckpoint>,
    /// Highest validation score of all checkpoints whose file lengths match the manifest. `None` if none of
    /// them has a score.
    pub best_score: Option<f64>,
    /// One line for each checkpoint that this call found damaged and set aside.
    pub set_aside: Vec<String>,
}

impl RunFolder {
    /// Removes leftovers of crashes and finds the newest whole checkpoint. Damaged checkpoints that are newer
    /// than the newest whole one are set aside. Fails if the run had checkpoints but none of them is whole, so that a
    /// run never silently starts over.
    pub fn resume_point(&self) -> Result<ResumePoint, LaunchError> {
        self.refuse_if_superseded()?;
        self.clean()?;
        for folder in scan::all_stale(&self.path)? {
            self.set_aside_stale(&folder)?;
        }
        let mut set_aside = Vec::new();
        let mut checkpoint = None;
        for (_, folder) in scan::committed(&self.path)?.into_iter().rev() {
            match scan::examine(&folder, Depth::Checksums)? {
                Condition::Whole(manifest) => {
                    checkpoint = Some(WholeCheckpoint { path: folder, manifest });
                    break;
                }
                Condition::Damaged(reason) => set_aside.push(self.set_aside(&folder, &reason)?),
                Condition::Gone => {}
            }
        }
        match &checkpoint {
            Some(checkpoint) => self.correct_latest(&checkpoint.path)?,
            None => self.refuse_fresh_start(&set_aside)?,
        }
        let scores = scan::present(&self.path)?.into_iter().filter_map(|manifest| manifest.score);
        Ok(ResumePoint { checkpoint, best_score: scores.reduce(f64::max), set_aside })
    }

    /// Removes parts of checkpoints that were never committed, checkpoints whose removal was interrupted, and files
    /// that were not completely written. Does nothing if a newer attempt has begun. The caller must make sure that no worker
    /// of the run is alive. Parts of a newer attempt are left alone.
    pub fn clean(&self) -> Result<(), LaunchError> {
        for entry in self.files.entries(&self.path)? {
            if self.is_superseded() {
                return Ok(());
            }
            let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let partial = name.starts_with('.')
                && name.ends_with(".partial")
                && !attempt_of(&name).is_some_and(|attempt| Some(attempt) > self.attempt && self.attempt.is_some());
            if (partial || name.starts_with(REMOVING)) && entry.is_dir() {
                self.remove_or_warn(&entry);
            } else if name.starts_with('.') && name.ends_with(WRITING) {
                self.files.remove_file(&entry)?;
            }
        }
        Ok(())
    }

    /// Renames a damaged checkpoint so that it is no longer used. Returns a line that describes the damage and the new
    /// name.
    fn set_aside(&self, folder: &Path, reason: &str) -> Result<String, LaunchError> {
        self.refuse_if_superseded()?;
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let aside = free_name(&self.path, &format!("{name}{CORRUPT}"));
        self.files.rename(folder, &aside)?;
        self.files.sync_folder(&self.path)?;
        Ok(format!("{} is damaged ({reason}); renamed to {}", folder.display(), aside.display()))
    }

    fn refuse_fresh_start(&self, set_aside: &[String]) -> Result<(), LaunchError> {
        let mut damaged = set_aside.to_vec();
        if damaged.is_empty() {
            let earlier = scan::set_aside(&self.path)?.into_iter();
            damaged.extend(earlier.map(|(_, folder)| format!("{}: found damaged earlier", folder.display())));
        }
        if let (true, Ok(latest)) = (damaged.is_empty(), std::fs::read_to_string(self.path.join(LATEST))) {
            damaged.push(format!("{}: missing, but named in `{LATEST}`", self.path.join(latest.trim()).display()));
        }
        if damaged.is_empty() { Ok(()) } else { Err(scan::no_whole_checkpoint(&self.path, &damaged)) }
    }

    /// Corrects the file `latest` if it does not name `newest`. The file may be wrong after a crash, or after
    /// checkpoints were set aside.
    fn correct_latest(&self, newest: &Path) -> Result<(), LaunchError> {
        let name = newest.file_name().unwrap_or_default().to_string_lossy();
        let recorded = std::fs::read_to_string(self.path.join(LATEST)).unwrap_or_default();
        if recorded.trim() == name {
            return Ok(());
        }
        self.refuse_if_superseded()?;
        self.write_latest(&name)
    }
}
