//! Observes one attempt of a training run.

use std::path::Path;
use std::time::Instant;

use locdiff_core::config::RunConfig;
use locdiff_core::protocol::{FaultKind, InjectedFault, PartsWritten, ToLauncher};
use locdiff_core::pulse::Beat;
use serde_json::json;

use super::forecast::Forecast;
use crate::error::LaunchError;
use crate::run_folder::{Commit, RunFolder, StatusKeeper};
use crate::supervisor::{CappedLog, GangObserver};
use crate::terminal::Display;

/// Observes one attempt: writes logs and events, shows progress, and commits checkpoints.
pub(super) struct AttemptObserver<'a> {
    run: &'a mut RunFolder,
    status: &'a mut StatusKeeper,
    attempt: u32,
    logs: Vec<CappedLog>,
    faults: &'a mut Vec<InjectedFault>,
    pub(super) display: Display,
    forecast: Forecast,
    /// Whether a warning about a failed write was logged.
    has_warned: bool,
    /// Injected fault: damages the first checkpoint that is committed at this step or later.
    corrupt_from: Option<u64>,
}

impl<'a> AttemptObserver<'a> {
    pub(super) fn new(
        run: &'a mut RunFolder,
        status: &'a mut StatusKeeper,
        attempt: u32,
        workers: usize,
        config: &RunConfig,
        faults: &'a mut Vec<InjectedFault>,
    ) -> Result<Self, LaunchError> {
        let open = |rank: usize| {
            let path = run.log_path(attempt, rank as u32);
            CappedLog::create(&path, config.supervise.log_bytes_max).map_err(LaunchError::at(path))
        };
        let logs = (0..workers).map(open).collect::<Result<_, _>>()?;
        let (display, forecast) = (Display::new(), Forecast::new(config.train.steps));
        Ok(Self { run, status, attempt, logs, faults, display, forecast, has_warned: false, corrupt_from: None })
    }

    /// Logs a warning for the first failed write and ignores later ones. Lost logs must not stop the run.
    fn warn_once(&mut self, written: Result<(), LaunchError>) {
        if written.is_err() && !std::mem::replace(&mut self.has_warned, true) {
            warn_on_error(written);
        }
    }
}

impl GangObserver for AttemptObserver<'_> {
    fn line(&mut self, rank: usize, line: &str) {
        let path = self.run.log_path(self.attempt, rank as u32);
        let written = self.logs[rank].add(line).map_err(LaunchError::at(path));
        self.warn_once(written);
    }

    fn beat(&mut self, rank: usize, beat: &Beat) {
        if rank == 0
            && let Some(estimate) = self.forecast.beat(beat.step, Instant::now())
        {
            estimate.log();
        }
        if let Some((slow, ratio)) = self.status.beat(rank, beat) {
            tracing::warn!("rank {slow} is slow: its work takes {ratio:.1} times as long as the median over all ranks");
            self.run.note("straggler", &json!({ "rank": slow, "ratio": ratio }));
        }
    }

    fn report(&mut self, message: ToLauncher) -> Result<(), LaunchError> {
        match message {
            ToLauncher::Progress(progress) => {
                self.status.progress(&progress);
                // The workers have accepted the data and the checkpoint, so this configuration becomes the run's
                // configuration.
                let written = self.run.keep_configuration();
                self.warn_once(written);
                self.display.report(&progress);
                self.run.note("progress", &progress);
            }
            ToLauncher::Evaluated(found) => {
                self.display.evaluated(&found);
                self.run.note("evaluated", &found);
            }
            ToLauncher::Breaking(fault) => {
                self.faults.retain(|known| *known != fault);
                if fault.kind == FaultKind::CorruptCheckpoint {
                    self.corrupt_from = Some(fault.step);
                }
                tracing::warn!("injected: {fault}");
                self.run.note("injected", &json!({ "fault": fault }));
            }
            _ => {}
        }
        Ok(())
    }

    fn commit(&mut self, parts: &[PartsWritten]) -> Result<(), LaunchError> {
        let step = parts.first().map_or(0, |written| written.step);
        match self.run.commit(self.attempt, step, parts)? {
            Commit::Done { checkpoint, pruned } => {
                let path = checkpoint.path.display();
                tracing::info!("committed checkpoint {path}");
                if self.corrupt_from.take_if(|from| *from <= step).is_some() {
                    flip_byte(&checkpoint.path)?;
                }
                self.status.committed(step);
                self.run
                    .note("checkpoint", &json!({ "step": step, "score": checkpoint.manifest.score, "pruned": pruned }));
            }
            Commit::AlreadyThere(path) => {
                tracing::warn!("checkpoint {} already exists and is kept", path.display());
            }
        }
        Ok(())
    }
}

/// Flips a bit in the middle of the largest file of a checkpoint.
fn flip_byte(checkpoint: &Path) -> Result<(), LaunchError> {
    let fail = LaunchError::at(checkpoint);
    let entries = std::fs::read_dir(checkpoint).map_err(&fail)?.filter_map(Result::ok);
    let largest = entries.max_by_key(|entry| entry.metadata().map_or(0, |metadata| metadata.len()));
    let path = largest.map(|entry| entry.path()).unwrap_or_default();
    let mut bytes = std::fs::read(&path).map_err(&fail)?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).map_err(fail)
}

/// Logs a failed write as a warning.
pub(super) fn warn_on_error(written: Result<(), LaunchError>) {
    if let Err(error) = written {
        tracing::warn!("cannot write to the run folder: {error}");
    }
}
