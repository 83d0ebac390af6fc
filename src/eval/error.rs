//! What can end an evaluation, each with its exit code.

use std::path::PathBuf;

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::geo::GeoError;
use locdiff_core::predictions::PredictionsError;
use locdiff_core::tables::TableError;

use super::retrieval_data::RetrievalDataError;
use crate::checkpoint::CheckpointError;
use crate::diffusion::DiffusionError;
use crate::geoclip::GeoclipError;
use crate::model::ModelError;
use crate::native::NativeError;
use crate::retrieval::RetrievalError;
use crate::shards::ShardsError;
use crate::shdd::ShddError;
use crate::shdd::aggregate::AggregateError;
use crate::shdd::decode::DecodeError;

/// An error of [`crate::eval`].
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// Nothing to evaluate with.
    #[error(
        "{checkpoint} has no averaged weights (its manifest lists no {file}), which evaluation uses; take a checkpoint \
         that `locdiff-launch train` wrote"
    )]
    NoAverage {
        /// Folder of the checkpoint.
        checkpoint: PathBuf,
        /// The file that is missing.
        file: String,
    },
    /// Tensors of another network.
    #[error("{checkpoint}: its averaged weights are not those of its own configuration: {source}")]
    Network {
        /// Folder of the checkpoint.
        checkpoint: PathBuf,
        /// Which does not fit.
        source: ModelError,
    },
    /// Guidance of a network that has never been without an image.
    #[error(
        "eval.guidance is {got}, but {checkpoint} was trained with diffusion.condition_drop = 0 and knows nothing without an \
         image; set eval.guidance = 0, or train with a condition_drop above 0"
    )]
    Guidance {
        /// The strength asked for.
        got: f64,
        /// Folder of the checkpoint.
        checkpoint: PathBuf,
    },
    /// Embeddings that the network does not take.
    #[error(
        "{location}: embeddings have {got} numbers, {checkpoint} was trained on {want}; evaluate on embeddings of the same \
         encoder"
    )]
    Width {
        /// Where the shards are.
        location: String,
        /// Their width.
        got: usize,
        /// Folder of the checkpoint.
        checkpoint: PathBuf,
        /// What it takes.
        want: usize,
    },
    /// Settings would be chosen on what they are tested on.
    #[error(
        "shards.validation ({validation}) and shards.test ({test}) hold {same} photos in common, and settings must not be chosen on \
         what they are tested on; name other rows with `--set shards.validation=...`"
    )]
    SameRows {
        /// Where the validation rows are.
        validation: String,
        /// Where the test rows are.
        test: String,
        /// Photos in both.
        same: usize,
    },
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
    /// An embedding that points nowhere.
    #[error(
        "{location}: row {row} ({id}): its embedding, or what the head makes of it, is zero or not finite, so that it is like nothing"
    )]
    NoDirection {
        /// Where the shards are.
        location: String,
        /// Which, from 0, of all rows.
        row: u64,
        /// Its identifier.
        id: String,
    },
    /// More steps than there are noises.
    #[error(
        "eval.sampler_steps is {got}, but {checkpoint} was trained with diffusion.timesteps = {want}; wanted at most as many"
    )]
    SamplerSteps {
        /// Steps that are asked for.
        got: u32,
        /// Folder of the checkpoint.
        checkpoint: PathBuf,
        /// What it knows.
        want: usize,
    },
    /// A grid from which refinement does not reach the mode of every code.
    #[error(
        "eval.grid_points is {got}, too few for eval.refine with {checkpoint}, whose model.degree is {degree}; wanted \"auto\" \
         or at least {want}"
    )]
    Grid {
        /// Points that are asked for.
        got: u32,
        /// Folder of the checkpoint.
        checkpoint: PathBuf,
        /// Degree of its codes.
        degree: u32,
        /// The least that would do.
        want: u32,
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
    /// Retrieval's data.
    #[error(transparent)]
    RetrievalData(#[from] RetrievalDataError),
    /// Predictions or truth.
    #[error(transparent)]
    Predictions(#[from] PredictionsError),
    /// A truth that lacks rows of the data.
    #[error("{truth} (eval.truth) has no row {id:?}, which {location} has; wanted every row of the data")]
    NoTruth {
        /// The file.
        truth: String,
        /// The row.
        id: String,
        /// The data.
        location: String,
    },
    /// A table of coordinates.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The network.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The sampler.
    #[error(transparent)]
    Diffusion(#[from] DiffusionError),
    /// Decoding.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// Putting samples together.
    #[error(transparent)]
    Aggregate(#[from] AggregateError),
    /// Codes.
    #[error(transparent)]
    Shdd(#[from] ShddError),
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
            Self::NoAverage { .. }
            | Self::Network { .. }
            | Self::Width { .. }
            | Self::NoTruth { .. }
            | Self::NoDirection { .. }
            | Self::SameRows { .. } => ExitCode::BadData,
            Self::RetrievalData(error) => error.exit_code(),
            Self::Predictions(error) => error.exit_code(),
            Self::Retrieval(error) => error.exit_code(),
            Self::Table(error) => error.exit_code(),
            Self::Guidance { .. } | Self::SamplerSteps { .. } | Self::Grid { .. } => ExitCode::Config,
            Self::Empty { .. } => ExitCode::NoData,
            Self::Shards(error) => error.exit_code(),
            Self::Checkpoint(error) => error.exit_code(),
            Self::Geoclip(error) => error.exit_code(),
            _ => ExitCode::WorkerFailed,
        }
    }
}

crate::native::from_torch!(EvalError);
