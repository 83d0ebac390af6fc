//! What can be wrong with a table.

use std::path::{Path, PathBuf};

use crate::exit_code::{ExitCode, HasExitCode};

/// An error of [`crate::tables`].
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// The file as a whole is not what was wanted, or damaged, or the system refused.
    #[error("{path}: {reason}")]
    File {
        /// Which file.
        path: PathBuf,
        /// Got and wanted, or what the system said.
        reason: String,
        /// Which of these it is.
        exit_code: ExitCode,
    },
    /// A row is not what was wanted.
    #[error("{path}: row {row}: {reason}")]
    Row {
        /// Which file.
        path: PathBuf,
        /// Which row, from 0, the header not counted.
        row: usize,
        /// Got and wanted.
        reason: String,
    },
}

impl TableError {
    /// The file as a whole is not what was wanted.
    pub fn file(path: &Path, reason: impl Into<String>) -> Self {
        Self::File { path: path.to_owned(), reason: reason.into(), exit_code: ExitCode::BadData }
    }

    /// Bytes that are not those of a whole file of its kind.
    pub(super) fn damaged(path: &Path, reason: impl Into<String>) -> Self {
        Self::File { path: path.to_owned(), reason: reason.into(), exit_code: ExitCode::Corrupt }
    }

    /// The system refused.
    pub(super) fn io(path: &Path, error: &std::io::Error) -> Self {
        Self::File { path: path.to_owned(), reason: error.to_string(), exit_code: ExitCode::Io }
    }

    /// A row is not what was wanted.
    pub fn row(path: &Path, row: usize, reason: impl Into<String>) -> Self {
        Self::Row { path: path.to_owned(), row, reason: reason.into() }
    }

    /// The system's refusals apart from malformed text.
    pub(super) fn csv(path: &Path, row: Option<usize>, error: &csv::Error) -> Self {
        match (error.kind(), row) {
            (csv::ErrorKind::Io(error), _) => Self::io(path, error),
            (_, Some(row)) => Self::row(path, row, error.to_string()),
            (_, None) => Self::file(path, error.to_string()),
        }
    }
}

impl HasExitCode for TableError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::File { exit_code, .. } => *exit_code,
            Self::Row { .. } => ExitCode::BadData,
        }
    }
}
