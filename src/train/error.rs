//! What can end a training run.

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::random::RangeError;
use locdiff_core::tensorboard::BoardError;

use crate::checkpoint::CheckpointError;
use crate::comm::CommError;
use crate::diffusion::DiffusionError;
use crate::infer::InferError;
use crate::loss::LossError;
use crate::model::ModelError;
use crate::native::NativeError;
use crate::native::cuda::GraphError;
use crate::native::random::RandomError;
use crate::shards::ShardsError;
use crate::shdd::ShddError;

/// An error of [`crate::train`].
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// Too many gradients in a row were not finite.
    #[error("{0}")]
    Diverged(String),
    /// A checkpoint that does not fit the configuration, the data or the network.
    #[error("{0}")]
    Misfit(String),
    /// The configuration asks for what this version or this data cannot do.
    #[error("{0}")]
    Config(String),
    /// Data.
    #[error(transparent)]
    Shards(#[from] ShardsError),
    /// Checkpoints.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// TensorBoard.
    #[error(transparent)]
    Board(#[from] BoardError),
    /// Collectives.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The network.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The loss.
    #[error(transparent)]
    Loss(#[from] LossError),
    /// The forward process.
    #[error(transparent)]
    Diffusion(#[from] DiffusionError),
    /// Codes.
    #[error(transparent)]
    Shdd(#[from] ShddError),
    /// The quick evaluation.
    #[error(transparent)]
    Infer(#[from] InferError),
    /// Random numbers.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Random numbers on a device.
    #[error(transparent)]
    Random(#[from] RandomError),
    /// The recorded step.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// libtorch.
    #[error(transparent)]
    Native(#[from] NativeError),
    /// The launcher cannot be told.
    #[error("the launcher cannot be told: {0}")]
    Launcher(String),
}

impl HasExitCode for TrainError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Misfit(_) => ExitCode::RunDiffers,
            Self::Diverged(_) => ExitCode::Diverged,
            Self::Config(_) => ExitCode::Config,
            Self::Shards(error) => error.exit_code(),
            Self::Checkpoint(error) => error.exit_code(),
            Self::Board(error) => error.exit_code(),
            Self::Infer(error) => error.exit_code(),
            _ => ExitCode::WorkerFailed,
        }
    }

    /// Wherever the broken exchange between ranks was noticed.
    fn is_of_peer(&self) -> bool {
        match self {
            Self::Comm(error)
            | Self::Loss(LossError::Comm(error))
            | Self::Model(ModelError::Comm(error))
            | Self::Infer(InferError::Model(ModelError::Comm(error))) => error.is_of_peer(),
            _ => false,
        }
    }
}

crate::native::from_torch!(TrainError);
