//! Errors of GeoCLIP's files and encoders.

use std::path::{Path, PathBuf};

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::FileError;
use locdiff_core::tables::TableError;

/// An error from [`crate::geoclip`].
#[derive(Debug, thiserror::Error)]
pub enum GeoclipError {
    /// The weights are missing.
    #[error(
        "no GeoCLIP weights in {folder} (retrieval.geoclip): {reason}; fetch them with `locdiff-launch geoclip import \
         --out {folder}`"
    )]
    Missing {
        /// The folder searched.
        folder: String,
        /// Says which file is missing.
        reason: String,
    },
    /// A file does not match its published hash or its manifest.
    #[error("{path}: {reason}")]
    Damaged {
        /// The damaged file.
        path: PathBuf,
        /// What was found and what was expected.
        reason: String,
    },
    /// The gallery file cannot be read.
    #[error(transparent)]
    Table(#[from] TableError),
    /// A tensor is missing or has the wrong shape.
    #[error("GeoCLIP's tensor {name} is missing or has the wrong shape: got {got:?}, wanted {want:?}")]
    Shape {
        /// Name of the tensor.
        name: String,
        /// Shape of the tensor; empty if the tensor is missing.
        got: Vec<i64>,
        /// The expected shape.
        want: Vec<i64>,
    },
    /// A file operation failed.
    #[error(transparent)]
    Io(#[from] FileError),
    /// The output folder exists and holds something other than GeoCLIP weights.
    #[error(
        "{0} exists and is not a folder of GeoCLIP weights, so --overwrite does not replace it; choose another --out"
    )]
    NotOurs(PathBuf),
    /// The output folder exists, and `--overwrite` was not given.
    #[error("{0} exists; use --overwrite to replace it")]
    Exists(PathBuf),
    /// libtorch failed.
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
            Self::Native(_) => ExitCode::WorkerFailed,
        }
    }

    fn wrapped(&self) -> Option<&dyn HasExitCode> {
        match self {
            Self::Table(error) => Some(error),
            Self::Io(error) => Some(error),
            _ => None,
        }
    }
}

crate::native::from_torch!(GeoclipError);
