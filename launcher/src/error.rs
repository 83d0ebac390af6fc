//! Expected errors of the control plane, each with its exit code.

use std::path::Path;

use locdiff_core::config::ConfigErrors;
use locdiff_core::exit_code::{ExitCode, FailureKind, HasExitCode};
use locdiff_core::files::FileError;
use serde::Serialize;

/// Builds a `LaunchError` from an exit code and a message, such as `reported!(NoData, "no runs in {dir}")`.
macro_rules! reported {
    ($code:ident, $($text:tt)+) => {
        $crate::error::LaunchError::new(locdiff_core::exit_code::ExitCode::$code, format!($($text)+))
    };
}

/// Returns early with the error that `reported!` builds.
macro_rules! refuse {
    ($code:ident, $($text:tt)+) => {
        return Err($crate::error::reported!($code, $($text)+).into())
    };
}

pub(crate) use {refuse, reported};

/// An expected failure of the launcher, with its exit code. An error of any other type is a bug.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct LaunchError {
    code: ExitCode,
    kind: FailureKind,
    /// The message. If a gang failed unexpectedly, the message is the whole report about the gang.
    text: String,
    gang: Option<Box<GangFailure>>,
}

/// How a gang failed, for `failure.json`. The restart policy also compares `what` and `step` with earlier failures, to
/// recognise a crash that happens twice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GangFailure {
    /// What happened, such as "panic" or "SIGSEGV". Two failures of the same sort have the same text.
    pub what: String,
    /// The training step of the first worker that the root cause names. 0 before the first step, or if the root cause
    /// names no worker.
    pub step: u64,
    /// Number of the node whose worker is the root cause; `None` if no worker is.
    pub node: Option<u32>,
    /// Whether a worker survived SIGKILL. It still holds its device, so a restart would fail.
    pub is_held: bool,
    /// The root cause.
    pub first_cause: String,
    /// All causes, the root cause first.
    pub causes: Vec<String>,
    /// How each worker ended, in rank order.
    pub ranks: Vec<RankEnd>,
}

/// How a worker of a failed gang ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RankEnd {
    /// Rank of the worker.
    pub rank: u32,
    /// Name of the worker's machine.
    pub host: String,
    /// Process id of the worker.
    pub pid: u32,
    /// Device of the worker: `cpu`, or a GPU such as `GPU 3`.
    pub device: String,
    /// Phase in the worker's last heartbeat; `start` if the worker never sent one, `end` if it was about to exit.
    pub phase: String,
    /// Training step in the worker's last heartbeat; 0 before the first step.
    pub step: u64,
    /// How the process ended.
    pub end: String,
    /// The last lines of the worker's output.
    pub last_lines: Vec<String>,
}

impl LaunchError {
    /// Creates an error from an exit code and a message.
    pub fn new(code: ExitCode, text: impl Into<String>) -> Self {
        Self { code, kind: FailureKind::of_code(code), text: text.into(), gang: None }
    }

    /// Sets the kind of the failure. By default, the exit code determines the kind.
    #[must_use]
    pub fn with_kind(self, kind: FailureKind) -> Self {
        Self { kind, ..self }
    }

    /// Adds a description of how the gang failed.
    #[must_use]
    pub fn with_gang(self, gang: GangFailure) -> Self {
        Self { gang: Some(Box::new(gang)), ..self }
    }

    /// Prefixes the message with `name`, which is the flag or configuration field that the error is about.
    #[must_use]
    pub fn about(self, name: &str) -> Self {
        Self { text: format!("{name}: {}", self.text), ..self }
    }

    /// How the gang failed; `None` if the error is not about a gang.
    pub fn gang(&self) -> Option<&GangFailure> {
        self.gang.as_deref()
    }

    /// Converts an expected error of `locdiff_core` to a `LaunchError` with the same exit code and message.
    pub fn reported(error: impl HasExitCode) -> Self {
        Self::new(error.exit_code(), error.to_string()).with_kind(error.failure_kind())
    }

    /// Returns a closure that converts an I/O error to a `LaunchError` whose message begins with `path`.
    pub fn at(path: impl AsRef<Path>) -> impl Fn(std::io::Error) -> Self {
        move |error| {
            let kind = FailureKind::of_io(&error);
            reported!(Io, "{}: {error}", path.as_ref().display()).with_kind(kind)
        }
    }

    /// The error for a feature that is not implemented.
    pub fn not_yet(what: &str) -> Self {
        reported!(NotYet, "`{what}` is not implemented in this version")
    }

    /// The error for a command that a signal ended.
    pub fn interrupted() -> Self {
        Self::new(ExitCode::Interrupted, "stopped by a signal")
    }
}

/// The exit code of an error. An error that is not a `LaunchError` is a bug and has the code `Internal`.
pub fn exit_code_of(error: &anyhow::Error) -> ExitCode {
    error.downcast_ref().map_or(ExitCode::Internal, LaunchError::exit_code)
}

impl From<FileError> for LaunchError {
    fn from(error: FileError) -> Self {
        Self::reported(error)
    }
}

impl From<ConfigErrors> for LaunchError {
    fn from(errors: ConfigErrors) -> Self {
        Self::new(ExitCode::Config, errors.to_string())
    }
}

impl HasExitCode for LaunchError {
    fn exit_code(&self) -> ExitCode {
        self.code
    }

    fn failure_kind(&self) -> FailureKind {
        self.kind
    }
}
