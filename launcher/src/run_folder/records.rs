//! Reads the records of a run's attempts ([`super::attempts`]).

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use locdiff_core::protocol::CheckpointManifest;
use serde::{Deserialize, Serialize};

use crate::error::{LaunchError, reported};

/// Name of the folder.
pub(super) const ATTEMPTS: &str = "attempts";

/// The record of an attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) pid: u32,
    pub(super) host: String,
    /// Step and attempt of each checkpoint that was there; no attempt if the manifest of the checkpoint could not be
    /// read. `None` if the attempt never began.
    pub(super) checkpoints: Option<Vec<(u64, Option<u32>)>>,
}

/// Path of the record of an attempt.
pub(super) fn record_path(run: &Path, attempt: u32) -> PathBuf {
    run.join(ATTEMPTS).join(format!("{attempt}.json"))
}

/// The records of all attempts that have begun.
#[derive(Debug, Default)]
pub(super) struct Records(BTreeMap<u32, Vec<(u64, Option<u32>)>>);

impl Records {
    /// Reads the records of a run.
    pub(super) fn read(run: &Path) -> Result<Self, LaunchError> {
        let mut records = BTreeMap::new();
        for attempt in claims(run)? {
            let path = record_path(run, attempt);
            let text = match std::fs::read(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                text => text.map_err(LaunchError::at(&path))?,
            };
            let record: Record = serde_json::from_slice(&text)
                .map_err(|error| reported!(Corrupt, "{} cannot be parsed: {error}", path.display()))?;
            records.extend(record.checkpoints.map(|checkpoints| (attempt, checkpoints)));
        }
        Ok(Self(records))
    }

    /// Whether there are no records.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a checkpoint counts: the attempt after the one that wrote it lists it, or there is no later attempt.
    pub(super) fn count(&self, manifest: &CheckpointManifest) -> bool {
        let next = self.0.range(manifest.attempt.saturating_add(1)..).next();
        let is_listed = |listed: &[(u64, Option<u32>)]| {
            [Some(manifest.attempt), None].iter().any(|attempt| listed.contains(&(manifest.step, *attempt)))
        };
        next.is_none_or(|(_, listed)| is_listed(listed))
    }
}

/// The numbers of all attempts that were claimed, in order. Lists the folder, because a client of a file server may
/// remember for a while that a file does not exist.
pub(super) fn claims(run: &Path) -> Result<Vec<u32>, LaunchError> {
    let folder = run.join(ATTEMPTS);
    let entries = match std::fs::read_dir(&folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(LaunchError::at(&folder))?,
    };
    let mut found: Vec<u32> = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    found.sort_unstable();
    Ok(found)
}
