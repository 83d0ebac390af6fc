//! The diffusion process over location codes, and the way back.
//!
//! In reading order:
//! - [`NoiseSchedule`]: how much of the signal is left at each timestep.
//! - [`Forward`]: noises codes in training; [`TrainingDraws`] names the random numbers of a mini-batch.
//! - [`Sampler`]: from noise to codes, over all timesteps or a few; [`guided`] strengthens the condition.
//!
//! Pure: no I/O, no global generator. Every random number is Philox's, named by its global sample, so that no layout of
//! ranks changes it. The sampler is given the network as a closure and knows nothing else about it.
//!
//! Ho, Jain, Abbeel, "Denoising diffusion probabilistic models", 2020 (DDPM); Song, Meng, Ermon, "Denoising diffusion
//! implicit models", 2021 (DDIM).

mod error;
mod forward;
mod sampler;
mod schedule;

pub use crate::shdd::CODE_SCALE;
pub use error::DiffusionError;
pub use forward::{Forward, TrainingDraws};
pub use sampler::{ChainNoise, Sampler, guided};
pub use schedule::NoiseSchedule;
