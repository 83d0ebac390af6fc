//! What can go wrong with event files.

use std::path::{Path, PathBuf};

use crate::exit_code::{ExitCode, HasExitCode};

/// An error of [`crate::tensorboard`].
#[derive(Debug, thiserror::Error)]
pub enum BoardError {
    /// The system refused.
    #[error("{path}: {error}")]
    Io {
        /// Which file or folder.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// A file with the name of an event file that is none, or one that is damaged.
    #[error("{path}: {reason}")]
    Corrupt {
        /// Which file.
        path: PathBuf,
        /// Got and wanted.
        reason: String,
    },
    /// A step before one that is written already.
    #[error("{path}: step {got} came, wanted at least {want}; this is a bug")]
    Backwards {
        /// Which file.
        path: PathBuf,
        /// The step that came.
        got: u64,
        /// The smallest that may come: none that is written already, nor one that the checkpoint has.
        want: u64,
    },
}

impl BoardError {
    pub(super) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |error| Self::Io { path: path.to_owned(), error }
    }

    pub(super) fn corrupt(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::Corrupt { path: path.to_owned(), reason: reason.to_string() }
    }
}

impl HasExitCode for BoardError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Io { .. } => ExitCode::Io,
            Self::Corrupt { .. } => ExitCode::Corrupt,
            Self::Backwards { .. } => ExitCode::Internal,
        }
    }
}
