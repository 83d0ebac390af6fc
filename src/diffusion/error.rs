//! What can go wrong in the diffusion process.

use crate::native::random::RandomError;

/// An error of [`crate::diffusion`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DiffusionError {
    /// A timestep outside the schedule.
    #[error("timestep {got} is not one of the schedule's {timesteps}")]
    Timestep {
        /// The timestep.
        got: usize,
        /// How many there are.
        timesteps: usize,
    },
    /// A chain that the schedule does not have room for.
    #[error("a chain of {got} steps, wanted 1 to the schedule's {timesteps}")]
    Steps {
        /// Steps asked for.
        got: usize,
        /// Timesteps of the schedule.
        timesteps: usize,
    },
    /// Noise of a chain outside 0 to 1.
    #[error("eta is {0}, wanted 0 to 1")]
    Eta(f64),
    /// Random numbers that could not be drawn.
    #[error(transparent)]
    Random(#[from] RandomError),
    /// libtorch refused or failed.
    #[error(transparent)]
    Native(#[from] crate::native::NativeError),
}

crate::native::from_torch!(DiffusionError);
