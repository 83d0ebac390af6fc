//! What can go wrong in the control plane, each with its exit code.

use std::path::PathBuf;

use locdiff_core::config::ConfigErrors;
use locdiff_core::exit_code::{ExitCode, HasExitCode};

/// An expected failure of the launcher; anything else is a bug and stays an `anyhow::Error`.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// No worker binary.
    #[error("no worker at {path}: {reason}; build it with `make build`, or install both programs into one folder")]
    WorkerMissing {
        /// Where it was looked for.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// Anything else that was expected, with its code; of a worker that failed the text is the whole report.
    #[error("{text}")]
    Reported {
        /// What to say.
        text: String,
        /// The code to end with.
        code: ExitCode,
    },
    /// A file or folder could not be read or written.
    #[error("{path}: {error}")]
    Io {
        /// Which one.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// Another launcher holds the run.
    #[error(
        "run {path} is held by another launcher ({holder}); wait until it has ended, or name another run with `--run NAME`"
    )]
    RunHeld {
        /// Folder of the run.
        path: PathBuf,
        /// Who holds it, as far as it has said so.
        holder: String,
    },
    /// The run was made with another configuration.
    #[error(
        "run {path} was made with another configuration:\n  {}\nset these back, or name a new run with `--run NAME`",
        fields.join("\n  ")
    )]
    RunDiffers {
        /// Folder of the run.
        path: PathBuf,
        /// Each field, got and wanted.
        fields: Vec<String>,
    },
    /// `doctor` found that training could not start.
    #[error("training could not start here: {0}")]
    NotReady(String),
    /// This version does not do it yet.
    #[error("`{0}` is not in this version yet; it has its place on the command line and this exit code until then")]
    NotYet(String),
    /// Ended by a signal.
    #[error("interrupted; all workers have ended")]
    Interrupted,
}

impl LaunchError {
    /// An error with a code.
    pub fn new(code: ExitCode, text: impl Into<String>) -> Self {
        Self::Reported { text: text.into(), code }
    }

    /// An expected error of the core.
    pub fn reported(error: impl HasExitCode) -> Self {
        Self::new(error.exit_code(), error.to_string())
    }
}

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

impl From<locdiff_core::files::FileError> for LaunchError {
    fn from(error: locdiff_core::files::FileError) -> Self {
        Self::Io { path: error.path, error: error.error }
    }
}

impl HasExitCode for LaunchError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Config(_) => ExitCode::Config,
            Self::WorkerMissing { .. } => ExitCode::WorkerMissing,
            Self::Reported { code, .. } => *code,
            Self::Io { .. } => ExitCode::Io,
            Self::RunHeld { .. } => ExitCode::RunHeld,
            Self::RunDiffers { .. } => ExitCode::RunDiffers,
            Self::NotReady(_) => ExitCode::NotReady,
            Self::NotYet(_) => ExitCode::NotYet,
            Self::Interrupted => ExitCode::Interrupted,
        }
    }
}
