//! What can end an evaluation, each with its exit code.

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::geo::GeoError;
use locdiff_core::predictions::PredictionsError;

use crate::infer::InferError;
use crate::native::NativeError;
use crate::retrieval::RetrievalError;

/// An error of [`crate::eval`].
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// Locating.
    #[error(transparent)]
    Infer(#[from] InferError),
    /// Rows that must not be used, or that nothing is known of.
    #[error("{0}")]
    BadData(String),
    /// Choosing settings.
    #[error(transparent)]
    Retrieval(#[from] RetrievalError),
    /// Predictions or truth.
    #[error(transparent)]
    Predictions(#[from] PredictionsError),
    /// Coordinates.
    #[error(transparent)]
    Geo(#[from] GeoError),
    /// libtorch.
    #[error(transparent)]
    Native(#[from] NativeError),
    /// The launcher cannot be told.
    #[error("the launcher cannot be told: {0}")]
    Launcher(String),
}

impl HasExitCode for EvalError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Infer(error) => error.exit_code(),
            Self::BadData(_) => ExitCode::BadData,
            Self::Retrieval(error) => error.exit_code(),
            Self::Predictions(error) => error.exit_code(),
            _ => ExitCode::WorkerFailed,
        }
    }
}
