//! Errors of inference and evaluation, each with its exit code.

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::geo::GeoError;
use locdiff_core::predictions::PredictionsError;
use locdiff_core::tables::TableError;

use crate::checkpoint::CheckpointError;
use crate::diffusion::DiffusionError;
use crate::geoclip::GeoclipError;
use crate::model::ModelError;
use crate::native::NativeError;
use crate::retrieval::RetrievalError;
use crate::shards::ShardsError;
use crate::shdd::ShddError;

/// An error of [`crate::infer`] and [`crate::eval`].
#[derive(Debug, thiserror::Error)]
pub enum InferError {
    /// The configuration asks for something that the checkpoint does not support.
    #[error("{0}")]
    Config(String),
    /// The checkpoint or the rows cannot be used.
    #[error("{0}")]
    BadData(String),
    /// No usable rows.
    #[error("{0}")]
    Empty(String),
    /// Reading the shards.
    #[error(transparent)]
    Shards(#[from] ShardsError),
    /// Reading the checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// GeoCLIP's weights or gallery.
    #[error(transparent)]
    Geoclip(#[from] GeoclipError),
    /// Gallery, head or query.
    #[error(transparent)]
    Retrieval(#[from] RetrievalError),
    /// A table of coordinates.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The true places of the rows.
    #[error(transparent)]
    Predictions(#[from] PredictionsError),
    /// The network.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The sampler.
    #[error(transparent)]
    Diffusion(#[from] DiffusionError),
    /// Encoding, decoding or aggregating codes.
    #[error(transparent)]
    Shdd(#[from] ShddError),
    /// Coordinates.
    #[error(transparent)]
    Geo(#[from] GeoError),
    /// libtorch failed.
    #[error(transparent)]
    Native(#[from] NativeError),
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
            _ => ExitCode::WorkerFailed,
        }
    }
}

crate::native::from_torch!(InferError);
