//! Expected errors of the control plane, each with its exit code.

use std::path::Path;

use locdiff_core::config::ConfigErrors;
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::FileError;

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
    /// The message. If a worker failed, the message is the whole report about the gang.
    text: String,
}

impl LaunchError {
    /// Creates an error from an exit code and a message.
    pub fn new(code: ExitCode, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }

    /// Converts an expected error of `locdiff_core` to a `LaunchError` with the same exit code and message.
    pub fn reported(error: impl HasExitCode) -> Self {
        Self::new(error.exit_code(), error.to_string())
    }

    /// Returns a closure that converts an I/O error to a `LaunchError` whose message begins with `path`.
    pub fn at(path: impl AsRef<Path>) -> impl Fn(std::io::Error) -> Self {
        move |error| reported!(Io, "{}: {error}", path.as_ref().display())
    }

    /// The error for a feature that is not implemented.
    pub fn not_yet(what: &str) -> Self {
        reported!(NotYet, "`{what}` is not implemented in this version")
    }

    /// The error for a command that Ctrl-C or SIGTERM ended.
    pub fn interrupted() -> Self {
        Self::new(ExitCode::Interrupted, "interrupted; all workers have ended")
    }
}

/// The exit code of an error. An error that is not a `LaunchError` is a bug and has the code `Internal`.
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
