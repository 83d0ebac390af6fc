//! What can go wrong with event files.

use std::path::{Path, PathBuf};

use crate::exit_code::{ExitCode, HasExitCode};
use crate::files::FileError;

/// An error of [`crate::tensorboard`].
#[derive(Debug, thiserror::Error)]
pub enum BoardError {
    /// The system refused.
    #[error(transparent)]
    Io(#[from] FileError),
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
    pub(super) fn corrupt(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::Corrupt { path: path.to_owned(), reason: reason.to_string() }
    }
}

impl HasExitCode for BoardError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Io(_) => ExitCode::Io,
            Self::Corrupt { .. } => ExitCode::Corrupt,
            Self::Backwards { .. } => ExitCode::Internal,
        }
    }
}
