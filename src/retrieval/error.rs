//! What can be wrong with a gallery, a head or a query.

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::tables::TableError;

use crate::geoclip::GeoclipError;

/// An error of [`crate::retrieval`].
#[derive(Debug, thiserror::Error)]
pub enum RetrievalError {
    /// A head that does not fit the data.
    #[error("retrieval.head = \"{head}\" does not fit {location}: {reason}")]
    Head {
        /// The head.
        head: &'static str,
        /// The data.
        location: String,
        /// Why, and what would.
        reason: String,
    },
    /// Nothing to retrieve.
    #[error("{0}: no gallery points, wanted at least 1")]
    EmptyGallery(String),
    /// A vector that points nowhere, or is not made of numbers.
    #[error("{what} {row}: its embedding is zero or not finite, so that it is like nothing")]
    NoDirection {
        /// A gallery point or an image.
        what: &'static str,
        /// Which, from 0.
        row: usize,
    },
    /// Tensors or lists that do not belong together.
    #[error("{what}: got {got}, wanted {want}")]
    Shape {
        /// What.
        what: &'static str,
        /// Its size.
        got: String,
        /// The size that fits.
        want: String,
    },
    /// The gallery's file.
    #[error(transparent)]
    Table(#[from] TableError),
    /// GeoCLIP's weights.
    #[error(transparent)]
    Geoclip(#[from] GeoclipError),
    /// libtorch refused or failed.
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
