//! What can go wrong with checkpoints, each with its exit code.

use std::path::{Path, PathBuf};

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::FileError;

/// A failure of writing or reading a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The system refused.
    #[error(transparent)]
    Io(#[from] FileError),
    /// The bytes are not those that were written.
    #[error("{path}: {reason}")]
    Corrupt {
        /// Which file.
        path: PathBuf,
        /// Got and wanted.
        reason: String,
    },
    /// Whole, but not what was wanted.
    #[error("{path}: {reason}")]
    Bad {
        /// Which file.
        path: PathBuf,
        /// Got and wanted.
        reason: String,
    },
    /// What would be written exists.
    #[error("{0} exists; say --overwrite to replace it")]
    Exists(PathBuf),
    /// The device failed.
    #[error(transparent)]
    Native(#[from] crate::native::NativeError),
    /// What cannot happen did.
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
            Self::Io(_) => ExitCode::Io,
            Self::Corrupt { .. } => ExitCode::Corrupt,
            Self::Bad { .. } => ExitCode::BadData,
            Self::Exists(_) => ExitCode::Exists,
            Self::Native(_) | Self::Internal(_) => ExitCode::Internal,
        }
    }
}

crate::native::from_torch!(CheckpointError);
