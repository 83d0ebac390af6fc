//! Errors of event files.

use std::path::{Path, PathBuf};

use crate::exit_code::{ExitCode, HasExitCode};
use crate::files::FileError;

/// An error from [`crate::tensorboard`].
#[derive(Debug, thiserror::Error)]
pub enum BoardError {
    /// A file operation failed.
    #[error(transparent)]
    Io(#[from] FileError),
    /// A file has the name of an event file, but is damaged or has another format.
    #[error("{path}: {reason}")]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong with the file.
        reason: String,
    },
    /// A step is smaller than the smallest step that may be written.
    #[error("{path}: step is {got}, wanted at least {want}; this is a bug")]
    Backwards {
        /// The file.
        path: PathBuf,
        /// The step to be written.
        got: u64,
        /// The smallest step that may be written. After a write, this is the step of that write. Before the first write
        /// of a resumed run, it is the step after the checkpoint.
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

    fn wrapped(&self) -> Option<&dyn HasExitCode> {
        match self {
            Self::Io(error) => Some(error),
            _ => None,
        }
    }
}
