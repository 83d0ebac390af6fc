//! Errors that occur while shards are read or written, with their exit codes.

use std::path::PathBuf;

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::FileError;
use locdiff_core::tables::TableError;

/// The end of an error message about a bad row.
pub(super) const SKIP_ADVICE: &str = "set shards.on_bad_rows = \"skip\" to leave out such rows";

/// A location in the data, printed at the start of error messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spot {
    /// Path or URL of the file.
    pub file: String,
    /// Row group within the file.
    pub row_group: Option<u32>,
    /// Name of the column.
    pub column: Option<String>,
    /// Row within the row group.
    pub row: Option<u64>,
}

impl Spot {
    /// The location of a whole file.
    pub fn file(file: impl Into<String>) -> Self {
        Self { file: file.into(), row_group: None, column: None, row: None }
    }

    /// Narrows the location to one column.
    #[must_use]
    pub fn column(self, column: &str) -> Self {
        Self { column: Some(column.to_owned()), ..self }
    }
}

impl std::fmt::Display for Spot {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}", self.file)?;
        if let Some(row_group) = self.row_group {
            write!(out, ": row group {row_group}")?;
        }
        if let Some(column) = &self.column {
            write!(out, ": column `{column}`")?;
        }
        if let Some(row) = self.row {
            write!(out, ": row {row}")?;
        }
        Ok(())
    }
}

/// An error that occurred while shards were read or written.
#[derive(Debug, thiserror::Error)]
pub enum ShardsError {
    /// There are no shards at the location.
    #[error("no shards at {location}: {reason}")]
    Missing {
        /// The path, glob or URL that was searched.
        location: String,
        /// What was found instead.
        reason: String,
    },
    /// The data is intact but unusable: a wrong width, a missing column, a value out of range.
    #[error("{spot}: {reason}")]
    Bad {
        /// Where the problem is.
        spot: Box<Spot>,
        /// What was found and what was wanted.
        reason: String,
    },
    /// A row has bad values.
    #[error("{spot}: {reason}; {}", SKIP_ADVICE)]
    BadRow {
        /// Where the row is.
        spot: Box<Spot>,
        /// What was found and what was wanted.
        reason: String,
    },
    /// The data is damaged: bytes differ from those that were written.
    #[error("{spot}: {reason}")]
    Corrupt {
        /// Where the problem is.
        spot: Box<Spot>,
        /// What was found and what was wanted.
        reason: String,
    },
    /// The data has changed since the run began or, for an S3 object, since this command opened it.
    #[error("{location}: the data has changed since it was first opened: {reason}")]
    Changed {
        /// The file or data set that changed.
        location: String,
        /// What was found and what was wanted.
        reason: String,
    },
    /// A file operation failed.
    #[error(transparent)]
    Io(#[from] FileError),
    /// The output folder already exists.
    #[error("{0} exists; use --overwrite to replace it")]
    Exists(PathBuf),
    /// An argument is invalid.
    #[error("{0}")]
    Argument(String),
    /// A table of ids and coordinates, or a matrix of embeddings, cannot be used.
    #[error(transparent)]
    Table(#[from] TableError),
    /// GeoCLIP's weights or gallery cannot be used.
    #[error(transparent)]
    Geoclip(#[from] crate::geoclip::GeoclipError),
    /// The configuration is invalid, or does not match the run that is being resumed.
    #[error("{0}")]
    Config(String),
    /// A call into libtorch failed.
    #[error("libtorch: {0}")]
    Native(#[from] crate::native::NativeError),
    /// An internal error: a reader thread panicked, or an invariant of the plan is violated.
    #[error("{0}; this is a bug")]
    Internal(String),
}

impl ShardsError {
    /// Builds a [`ShardsError::Bad`].
    pub(crate) fn bad(spot: Spot, reason: impl Into<String>) -> Self {
        Self::Bad { spot: Box::new(spot), reason: reason.into() }
    }

    /// Builds a [`ShardsError::Corrupt`].
    pub(crate) fn corrupt(spot: Spot, reason: impl Into<String>) -> Self {
        Self::Corrupt { spot: Box::new(spot), reason: reason.into() }
    }

    /// If this error says that shards are missing, adds the configuration field that their location comes from.
    #[must_use]
    pub fn of_field(self, field: &str) -> Self {
        match self {
            Self::Missing { location, reason } => Self::Missing { location: format!("{location} ({field})"), reason },
            other => other,
        }
    }

    /// Builds a [`ShardsError::Io`] for a path.
    pub(crate) fn io(path: impl Into<PathBuf>, error: std::io::Error) -> Self {
        Self::Io(FileError { path: path.into(), error })
    }
}

impl HasExitCode for ShardsError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Missing { .. } => ExitCode::NoData,
            Self::Bad { .. } | Self::BadRow { .. } => ExitCode::BadData,
            Self::Corrupt { .. } => ExitCode::Corrupt,
            Self::Changed { .. } => ExitCode::DataChanged,
            Self::Io(_) => ExitCode::Io,
            Self::Exists(_) => ExitCode::Exists,
            Self::Argument(_) => ExitCode::Usage,
            Self::Table(error) => error.exit_code(),
            Self::Geoclip(error) => error.exit_code(),
            Self::Config(_) => ExitCode::Config,
            Self::Native(_) => ExitCode::WorkerFailed,
            Self::Internal(_) => ExitCode::Internal,
        }
    }

    fn wrapped(&self) -> Option<&dyn HasExitCode> {
        match self {
            Self::Io(error) => Some(error),
            Self::Table(error) => Some(error),
            Self::Geoclip(error) => Some(error),
            _ => None,
        }
    }
}

crate::native::from_torch!(ShardsError);
