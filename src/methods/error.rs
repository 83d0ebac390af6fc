//! Errors of the methods that can be trained.

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::random::RangeError;

use crate::comm::CommError;
use crate::diffusion::DiffusionError;
use crate::infer::InferError;
use crate::loss::LossError;
use crate::model::ModelError;
use crate::native::NativeError;
use crate::native::random::RandomError;
use crate::shdd::ShddError;

/// An error from [`crate::methods`].
#[derive(Debug, thiserror::Error)]
pub enum MethodError {
    /// The method cannot be trained with this configuration or this data.
    #[error("{0}")]
    Config(String),
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
    /// GeoCLIP, the gallery or the evaluation cannot be used.
    #[error(transparent)]
    Infer(#[from] InferError),
    /// A parameter of a random draw is out of range.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Random numbers cannot be generated on the device.
    #[error(transparent)]
    Random(#[from] RandomError),
    /// libtorch failed.
    #[error(transparent)]
    Native(#[from] NativeError),
}

impl HasExitCode for MethodError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Config(_) => ExitCode::Config,
            Self::Infer(error) => error.exit_code(),
            _ => ExitCode::WorkerFailed,
        }
    }

    fn wrapped(&self) -> Option<&dyn HasExitCode> {
        match self {
            Self::Infer(error) => Some(error),
            _ => None,
        }
    }

    fn is_caused_by_peer(&self) -> bool {
        match self {
            Self::Comm(error) | Self::Loss(LossError::Comm(error)) | Self::Model(ModelError::Comm(error)) => {
                error.is_caused_by_peer()
            }
            _ => false,
        }
    }
}

crate::native::from_torch!(MethodError);
