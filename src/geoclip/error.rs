//! What can be wrong with GeoCLIP's files.

use std::path::{Path, PathBuf};

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::FileError;
use locdiff_core::tables::TableError;

/// An error of [`crate::geoclip`].
#[derive(Debug, thiserror::Error)]
pub enum GeoclipError {
    /// The weights are not there.
    #[error("no GeoCLIP weights in {folder}: {reason}; fetch them with `locdiff-launch geoclip import --out {folder}`")]
    Missing {
        /// Where they were looked for.
        folder: String,
        /// What was found instead.
        reason: String,
    },
    /// Bytes that are not those that were published or written.
    #[error("{path}: {reason}")]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// Got and wanted.
        reason: String,
    },
    /// The gallery's file.
    #[error(transparent)]
    Table(#[from] TableError),
    /// A tensor of the wrong shape.
    #[error("{name} is {got:?}, wanted {want:?}")]
    Shape {
        /// Which tensor.
        name: String,
        /// Its shape.
        got: Vec<i64>,
        /// The shape that fits; -1 stands for any length.
        want: Vec<i64>,
    },
    /// The system refused.
    #[error(transparent)]
    Io(#[from] FileError),
    /// What would be written exists.
    #[error("{0} is no folder of GeoCLIP's weights, and --overwrite replaces nothing else; name another with --out")]
    NotOurs(PathBuf),
    /// What would be written exists.
    #[error("{0} exists; say --overwrite to replace it")]
    Exists(PathBuf),
    /// libtorch refused or failed.
    #[error(transparent)]
    Native(#[from] crate::native::NativeError),
}

impl GeoclipError {
    pub(super) fn damaged(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::Damaged { path: path.to_owned(), reason: reason.to_string() }
    }
}

impl HasExitCode for GeoclipError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Missing { .. } => ExitCode::NoData,
            Self::Damaged { .. } => ExitCode::Corrupt,
            Self::Shape { .. } => ExitCode::BadData,
            Self::Table(error) => error.exit_code(),
            Self::Io(_) => ExitCode::Io,
            Self::Exists(_) | Self::NotOurs(_) => ExitCode::Exists,
            Self::Native(_) => ExitCode::Internal,
        }
    }
}

crate::native::from_torch!(GeoclipError);
