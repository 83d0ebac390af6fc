//! Begins attempts. Their records in the folder `attempts` keep a launcher that was stopped or cut off, and wakes up when
//! another launcher has resumed the run, from changing anything that counts. Locks alone do not, because a file server
//! may give the lock of a silent machine to another.
//!
//! A launcher claims the next number N by creating the empty file `N`, which must not exist. Then it looks which
//! checkpoints are there, and writes the list to `N.json`, which must not exist either. From then on, a checkpoint of an
//! earlier attempt counts only if the list has it. An earlier launcher that still runs looks for a newer claim before it
//! removes anything. If its look came before the claim, its newest checkpoint was there before the claim and is in the
//! list, so that what it removes is not needed.
//!
//! If an earlier claim has no list, its launcher ended or is slow. The next launcher writes an empty record in its place,
//! so that a list that comes later than its own is never read.

use std::path::Path;

use super::records::{ATTEMPTS, Record, claims, read, record_path};
use super::status::host;
use super::{RunFolder, names, scan};
use crate::error::{LaunchError, refuse, reported};

/// How often to look for the next free number.
const CLAIMS_MAX: usize = 100;

impl RunFolder {
    /// Begins the next attempt, which has `workers` workers: claims its number, which is higher than those of all
    /// earlier attempts, lists the checkpoints that count, and creates the folder of its logs. Returns the number.
    pub fn begin_attempt(&mut self, workers: u32) -> Result<u32, LaunchError> {
        let (folder, logs) = (self.path.join(ATTEMPTS), self.path.join("logs"));
        self.files.create_folders(&folder)?;
        self.files.create_folders(&logs)?;
        if self.attempt.is_some() {
            self.refuse_if_superseded()?;
        }
        let attempt = self.claim()?;
        for earlier in claims(&self.path)?.into_iter().filter(|earlier| *earlier < attempt) {
            if !record_path(&self.path, earlier).exists() {
                self.record(earlier, 0, None)?;
            }
        }
        if !self.record(attempt, workers, Some(scan::listed(&self.path)?))? {
            refuse!(RunHeld, "another launcher has begun a newer attempt of {}", self.path.display());
        }
        self.files.create_folders(&logs.join(attempt.to_string()))?;
        self.attempt = Some(attempt);
        Ok(attempt)
    }

    /// Writes the record of an attempt, unless there is one. Returns whether this call wrote it.
    fn record(
        &self,
        attempt: u32,
        workers: u32,
        checkpoints: Option<Vec<(u64, Option<u32>)>>,
    ) -> Result<bool, LaunchError> {
        let record = Record { pid: std::process::id(), host: host(), workers, checkpoints };
        let text = serde_json::to_vec(&record).expect("a record of strings and numbers is JSON");
        Ok(self.files.write_unless_exists(&record_path(&self.path, attempt), &text)?)
    }

    /// The largest number of workers of an attempt so far.
    pub fn workers_max(&self) -> Result<u32, LaunchError> {
        let mut most = 0;
        for attempt in claims(&self.path)? {
            // A record that cannot be read is not needed here.
            let record = read(&record_path(&self.path, attempt)).ok().flatten();
            most = most.max(record.map_or(0, |record| record.workers));
        }
        Ok(most)
    }

    fn claim(&self) -> Result<u32, LaunchError> {
        for _ in 0..CLAIMS_MAX {
            // Somebody may have removed the records.
            let logs = self.files.entries(&self.path.join("logs"))?.into_iter();
            let logged = logs.filter_map(|path| path.file_name()?.to_str()?.parse::<u32>().ok());
            let last = claims(&self.path)?.into_iter().chain(logged).chain(self.attempt).max();
            let attempt = last.map_or(0, |last| last.saturating_add(1));
            if self.files.claim(&self.path.join(ATTEMPTS).join(attempt.to_string()))? {
                return Ok(attempt);
            }
        }
        Err(reported!(RunHeld, "{}: other launchers claim one attempt after the other", self.path.display()))
    }

    /// Fails if another launcher has begun a newer attempt.
    pub(super) fn refuse_if_superseded(&self) -> Result<(), LaunchError> {
        let newest = claims(&self.path)?.last().copied();
        if self.attempt.is_some() && newest > self.attempt {
            refuse!(
                RunHeld,
                "another launcher has begun attempt {} of {}, so attempt {} ends",
                newest.unwrap_or_default(),
                self.path.display(),
                self.attempt.unwrap_or_default()
            );
        }
        Ok(())
    }

    /// Whether another launcher has begun a newer attempt. `false` if that cannot be found out.
    pub fn is_superseded(&self) -> bool {
        self.attempt.is_some() && claims(&self.path).is_ok_and(|found| found.last().copied() > self.attempt)
    }

    /// Renames the checkpoint of this step if it does not count, so that its name is free.
    pub(super) fn set_aside_stale(&self, folder: &Path) -> Result<(), LaunchError> {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let aside = names::free_name(&self.path, &format!("{name}{}", names::STALE));
        tracing::warn!(
            "{}: it was not there when the attempt after it began; renamed to {}",
            folder.display(),
            aside.display()
        );
        self.files.rename(folder, &aside)?;
        Ok(self.files.sync_folder(&self.path)?)
    }
}
