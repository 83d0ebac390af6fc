//! Errors of galleries, heads and queries.

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::tables::TableError;

use crate::geoclip::GeoclipError;

/// An error from [`crate::retrieval`].
#[derive(Debug, thiserror::Error)]
pub enum RetrievalError {
    /// The configured head cannot be used with the data.
    #[error("retrieval.head = \"{head}\" cannot be used with {location}: {reason}")]
    Head {
        /// The configured head.
        head: &'static str,
        /// Location of the data.
        location: String,
        /// Why the head cannot be used, and what to do.
        reason: String,
    },
    /// The gallery has no points.
    #[error("{0}: no gallery points, wanted at least 1")]
    EmptyGallery(String),
    /// An embedding is zero or not finite.
    #[error("{what} {row}: its embedding is zero or not finite, so it has no direction")]
    NoDirection {
        /// What the embedding belongs to: `"gallery point"` or `"image"`.
        what: &'static str,
        /// Index of the gallery point or image, from 0.
        row: usize,
    },
    /// For one of the photos, the evaluation leaves out all gallery points.
    #[error(
        "image {row}: all gallery points are within eval.exclude_km ({radius_km} km) of its true place; lower \
         eval.exclude_km"
    )]
    AllExcluded {
        /// Index of the image, from 0.
        row: usize,
        /// The radius.
        radius_km: f64,
    },
    /// The sizes of tensors or lists do not match.
    #[error("{what}: got {got}, wanted {want}")]
    Shape {
        /// Name of the tensor or list.
        what: &'static str,
        /// The actual size.
        got: String,
        /// The expected size.
        want: String,
    },
    /// The gallery file cannot be read.
    #[error(transparent)]
    Table(#[from] TableError),
    /// GeoCLIP's weights or gallery cannot be used.
    #[error(transparent)]
    Geoclip(#[from] GeoclipError),
    /// libtorch failed.
    #[error(transparent)]
    Native(#[from] crate::native::NativeError),
}

impl HasExitCode for RetrievalError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Head { .. } | Self::AllExcluded { .. } => ExitCode::Config,
            Self::EmptyGallery(_) | Self::NoDirection { .. } => ExitCode::BadData,
            Self::Table(error) => error.exit_code(),
            Self::Geoclip(error) => error.exit_code(),
            Self::Shape { .. } => ExitCode::Internal,
            Self::Native(_) => ExitCode::WorkerFailed,
        }
    }

    fn wrapped(&self) -> Option<&dyn HasExitCode> {
        match self {
            Self::Table(error) => Some(error),
            Self::Geoclip(error) => Some(error),
            _ => None,
        }
    }
}

crate::native::from_torch!(RetrievalError);
