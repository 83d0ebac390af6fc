//! What can go wrong in the control plane, each with its exit code.

use std::path::Path;

use locdiff_core::config::ConfigErrors;
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::FileError;

/// An error with a code, such as `reported!(NoData, "no runs in {dir}")`.
macro_rules! reported {
    ($code:ident, $($text:tt)+) => {
        $crate::error::LaunchError::new(locdiff_core::exit_code::ExitCode::$code, format!($($text)+))
    };
}

/// Returns it.
macro_rules! refuse {
    ($code:ident, $($text:tt)+) => {
        return Err($crate::error::reported!($code, $($text)+).into())
    };
}

pub(crate) use {refuse, reported};

/// An expected failure of the launcher; anything else is a bug and stays an `anyhow::Error`.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct LaunchError {
    code: ExitCode,
    /// What to say; of a worker that failed it is the whole report.
    text: String,
}

impl LaunchError {
    /// An error with a code.
    pub fn new(code: ExitCode, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }

    /// An expected error of the core.
    pub fn reported(error: impl HasExitCode) -> Self {
        Self::new(error.exit_code(), error.to_string())
    }

    /// What to make of the system's error about a file or folder.
    pub fn at(path: impl AsRef<Path>) -> impl Fn(std::io::Error) -> Self {
        move |error| reported!(Io, "{}: {error}", path.as_ref().display())
    }

    /// This version does not do it yet.
    pub fn not_yet(what: &str) -> Self {
        reported!(
            NotYet,
            "`{what}` is not in this version yet; it has its place on the command line and this exit code until then"
        )
    }

    /// The command was ended by a signal.
    pub fn interrupted() -> Self {
        Self::new(ExitCode::Interrupted, "interrupted; all workers have ended")
    }
}

/// The exit code of any error: what is not expected is a bug.
pub fn exit_code_of(error: &anyhow::Error) -> ExitCode {
    error.downcast_ref().map_or(ExitCode::Internal, LaunchError::exit_code)
}

impl From<FileError> for LaunchError {
    fn from(error: FileError) -> Self {
        Self::new(ExitCode::Io, error.to_string())
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
}
