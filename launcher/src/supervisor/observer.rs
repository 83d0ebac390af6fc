//! The observer of a gang writes logs and events and commits checkpoints. It has its own thread, so a slow or hung disk
//! does not keep the supervisor from handling heartbeats and signals.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::protocol::{Failure, PartsWritten, ToLauncher};
use locdiff_core::pulse::Beat;
use tokio::sync::mpsc;

use super::logs::{HeldErrors, SharedLines, ShownLine};
use crate::coordinator::GangEvent;
use crate::error::LaunchError;
use crate::pulses::TICK;
use crate::terminal::{Backlog, NextItem};

/// Largest total size of the lines and heartbeats that wait for the observer, bytes.
const LINES_BYTES_MAX: usize = 4 << 20;

/// How long the observer may work on one item before a warning is logged.
const DISK_WARNING: Duration = Duration::from_secs(30);

/// Receives the output and the reports of a gang while it runs.
pub trait GangObserver: Send {
    /// A worker wrote a line to stdout or stderr.
    fn line(&mut self, _rank: usize, _line: &str) {}
    /// Whether the lines of the workers are also shown on the terminal.
    fn shows_lines(&self) -> bool {
        true
    }
    /// A worker sent a heartbeat.
    fn beat(&mut self, _rank: usize, _: &Beat) {}
    /// A worker sent a report about its job. An error stops the gang, and later reports are dropped.
    fn report(&mut self, _: ToLauncher) -> Result<(), LaunchError> {
        Ok(())
    }
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

/// An observer that ignores all output and reports of workers.
#[derive(Debug)]
pub struct Silence;

impl GangObserver for Silence {
    fn shows_lines(&self) -> bool {
        false
    }
}

/// An item that the supervisor passes to the observer.
enum Observation {
    Line { rank: usize, line: String },
    Beat { rank: usize, beat: Beat },
    Report(ToLauncher),
    Commit(Vec<PartsWritten>),
}

/// The queue from the supervisor to its observer. If the observer does not keep up, lines and heartbeats are dropped
/// and counted. Reports and commits are never dropped.
pub(super) struct Observations {
    queue: Backlog<Observation>,
    /// Number of items that the observer has handled.
    handled: AtomicU64,
    /// The workers' errors that have not been shown yet.
    held: Mutex<HeldErrors>,
}

impl Observations {
    pub(super) fn new() -> Self {
        Self { queue: Backlog::new(LINES_BYTES_MAX), handled: AtomicU64::new(0), held: Mutex::default() }
    }

    pub(super) fn line(&self, rank: usize, line: String) {
        let bytes = line.len() + size_of::<Observation>();
        self.queue.offer(Observation::Line { rank, line }, bytes);
    }

    pub(super) fn beat(&self, rank: usize, beat: Beat) {
        self.queue.offer(Observation::Beat { rank, beat }, size_of::<Observation>());
    }

    pub(super) fn report(&self, message: ToLauncher) {
        self.queue.push(Observation::Report(message));
    }

    pub(super) fn commit(&self, parts: Vec<PartsWritten>) {
        self.queue.push(Observation::Commit(parts));
    }

    /// Closes the queue. The observer's thread ends once it has handled all items.
    pub(super) fn close(&self) {
        self.queue.close();
    }

    /// Shows the workers' errors that `report` does not repeat. `report` is the error of the gang.
    pub(super) fn show_errors(&self, report: &str, ranks: usize) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.take_unreported(report, ranks).iter().for_each(ShownLine::show);
    }

    /// If the line belongs to an error, holds it back until the gang has ended. Returns whether the line is held back.
    fn hold(&self, rank: usize, line: &str) -> bool {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).hold(rank, line)
    }

    /// Passes all items to the observer until the queue is closed; runs on the observer's thread. Sends an event to
    /// `failures` for each commit that failed, and for the first report that failed. Drops `failures` at the end, which
    /// tells the supervisor that everything is handled.
    pub(super) fn serve(
        &self,
        observer: &mut dyn GangObserver,
        ranks: usize,
        failures: mpsc::UnboundedSender<GangEvent>,
    ) {
        let (mut lines, mut has_failed) = (SharedLines::new(ranks), false);
        let fail = |message: String, error: &LaunchError| {
            let (exit_code, kind) = (error.exit_code().code(), error.failure_kind());
            let failure = Failure { message, of_peer: false, exit_code, kind };
            // Sending fails only if the supervisor has failed and dropped the receiver.
            let _ = failures.send(GangEvent::ObserverFailed(failure));
        };
        loop {
            let next = self.queue.next(lines.deadline());
            lines.due(Instant::now()).iter().for_each(ShownLine::show);
            match next {
                NextItem::Item(Observation::Line { rank, line }) => {
                    observer.line(rank, &line);
                    if observer.shows_lines() && !self.hold(rank, &line) {
                        lines.add(rank, &line, Instant::now());
                    }
                }
                NextItem::Item(Observation::Beat { rank, beat }) => observer.beat(rank, &beat),
                NextItem::Item(Observation::Report(_)) if has_failed => {}
                NextItem::Item(Observation::Report(message)) => {
                    if let Err(error) = observer.report(message) {
                        has_failed = true;
                        fail(error.to_string(), &error);
                    }
                }
                NextItem::Item(Observation::Commit(parts)) => {
                    if let Err(error) = observer.commit(&parts) {
                        fail(format!("cannot commit a checkpoint: {error}"), &error);
                    }
                }
                NextItem::Dropped(count) => {
                    let note =
                        format!("dropped {count} lines and heartbeats of the workers: the disk does not keep up");
                    (0..ranks).for_each(|rank| observer.line(rank, &note));
                    tracing::warn!("{note}");
                }
                NextItem::Nothing => {}
                NextItem::Closed => break,
            }
            self.handled.fetch_add(1, Ordering::Relaxed);
        }
        lines.all().iter().for_each(ShownLine::show);
    }
}

/// Measures for how long the observer has been working on the same item.
pub(super) struct DiskWatch {
    handled: u64,
    stuck: Duration,
    looked_at: Instant,
    has_warned: bool,
}

impl DiskWatch {
    pub(super) fn new() -> Self {
        Self { handled: 0, stuck: Duration::ZERO, looked_at: Instant::now(), has_warned: false }
    }

    /// Checks the progress of the observer. Must be called every [`TICK`]. Logs a warning once the observer has been
    /// working on the same item for [`DISK_WARNING`]. Returns whether the observer has been working on this item for
    /// longer than `limit`.
    pub(super) fn is_stuck(&mut self, observations: &Observations, limit: Duration) -> bool {
        // If this process was stopped for a while, the observer was stopped as well. That time must not count, so count
        // at most two ticks.
        let passed = self.looked_at.elapsed().min(2 * TICK);
        self.looked_at = Instant::now();
        let handled = observations.handled.load(Ordering::Relaxed);
        if handled != self.handled || observations.queue.is_idle() {
            (self.handled, self.stuck, self.has_warned) = (handled, Duration::ZERO, false);
            return false;
        }
        self.stuck += passed;
        if self.stuck >= DISK_WARNING && !std::mem::replace(&mut self.has_warned, true) {
            let seconds = self.stuck.as_secs();
            tracing::warn!("the disk has not responded for {seconds} s; logs, events and checkpoints are waiting");
        }
        self.stuck > limit
    }
}

/// Closes the queue when it is dropped, even during a panic. Otherwise the observer's thread would never end, and
/// `std::thread::scope` would wait for it forever.
pub(super) struct CloseOnDrop<'a>(pub(super) &'a Observations);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}
