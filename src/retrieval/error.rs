//! Errors of galleries, heads and queries.

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::tables::TableError;

use crate::geoclip::GeoclipError;

/// An error of [`crate::retrieval`].
#[derive(Debug, thiserror::Error)]
pub enum RetrievalError {
    /// The head does not fit the data.
    #[error("retrieval.head = \"{head}\" does not fit {location}: {reason}")]
    Head {
        /// The configured head.
        head: &'static str,
        /// Location of the data.
        location: String,
        /// Why it does not fit, and what to do.
        reason: String,
    },
    /// The gallery has no points.
    #[error("{0}: no gallery points, wanted at least 1")]
    EmptyGallery(String),
    /// An embedding that is zero or not finite.
    #[error("{what} {row}: its embedding is zero or not finite, so it has no direction")]
    NoDirection {
        /// `"gallery point"` or `"image"`.
        what: &'static str,
        /// Its index, from 0.
        row: usize,
    },
    /// Tensors or lists whose sizes do not match.
    #[error("{what}: got {got}, wanted {want}")]
    Shape {
        /// The tensor or list.
        what: &'static str,
        /// Its size.
        got: String,
        /// The expected size.
        want: String,
    },
    /// The gallery file cannot be read.
    #[error(transparent)]
    Table(#[from] TableError),
    /// GeoCLIP's weights or gallery.
    #[error(transparent)]
    Geoclip(#[from] GeoclipError),
    /// libtorch failed.
    #[error(transparent)]
    Native(#[from] crate::native::NativeError),
}

impl HasExitCode for RetrievalError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Head { .. } => ExitCode::Config,
            Self::EmptyGallery(_) | Self::NoDirection { .. } => ExitCode::BadData,
            Self::Table(error) => error.exit_code(),
            Self::Geoclip(error) => error.exit_code(),
            Self::Shape { .. } | Self::Native(_) => ExitCode::Internal,
        }
    }
}

crate::native::from_torch!(RetrievalError);
