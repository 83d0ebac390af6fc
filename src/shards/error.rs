//! What can be wrong with shards, each with its exit code.

use std::path::PathBuf;

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::FileError;
use locdiff_core::tables::TableError;

/// Where in the data something is wrong, as a message begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spot {
    /// File, or the URL that it came from.
    pub file: String,
    /// Row group within the file.
    pub row_group: Option<u32>,
    /// Name of the column.
    pub column: Option<String>,
    /// Row within the row group.
    pub row: Option<u64>,
}

impl Spot {
    /// A file as a whole.
    pub fn file(file: impl Into<String>) -> Self {
        Self { file: file.into(), row_group: None, column: None, row: None }
    }

    /// A column of it.
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

/// A failure of reading or writing shards.
#[derive(Debug, thiserror::Error)]
pub enum ShardsError {
    /// Nothing to read.
    #[error("no shards at {location}: {reason}{}", way_out(location))]
    Missing {
        /// Where they were looked for.
        location: String,
        /// What was found instead.
        reason: String,
    },
    /// The data is whole but not what was wanted: a wrong width, a missing column, a value out of range.
    #[error("{spot}: {reason}")]
    Bad {
        /// Where.
        spot: Box<Spot>,
        /// Got and wanted.
        reason: String,
    },
    /// The bytes are not those that were written.
    #[error("{spot}: {reason}")]
    Corrupt {
        /// Where.
        spot: Box<Spot>,
        /// Got and wanted.
        reason: String,
    },
    /// The data is not that of the run that is resumed.
    #[error("{location}: the data has changed since the run began: {reason}")]
    Changed {
        /// What was read.
        location: String,
        /// Got and wanted.
        reason: String,
    },
    /// The system refused.
    #[error(transparent)]
    Io(#[from] FileError),
    /// What would be written exists.
    #[error("{0} exists; say --overwrite to replace it")]
    Exists(PathBuf),
    /// An argument that cannot be meant.
    #[error("{0}")]
    Argument(String),
    /// A table of ids and coordinates, or a matrix beside it, cannot be used.
    #[error(transparent)]
    Table(#[from] TableError),
    /// GeoCLIP's weights or gallery cannot be used.
    #[error(transparent)]
    Geoclip(#[from] crate::geoclip::GeoclipError),
    /// The configuration cannot be meant, here or for the run that is resumed.
    #[error("{0}")]
    Config(String),
    /// The shim over libtorch refused.
    #[error("libtorch: {0}")]
    Native(#[from] crate::native::NativeError),
    /// What cannot happen did: a reader thread panicked, or the plan breaks its own law.
    #[error("{0}; this is a bug")]
    Internal(String),
}

impl ShardsError {
    /// The data is whole but not what was wanted.
    pub(crate) fn bad(spot: Spot, reason: impl Into<String>) -> Self {
        Self::Bad { spot: Box::new(spot), reason: reason.into() }
    }

    /// The bytes are not those that were written.
    pub(crate) fn corrupt(spot: Spot, reason: impl Into<String>) -> Self {
        Self::Corrupt { spot: Box::new(spot), reason: reason.into() }
    }

    /// The system refused something about a file.
    pub(crate) fn io(path: impl Into<PathBuf>, error: std::io::Error) -> Self {
        Self::Io(FileError { path: path.into(), error })
    }
}

impl HasExitCode for ShardsError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Missing { .. } => ExitCode::NoData,
            Self::Bad { .. } => ExitCode::BadData,
            Self::Corrupt { .. } => ExitCode::Corrupt,
            Self::Changed { .. } => ExitCode::DataChanged,
            Self::Io(_) => ExitCode::Io,
            Self::Exists(_) => ExitCode::Exists,
            Self::Argument(_) => ExitCode::Usage,
            Self::Table(error) => error.exit_code(),
            Self::Geoclip(error) => error.exit_code(),
            Self::Config(_) => ExitCode::Config,
            Self::Internal(_) | Self::Native(_) => ExitCode::Internal,
        }
    }
}

/// What to do where there are no shards: nothing is made behind a URL, nor under the name of a pattern.
fn way_out(location: &str) -> String {
    if location.contains("://") || location.contains(['*', '?', '[']) {
        return String::new();
    }
    format!("; make some with `locdiff-launch shards simulate --out {location}`")
}

crate::native::from_torch!(ShardsError);
