//! Everything that locating can fail with, each with its exit code.

use std::path::PathBuf;

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::geo::GeoError;
use locdiff_core::tables::TableError;

use crate::checkpoint::CheckpointError;
use crate::diffusion::DiffusionError;
use crate::geoclip::GeoclipError;
use crate::model::ModelError;
use crate::native::NativeError;
use crate::retrieval::RetrievalError;
use crate::shards::ShardsError;
use crate::shdd::ShddError;

/// An error of [`crate::infer`].
#[derive(Debug, thiserror::Error)]
pub enum InferError {
    /// Tensors of another network.
    #[error("{checkpoint}: its averaged weights are not those of its own configuration: {source}")]
    Network {
        /// Folder of the checkpoint.
        checkpoint: PathBuf,
        /// Which does not fit.
        source: ModelError,
    },
    /// The configuration asks for what the checkpoint cannot do.
    #[error("{0}")]
    Config(String),
    /// The checkpoint or the rows are not what locating takes.
    #[error("{0}")]
    BadData(String),
    /// No row is left.
    #[error(
        "{location}: all of its {skipped} rows cannot be used (shards.on_bad_rows is \"skip\"), so there is nothing to evaluate"
    )]
    Empty {
        /// Where the shards are.
        location: String,
        /// Rows that were left out.
        skipped: u64,
    },
    /// Data.
    #[error(transparent)]
    Shards(#[from] ShardsError),
    /// Checkpoints.
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
    /// The network.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The sampler.
    #[error(transparent)]
    Diffusion(#[from] DiffusionError),
    /// Codes, their decoding, and putting samples together.
    #[error(transparent)]
    Shdd(#[from] ShddError),
    /// Coordinates.
    #[error(transparent)]
    Geo(#[from] GeoError),
    /// libtorch.
    #[error(transparent)]
    Native(#[from] NativeError),
}

impl HasExitCode for InferError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Network { .. } | Self::BadData(_) => ExitCode::BadData,
            Self::Config(_) => ExitCode::Config,
            Self::Empty { .. } => ExitCode::NoData,
            Self::Shards(error) => error.exit_code(),
            Self::Checkpoint(error) => error.exit_code(),
            Self::Geoclip(error) => error.exit_code(),
            Self::Retrieval(error) => error.exit_code(),
            Self::Table(error) => error.exit_code(),
            _ => ExitCode::WorkerFailed,
        }
    }
}

crate::native::from_torch!(InferError);
