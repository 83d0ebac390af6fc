//! Where a run goes on: the newest checkpoint that is whole, byte by byte.

use std::path::Path;

use locdiff_core::files::WRITING;

use super::RunFolder;
use super::names::{CORRUPT, LATEST, REMOVING, free_name};
use super::scan::{self, Checkpoint, Condition, Depth};
use crate::error::LaunchError;

/// Where a run goes on.
#[derive(Debug, Clone, PartialEq)]
pub struct ResumePoint {
    /// The newest whole checkpoint; none: the first step.
    pub checkpoint: Option<Checkpoint>,
    /// Highest validation score of all checkpoints.
    pub best_score: Option<f64>,
    /// A line for each checkpoint that was found damaged and set aside now.
    pub set_aside: Vec<String>,
}

impl RunFolder {
    /// Removes what crashes have left, sets damaged checkpoints aside, and finds the newest whole one. A run whose
    /// checkpoints are all damaged is an error: it never begins anew by itself.
    pub fn resume_point(&self) -> Result<ResumePoint, LaunchError> {
        self.clean()?;
        let mut set_aside = Vec::new();
        let mut checkpoint = None;
        for (_, folder) in scan::committed(&self.path)?.into_iter().rev() {
            match scan::examine(&folder, Depth::Checksums)? {
                Condition::Whole(manifest) => {
                    checkpoint = Some(Checkpoint { path: folder, manifest });
                    break;
                }
                Condition::Damaged(reason) => set_aside.push(self.set_aside(&folder, &reason)?),
                Condition::Gone => {}
            }
        }
        match &checkpoint {
            Some(checkpoint) => self.correct_latest(&checkpoint.path)?,
            None => self.refuse_to_begin_anew(&set_aside)?,
        }
        let scores = scan::present(&self.path)?.into_iter().filter_map(|manifest| manifest.score);
        Ok(ResumePoint { checkpoint, best_score: scores.reduce(f64::max), set_aside })
    }

    /// Removes what is no checkpoint and never will be: parts that were not committed, and what was being removed. For a
    /// time when no worker of the run is alive: since this process holds the lock, nobody else can be writing these.
    pub fn clean(&self) -> Result<(), LaunchError> {
        for entry in self.files.entries(&self.path)? {
            let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let partial = name.starts_with('.') && name.ends_with(".partial");
            if (partial || name.starts_with(REMOVING)) && entry.is_dir() {
                self.remove_quietly(&entry);
            } else if name.starts_with('.') && name.ends_with(WRITING) {
                self.files.remove_file(&entry)?;
            }
        }
        Ok(())
    }

    /// Gives a damaged checkpoint a name that is none of a checkpoint; says so.
    fn set_aside(&self, folder: &Path, reason: &str) -> Result<String, LaunchError> {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let aside = free_name(&self.path, &format!("{name}{CORRUPT}"));
        self.files.rename(folder, &aside)?;
        self.files.sync_folder(&self.path)?;
        Ok(format!("{}: damaged: {reason}; set aside as {}", folder.display(), aside.display()))
    }

    fn refuse_to_begin_anew(&self, set_aside: &[String]) -> Result<(), LaunchError> {
        let mut damaged = set_aside.to_vec();
        if damaged.is_empty() {
            let before = scan::set_aside(&self.path)?.into_iter();
            damaged.extend(before.map(|(_, folder)| format!("{}: set aside before", folder.display())));
        }
        if let (true, Ok(latest)) = (damaged.is_empty(), std::fs::read_to_string(self.path.join(LATEST))) {
            damaged.push(format!("{}: missing, though {LATEST} names it", self.path.join(latest.trim()).display()));
        }
        if damaged.is_empty() { Ok(()) } else { Err(scan::none_whole(&self.path, &damaged)) }
    }

    /// After a crash, or where the newest was set aside, `latest` may name another.
    fn correct_latest(&self, newest: &Path) -> Result<(), LaunchError> {
        let name = newest.file_name().unwrap_or_default().to_string_lossy();
        let said = std::fs::read_to_string(self.path.join(LATEST)).unwrap_or_default();
        if said.trim() == name { Ok(()) } else { self.say_latest(&name) }
    }
}
