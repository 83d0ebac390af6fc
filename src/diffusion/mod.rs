//! The diffusion process over location codes: the forward process and the sampler that reverses it.
//!
//! In reading order:
//! - [`NoiseSchedule`]: determines how much of the signal is left at each timestep.
//! - [`Forward`]: adds noise to codes in training. [`TrainingDraws`] draws the random numbers of a mini-batch.
//! - [`Sampler`]: turns noise into codes, in steps over all timesteps or over some of them. [`guided`] strengthens the
//!   influence of the image. [`Chains`] takes the same steps in place, for CUDA graphs.
//!
//! This module does no I/O and uses no global random generator. Random numbers come from Philox. They depend on the
//! global index of the sample, but not on how samples are divided among ranks. The caller passes the network to the
//! sampler as a closure.
//!
//! Sources: Ho, Jain, Abbeel, "Denoising diffusion probabilistic models", 2020 (DDPM); Song, Meng, Ermon, "Denoising
//! diffusion implicit models", 2021 (DDIM).

mod chains;
mod error;
mod forward;
mod sampler;
mod schedule;

pub use crate::shdd::CODE_SCALE;
pub use chains::{Chains, Predictions};
pub use error::DiffusionError;
pub use forward::{Forward, TrainingDraws};
pub use sampler::{ChainNoise, Sampler, Update, guided};
pub use schedule::NoiseSchedule;
