//! Errors of the diffusion process.

use crate::native::random::RandomError;

/// An error from [`crate::diffusion`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DiffusionError {
    /// An invalid timestep, number of steps or eta. The text contains the value and the allowed range.
    #[error("{0}")]
    Bad(String),
    /// Random numbers could not be drawn.
    #[error(transparent)]
    Random(#[from] RandomError),
    /// libtorch failed.
    #[error(transparent)]
    Native(#[from] crate::native::NativeError),
}

crate::native::from_torch!(DiffusionError);
