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
    /// The machine lacks the devices that were asked for.
    #[error("{0}")]
    Device(String),
    /// No worker binary.
    #[error("no worker at {path}: {reason}; build it with `make build`, or install both programs into one folder")]
    WorkerMissing {
        /// Where it was looked for.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// The worker starts but does not fit this launcher.
    #[error("{0}")]
    WorkerIncompatible(String),
    /// A worker failed while it ran; the text is the whole report.
    #[error("{0}")]
    WorkerFailed(String),
    /// A worker ended with an expected error, such as bad data; the text is its own.
    #[error("{text}")]
    Reported {
        /// What it said.
        text: String,
        /// The code that it asked for.
        code: ExitCode,
    },
    /// Workers did not report in time.
    #[error("{0}")]
    Timeout(String),
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
    /// An expected error of the core.
    pub fn reported(error: impl HasExitCode) -> Self {
        Self::Reported { text: error.to_string(), code: error.exit_code() }
    }
}

impl From<locdiff_core::files::FileError> for LaunchError {
    fn from(error: locdiff_core::files::FileError) -> Self {
        Self::Io { path: error.path, error: error.error }
    }
}

impl HasExitCode for LaunchError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Config(_) => ExitCode::Config,
            Self::Device(_) => ExitCode::Device,
            Self::WorkerMissing { .. } => ExitCode::WorkerMissing,
            Self::WorkerIncompatible(_) => ExitCode::WorkerIncompatible,
            Self::WorkerFailed(_) => ExitCode::WorkerFailed,
            Self::Reported { code, .. } => *code,
            Self::Timeout(_) => ExitCode::Timeout,
            Self::Io { .. } => ExitCode::Io,
            Self::RunHeld { .. } => ExitCode::RunHeld,
            Self::RunDiffers { .. } => ExitCode::RunDiffers,
            Self::NotReady(_) => ExitCode::NotReady,
            Self::NotYet(_) => ExitCode::NotYet,
            Self::Interrupted => ExitCode::Interrupted,
        }
    }
}
