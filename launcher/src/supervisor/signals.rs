//! The signals with which a user or a scheduler asks the launcher to stop.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use locdiff_core::exit_code::ExitCode;
use nix::sys::signal::{SigSet, Signal};
use tokio::signal::unix::{Signal as UnixSignal, SignalKind, signal};

use crate::error::{LaunchError, reported};

/// Signals that arrive within this time of the first one count as the same request to stop. A request often arrives
/// twice: a scheduler signals all processes, and `make` then passes the signal on to its children.
const SAME_REQUEST: Duration = Duration::from_secs(1);

/// Blocks SIGINT, SIGTERM, SIGUSR1 and SIGHUP until a [`Supervisor`](super::Supervisor) handles them, so that an early
/// signal is not lost and does not kill the launcher.
pub fn hold_signals() -> anyhow::Result<()> {
    watched().thread_block().context("cannot block signals")
}

fn watched() -> SigSet {
    SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGUSR1, Signal::SIGHUP])
}

/// The signals with which a user or a scheduler asks the launcher to stop.
#[derive(Debug)]
pub(super) struct Signals {
    interrupts: UnixSignal,
    terminations: UnixSignal,
    user_signals: UnixSignal,
    /// The exit code that belongs to the first signal; `None` if no signal has arrived.
    pub(super) code: Option<ExitCode>,
    /// When the last signal arrived that was not merged with the one before it.
    requested_at: Option<Instant>,
    /// Whether a request to stop has arrived at another node.
    is_noted: bool,
}

impl Drop for Signals {
    /// Holds signals back until the next [`Signals::watch`], so that none is lost in between.
    fn drop(&mut self) {
        let _ = watched().thread_block();
    }
}

impl Signals {
    /// Starts to watch the signals. Must be called within an async runtime.
    pub(super) fn watch() -> std::io::Result<Self> {
        let signals = Self {
            interrupts: signal(SignalKind::interrupt())?,
            terminations: signal(SignalKind::terminate())?,
            user_signals: signal(SignalKind::user_defined1())?,
            code: None,
            requested_at: None,
            is_noted: false,
        };
        // The handler stays installed when its receiver is dropped. So SIGHUP, which arrives when the terminal closes,
        // does not end the launcher. Workers do not inherit the handler, but block SIGHUP themselves.
        drop(signal(SignalKind::hangup())?);
        watched().thread_unblock()?;
        Ok(signals)
    }

    /// Waits for the next request to stop.
    pub(super) async fn recv(&mut self) {
        loop {
            let code = tokio::select! {
                _ = self.interrupts.recv() => ExitCode::Interrupted,
                _ = self.terminations.recv() => ExitCode::Preempted,
                _ = self.user_signals.recv() => ExitCode::Preempted,
            };
            self.code.get_or_insert(code);
            if self.requested_at.is_some_and(|at| at.elapsed() < SAME_REQUEST) {
                continue;
            }
            let is_first = self.requested_at.replace(Instant::now()).is_none();
            // A scheduler signals all nodes, so the first signal may be a request that another node has passed on.
            if !(is_first && self.is_noted) {
                return;
            }
        }
    }

    /// Records a request to stop that arrived at another node. Returns whether it is the first request. Schedulers signal
    /// all nodes.
    pub(super) fn note(&mut self, code: ExitCode) -> bool {
        self.is_noted = true;
        let is_first = self.code.is_none();
        self.code.get_or_insert(code);
        is_first
    }

    /// The error of a command that was asked to stop.
    pub(super) fn error(&self) -> LaunchError {
        match self.code {
            Some(ExitCode::Preempted) => reported!(Preempted, "stopped by a signal; the same command resumes the run"),
            _ => LaunchError::interrupted(),
        }
    }
}
