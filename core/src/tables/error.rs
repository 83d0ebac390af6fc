//! Errors that occur when a table is read.

use std::path::{Path, PathBuf};

use crate::exit_code::{ExitCode, FailureKind, HasExitCode};

/// An error from [`crate::tables`].
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// The file as a whole is invalid or damaged, or cannot be read.
    #[error("{path}: {reason}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, or the message of the operating system.
        reason: String,
        /// The exit code for this cause.
        exit_code: ExitCode,
        /// The kind of the failure, which decides whether the launcher tries again.
        kind: FailureKind,
    },
    /// A row is invalid.
    #[error("{path}: row {row}: {reason}")]
    Row {
        /// The file.
        path: PathBuf,
        /// Number of the row, from 0. The header is not counted.
        row: usize,
        /// What is wrong with the row.
        reason: String,
    },
}

impl TableError {
    /// The file as a whole is invalid, for example because a column is missing.
    pub fn file(path: &Path, reason: impl Into<String>) -> Self {
        Self::of_content(path, reason.into(), ExitCode::BadData)
    }

    /// The file is damaged, or is not in the format that its extension indicates.
    pub(super) fn damaged(path: &Path, reason: impl Into<String>) -> Self {
        Self::of_content(path, reason.into(), ExitCode::Corrupt)
    }

    /// Reading the file failed.
    pub(super) fn io(path: &Path, error: &std::io::Error) -> Self {
        let (exit_code, kind) = (ExitCode::Io, FailureKind::of_io(error));
        Self::File { path: path.to_owned(), reason: error.to_string(), exit_code, kind }
    }

    fn of_content(path: &Path, reason: String, exit_code: ExitCode) -> Self {
        Self::File { path: path.to_owned(), reason, exit_code, kind: FailureKind::Final }
    }

    /// A row is invalid.
    pub fn row(path: &Path, row: usize, reason: impl Into<String>) -> Self {
        Self::Row { path: path.to_owned(), row, reason: reason.into() }
    }

    /// Converts an error of the CSV reader into an I/O error or an error about malformed CSV. `row` is the row that was
    /// being read, or `None` for the header.
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

    fn failure_kind(&self) -> FailureKind {
        match self {
            Self::File { kind, .. } => *kind,
            Self::Row { .. } => FailureKind::Final,
        }
    }
}
