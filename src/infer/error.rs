//! Errors of inference and evaluation, each with its exit code.

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::geo::GeoError;
use locdiff_core::predictions::PredictionsError;
use locdiff_core::prior_file::PriorError;
use locdiff_core::tables::TableError;

use crate::checkpoint::CheckpointError;
use crate::diffusion::DiffusionError;
use crate::geoclip::GeoclipError;
use crate::model::ModelError;
use crate::native::NativeError;
use crate::native::cuda::GraphError;
use crate::retrieval::RetrievalError;
use crate::shards::ShardsError;
use crate::shdd::ShddError;

/// An error from [`crate::infer`] or [`crate::eval`].
#[derive(Debug, thiserror::Error)]
pub enum InferError {
    /// The checkpoint does not support a setting of the configuration.
    #[error("{0}")]
    Config(String),
    /// The checkpoint or the rows cannot be used.
    #[error("{0}")]
    BadData(String),
    /// The data has no usable rows.
    #[error("{0}")]
    Empty(String),
    /// The shards cannot be read.
    #[error(transparent)]
    Shards(#[from] ShardsError),
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// GeoCLIP's weights or gallery cannot be used.
    #[error(transparent)]
    Geoclip(#[from] GeoclipError),
    /// The gallery, the head or a query cannot be used.
    #[error(transparent)]
    Retrieval(#[from] RetrievalError),
    /// A table of coordinates cannot be read.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The file with the true places of the rows cannot be used.
    #[error(transparent)]
    Predictions(#[from] PredictionsError),
    /// The file of the prior cannot be used.
    #[error(transparent)]
    Prior(#[from] PriorError),
    /// The network failed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The sampler failed.
    #[error(transparent)]
    Diffusion(#[from] DiffusionError),
    /// Encoding, decoding or aggregating codes failed.
    #[error(transparent)]
    Shdd(#[from] ShddError),
    /// Coordinates are not valid.
    #[error(transparent)]
    Geo(#[from] GeoError),
    /// libtorch failed.
    #[error(transparent)]
    Native(#[from] NativeError),
    /// The steps of the sampler cannot be captured or replayed.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// The answers cannot be sent to the launcher.
    #[error("cannot send a message to the launcher: {0}")]
    Launcher(String),
}

impl HasExitCode for InferError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::BadData(_) => ExitCode::BadData,
            Self::Config(_) => ExitCode::Config,
            Self::Empty(_) => ExitCode::NoData,
            Self::Shards(error) => error.exit_code(),
            Self::Checkpoint(error) => error.exit_code(),
            Self::Geoclip(error) => error.exit_code(),
            Self::Retrieval(error) => error.exit_code(),
            Self::Table(error) => error.exit_code(),
            Self::Predictions(error) => error.exit_code(),
            Self::Prior(error) => error.exit_code(),
            _ => ExitCode::WorkerFailed,
        }
    }

    fn wrapped(&self) -> Option<&dyn HasExitCode> {
        match self {
            Self::Shards(error) => Some(error),
            Self::Checkpoint(error) => Some(error),
            Self::Geoclip(error) => Some(error),
            Self::Retrieval(error) => Some(error),
            Self::Table(error) => Some(error),
            Self::Predictions(error) => Some(error),
            Self::Prior(error) => Some(error),
            _ => None,
        }
    }
}

crate::native::from_torch!(InferError);
