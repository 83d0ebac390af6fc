//! The observer of a gang, on a thread of its own: it writes logs and events and commits checkpoints. So a slow or hung
//! disk does not keep the supervisor from heartbeats and signals.

use std::time::Instant;

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::protocol::{Failure, PartsWritten, ToLauncher};
use locdiff_core::pulse::Beat;
use tokio::sync::mpsc;

use super::logs::SharedLines;
use crate::coordinator::GangEvent;
use crate::error::LaunchError;
use crate::terminal::{Backlog, NextItem};

/// How many bytes of lines wait for the observer at most.
const LINES_BYTES_MAX: usize = 4 << 20;

/// Receives the output and the reports of a gang while it runs.
pub trait GangObserver: Send {
    /// A worker wrote a line to stdout or stderr.
    fn line(&mut self, _rank: usize, _line: &str) {}
    /// Whether the lines are also shown on the terminal.
    fn shows_lines(&self) -> bool {
        true
    }
    /// A worker sent a heartbeat.
    fn beat(&mut self, _rank: usize, _: &Beat) {}
    /// A worker sent a report about its job.
    fn report(&mut self, _: ToLauncher) {}
    /// Every rank has written its parts of a checkpoint. The observer must commit them. An error stops the gang.
    fn commit(&mut self, _: &[PartsWritten]) -> Result<(), LaunchError> {
        let text = "a worker wrote a checkpoint in a job without checkpoints: this is a bug";
        Err(LaunchError::new(ExitCode::WorkerFailed, text))
    }
}

/// An observer that only shows the output of workers.
#[derive(Debug)]
pub struct Echo;

impl GangObserver for Echo {}

/// An observer that ignores the output and the reports of workers.
#[derive(Debug)]
pub struct Silence;

impl GangObserver for Silence {
    fn shows_lines(&self) -> bool {
        false
    }
}

/// Something for the observer.
enum Observation {
    Line { rank: usize, line: String },
    Beat { rank: usize, beat: Beat },
    Report(ToLauncher),
    Commit(Vec<PartsWritten>),
}

/// The way from the supervisor to its observer. Lines and heartbeats are dropped and counted while the observer does not keep up.
/// Reports and commits are never dropped.
pub(super) struct Observations(Backlog<Observation>);

impl Observations {
    pub(super) fn new() -> Self {
        Self(Backlog::new(LINES_BYTES_MAX))
    }

    pub(super) fn line(&self, rank: usize, line: String) {
        let bytes = line.len() + size_of::<Observation>();
        self.0.offer(Observation::Line { rank, line }, bytes);
    }

    pub(super) fn beat(&self, rank: usize, beat: Beat) {
        self.0.offer(Observation::Beat { rank, beat }, size_of::<Observation>());
    }

    pub(super) fn report(&self, message: ToLauncher) {
        self.0.push(Observation::Report(message));
    }

    pub(super) fn commit(&self, parts: Vec<PartsWritten>) {
        self.0.push(Observation::Commit(parts));
    }

    /// Lets the observer's thread end once it has handled everything.
    pub(super) fn close(&self) {
        self.0.close();
    }

    /// The observer's thread. Sends an event for each commit that failed, and drops `failures` at the end.
    pub(super) fn serve(
        &self,
        observer: &mut dyn GangObserver,
        ranks: usize,
        failures: mpsc::UnboundedSender<GangEvent>,
    ) {
        let mut lines = SharedLines::new(ranks);
        loop {
            let next = self.0.next(lines.deadline());
            lines.due(Instant::now()).iter().for_each(|line| tracing::info!("{line}"));
            match next {
                NextItem::Item(Observation::Line { rank, line }) => {
                    observer.line(rank, &line);
                    if observer.shows_lines() {
                        lines.add(rank, &line, Instant::now());
                    }
                }
                NextItem::Item(Observation::Beat { rank, beat }) => observer.beat(rank, &beat),
                NextItem::Item(Observation::Report(message)) => observer.report(message),
                NextItem::Item(Observation::Commit(parts)) => {
                    if let Err(error) = observer.commit(&parts) {
                        let exit_code = error.exit_code().code();
                        let kind = error.failure_kind();
                        let failure = Failure { message: error.to_string(), of_peer: false, exit_code, kind };
                        // Sending fails only if the supervisor has failed.
                        let _ = failures.send(GangEvent::CommitFailed(failure));
                    }
                }
                NextItem::Dropped(count) => {
                    let note = format!("dropped {count} lines of the workers: the disk does not keep up");
                    (0..ranks).for_each(|rank| observer.line(rank, &note));
                    tracing::warn!("{note}");
                }
                NextItem::Nothing => {}
                NextItem::Closed => break,
            }
        }
        lines.all().iter().for_each(|line| tracing::info!("{line}"));
    }
}

/// Closes the observations when it is dropped, also by a panic. Otherwise the scope of the observer's thread would wait
/// for it forever.
pub(super) struct CloseOnDrop<'a>(pub(super) &'a Observations);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}
