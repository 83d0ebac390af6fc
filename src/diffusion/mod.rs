//! The diffusion process over location codes: the forward process and the sampler that reverses it.
//!
//! In reading order:
//! - [`NoiseSchedule`]: how much of the signal is left at each timestep.
//! - [`Forward`]: adds noise to codes in training. [`TrainingDraws`] draws the random numbers of a mini-batch.
//! - [`Sampler`]: turns noise into codes, over all timesteps or a subset. [`guided`] strengthens the condition.
//!
//! Pure: no I/O, no global random generator. Random numbers come from Philox and depend on the global index of the sample, so
//! they are the same for every layout of ranks. The sampler gets the network as a closure.
//!
//! Sources: Ho, Jain, Abbeel, "Denoising diffusion probabilistic models", 2020 (DDPM); Song, Meng, Ermon, "Denoising
//! diffusion implicit models", 2021 (DDIM).

mod error;
mod forward;
mod sampler;
mod schedule;

pub use crate::shdd::CODE_SCALE;
pub use error::DiffusionError;
pub use forward::{Forward, TrainingDraws};
pub use sampler::{ChainNoise, Sampler, guided};
pub use schedule::NoiseSchedule;
