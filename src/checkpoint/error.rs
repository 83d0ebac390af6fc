//! Errors of reading and writing checkpoints, each with its exit code.

use std::path::{Path, PathBuf};

use locdiff_core::exit_code::{ExitCode, FailureKind, HasExitCode};
use locdiff_core::exported::ExportError;
use locdiff_core::files::FileError;

/// An error from [`crate::checkpoint`].
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file operation failed.
    #[error(transparent)]
    Io(#[from] FileError),
    /// An exported file cannot be used.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// Writing a checkpoint takes too long.
    #[error(
        "the checkpoint of step {step} is still not written after {seconds:.0} s, the limit of \
         supervise.checkpoint_timeout_s; check the disk of {path}"
    )]
    Stuck {
        /// The step of the checkpoint.
        step: u64,
        /// How long the write has taken so far.
        seconds: f64,
        /// The folder of the run.
        path: PathBuf,
    },
    /// The file is damaged.
    #[error("{path}: {reason}")]
    Corrupt {
        /// The damaged file.
        path: PathBuf,
        /// What was found and what was expected.
        reason: String,
    },
    /// The file is not damaged, but cannot be used.
    #[error("{path}: {reason}")]
    Bad {
        /// The file or checkpoint folder that cannot be used.
        path: PathBuf,
        /// What was found and what was expected.
        reason: String,
    },
    /// The output file exists, and `--overwrite` was not given.
    #[error("{0} exists; use --overwrite to replace it")]
    Exists(PathBuf),
    /// libtorch or the device failed.
    #[error(transparent)]
    Native(#[from] crate::native::NativeError),
    /// Internal error: this is a bug.
    #[error("{0}; this is a bug")]
    Internal(String),
}

impl CheckpointError {
    pub(super) fn corrupt(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::Corrupt { path: path.to_owned(), reason: reason.to_string() }
    }

    pub(super) fn bad(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::Bad { path: path.to_owned(), reason: reason.to_string() }
    }
}

impl HasExitCode for CheckpointError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Io(_) | Self::Stuck { .. } => ExitCode::Io,
            Self::Export(error) => error.exit_code(),
            Self::Corrupt { .. } => ExitCode::Corrupt,
            Self::Bad { .. } => ExitCode::BadData,
            Self::Exists(_) => ExitCode::Exists,
            Self::Native(_) => ExitCode::WorkerFailed,
            Self::Internal(_) => ExitCode::Internal,
        }
    }

    fn failure_kind(&self) -> FailureKind {
        match self {
            Self::Stuck { .. } => FailureKind::Outage,
            Self::Io(error) => error.failure_kind(),
            Self::Export(error) => error.failure_kind(),
            _ => FailureKind::of_code(self.exit_code()),
        }
    }
}

crate::native::from_torch!(CheckpointError);
