//! Reads the records of a run's attempts ([`super::attempts`]).

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
    /// Number of workers; 0 if the attempt never began.
    #[serde(default)]
    pub(super) workers: u32,
    /// Step and attempt of each checkpoint that was there; no attempt if the manifest of the checkpoint could not be
    /// read. `None` if the attempt never began.
    pub(super) checkpoints: Option<Vec<(u64, Option<u32>)>>,
}

/// Path of the record of an attempt.
pub(super) fn record_path(run: &Path, attempt: u32) -> PathBuf {
    run.join(ATTEMPTS).join(format!("{attempt}.json"))
}

/// Whether a checkpoint counts: the next attempt that has begun lists it, or there is none. `claims` has the numbers of
/// all attempts, in order.
pub(super) fn counts(run: &Path, claims: &[u32], manifest: &CheckpointManifest) -> Result<bool, LaunchError> {
    for attempt in claims.iter().filter(|attempt| **attempt > manifest.attempt) {
        if let Some(listed) = read(&record_path(run, *attempt))?.and_then(|record| record.checkpoints) {
            let own = [Some(manifest.attempt), None];
            return Ok(own.iter().any(|attempt| listed.contains(&(manifest.step, *attempt))));
        }
    }
    Ok(true)
}

/// The record in a file; `None` if there is no such file.
pub(super) fn read(path: &Path) -> Result<Option<Record>, LaunchError> {
    let text = match std::fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        text => text.map_err(LaunchError::at(path))?,
    };
    let record = serde_json::from_slice(&text);
    record.map(Some).map_err(|error| reported!(Corrupt, "{} cannot be parsed: {error}", path.display()))
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
