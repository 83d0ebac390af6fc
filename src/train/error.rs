//! Errors of training, each with its exit code.

use locdiff_core::exit_code::{ExitCode, FailureKind, HasExitCode};
use locdiff_core::random::RangeError;

use crate::checkpoint::CheckpointError;
use crate::comm::CommError;
use crate::diffusion::DiffusionError;
use crate::infer::InferError;
use crate::loss::LossError;
use crate::methods::MethodError;
use crate::model::ModelError;
use crate::native::NativeError;
use crate::native::cuda::GraphError;
use crate::native::random::RandomError;
use crate::shards::ShardsError;
use crate::shdd::ShddError;

/// An error from [`crate::train`].
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The gradients of too many consecutive steps were not finite.
    #[error("{0}")]
    Diverged(String),
    /// Some ranks differ from their peers in their state or gradient, although all bits must be equal.
    #[error(
        "step {step}: {what} of {} differs from that of {}",
        rank_list(ranks),
        if ranks.len() == 1 {
            "the other replicas; suspect the memory or the device of that rank"
        } else {
            "their peers; suspect the memory and the devices of these ranks"
        }
    )]
    Corrupted {
        /// The ranks that differ from the majority, or all ranks if there is no majority.
        ranks: Vec<u32>,
        /// What differs.
        what: String,
        /// The step, counted from 1.
        step: u64,
    },
    /// The checkpoint does not match the configuration, the data or the network.
    #[error("{0}")]
    Mismatch(String),
    /// The configuration does not match the data, or is not supported.
    #[error("{0}")]
    Config(String),
    /// The shards cannot be read.
    #[error(transparent)]
    Shards(#[from] ShardsError),
    /// A checkpoint cannot be read or written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The network failed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The loss cannot be computed.
    #[error(transparent)]
    Loss(#[from] LossError),
    /// The forward process of the diffusion failed.
    #[error(transparent)]
    Diffusion(#[from] DiffusionError),
    /// Points cannot be encoded.
    #[error(transparent)]
    Shdd(#[from] ShddError),
    /// The method that is trained failed.
    #[error(transparent)]
    Method(#[from] MethodError),
    /// The quick evaluation failed.
    #[error(transparent)]
    Infer(#[from] InferError),
    /// A parameter of a random draw is out of range.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Random numbers cannot be generated on the device.
    #[error(transparent)]
    Random(#[from] RandomError),
    /// A step cannot be recorded or replayed as a CUDA graph.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// libtorch failed.
    #[error(transparent)]
    Native(#[from] NativeError),
    /// A message cannot be sent to the launcher.
    #[error("cannot send a message to the launcher: {0}")]
    Launcher(String),
}

fn rank_list(ranks: &[u32]) -> String {
    let numbers: Vec<String> = ranks.iter().map(u32::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, numbers.join(", "))
}

impl HasExitCode for TrainError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Mismatch(_) => ExitCode::RunDiffers,
            Self::Diverged(_) => ExitCode::Diverged,
            Self::Corrupted { .. } => ExitCode::Corrupt,
            Self::Config(_) => ExitCode::Config,
            Self::Shards(error) => error.exit_code(),
            Self::Checkpoint(error) => error.exit_code(),
            Self::Infer(error) => error.exit_code(),
            Self::Method(error) => error.exit_code(),
            _ => ExitCode::WorkerFailed,
        }
    }

    fn wrapped(&self) -> Option<&dyn HasExitCode> {
        match self {
            Self::Shards(error) => Some(error),
            Self::Checkpoint(error) => Some(error),
            Self::Infer(error) => Some(error),
            Self::Method(error) => Some(error),
            _ => None,
        }
    }

    fn failure_kind(&self) -> FailureKind {
        match (self, self.wrapped()) {
            (Self::Corrupted { ranks, .. }, _) => FailureKind::Corruption { rank: ranks.first().copied().unwrap_or(0) },
            _ if self.is_caused_by_peer() => FailureKind::Lost,
            (_, Some(wrapped)) => wrapped.failure_kind(),
            _ => FailureKind::of_code(self.exit_code()),
        }
    }

    /// Whether a peer caused this error by making a collective fail. The collective may belong to the training loop,
    /// the loss, the network or the quick evaluation.
    fn is_caused_by_peer(&self) -> bool {
        match self {
            Self::Comm(error)
            | Self::Loss(LossError::Comm(error))
            | Self::Model(ModelError::Comm(error))
            | Self::Infer(InferError::Model(ModelError::Comm(error))) => error.is_caused_by_peer(),
            Self::Method(error) => error.is_caused_by_peer(),
            _ => false,
        }
    }
}

crate::native::from_torch!(TrainError);
