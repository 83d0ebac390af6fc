//! What can go wrong in the diffusion process.

use crate::native::random::RandomError;

/// An error of [`crate::diffusion`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DiffusionError {
    /// A timestep or a chain that the schedule does not have: what was got and what was wanted.
    #[error("{0}")]
    Bad(String),
    /// Random numbers that could not be drawn.
    #[error(transparent)]
    Random(#[from] RandomError),
    /// libtorch refused or failed.
    #[error(transparent)]
    Native(#[from] crate::native::NativeError),
}

crate::native::from_torch!(DiffusionError);
