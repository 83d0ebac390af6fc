//! Noise schedules: ᾱ_t, the share of the signal's variance that is left at timestep t.
//!
//! Timesteps count from 0 (the least noise) to T - 1 (almost pure noise); ᾱ falls strictly. f64 throughout.
//!
//! Cosine: Nichol and Dhariwal, "Improved denoising diffusion probabilistic models", 2021, eq. 17. Linear: DDPM,
//! section 4, whose range of β is for 1000 steps and is stretched to T (as in the code of Nichol and Dhariwal). Shifted:
//! Hoogeboom, Heek and Salimans, "simple diffusion", 2023, section 3.1, by the number of dimensions in place of pixels.

use std::f64::consts::FRAC_PI_2;

use locdiff_core::config::{DiffusionConfig, ModelConfig, Schedule};

use super::error::DiffusionError;

/// Offset of the cosine schedule, which keeps β from vanishing near t = 0 (Nichol and Dhariwal, section 3.2).
const COSINE_OFFSET: f64 = 0.008;
/// No step removes more of the signal than this (Nichol and Dhariwal, section 3.2).
const BETA_MAX: f64 = 0.999;
/// First and last β of the linear schedule at 1000 steps (DDPM, section 4).
const LINEAR_BETAS: [f64; 2] = [1e-4, 0.02];
/// The number of steps that [`LINEAR_BETAS`] are for.
const LINEAR_STEPS: f64 = 1000.0;
/// Squared length of the signal over the variance of the noise halfway through the automatically shifted schedule: about
/// twice the logarithm of the number of places that can be told apart, where a noised code begins to say which it is. Part of the
/// format: checkpoints say "auto".
const SIGNAL_HALFWAY: f64 = 23.0;

/// ᾱ at every timestep.
#[derive(Debug, Clone, PartialEq)]
pub struct NoiseSchedule {
    alphas_bar: Vec<f64>,
}

impl NoiseSchedule {
    /// The schedule of a checked configuration, for the codes that a network of `model` sees.
    pub fn new(config: &DiffusionConfig, model: &ModelConfig) -> Self {
        let timesteps = config.timesteps;
        let beta = |t: u32| match config.schedule {
            Schedule::Cosine | Schedule::ShiftedCosine => 1.0 - cosine(t + 1, timesteps) / cosine(t, timesteps),
            Schedule::Linear => linear_beta(t, timesteps),
        };
        let alphas_bar = (0..timesteps).scan(1.0, |left, t| {
            *left *= 1.0 - beta(t).min(BETA_MAX);
            Some(*left)
        });
        match config.schedule {
            Schedule::Cosine | Schedule::Linear => Self { alphas_bar: alphas_bar.collect() },
            Schedule::ShiftedCosine => {
                let automatic = || (SIGNAL_HALFWAY / model.kept_dims() as f64).sqrt().min(1.0);
                let shift = config.shift.value().unwrap_or_else(automatic);
                Self { alphas_bar: alphas_bar.map(|alpha_bar| shifted(alpha_bar, shift)).collect() }
            }
        }
    }

    /// T.
    pub fn timesteps(&self) -> usize {
        self.alphas_bar.len()
    }

    /// ᾱ at every timestep, in order.
    pub fn alphas_bar(&self) -> &[f64] {
        &self.alphas_bar
    }

    /// ᾱ at timestep `t`.
    pub fn alpha_bar(&self, t: usize) -> Result<f64, DiffusionError> {
        let outside = || format!("timestep {t} is not one of the schedule's {}", self.timesteps());
        self.alphas_bar.get(t).copied().ok_or_else(|| DiffusionError::Bad(outside()))
    }
}

/// The target of ᾱ after `t` of `timesteps` steps, up to a constant factor.
fn cosine(t: u32, timesteps: u32) -> f64 {
    let passed = f64::from(t) / f64::from(timesteps);
    ((passed + COSINE_OFFSET) / (1.0 + COSINE_OFFSET) * FRAC_PI_2).cos().powi(2)
}

/// ᾱ whose ratio to 1 − ᾱ is `shift²` times what it was.
fn shifted(alpha_bar: f64, shift: f64) -> f64 {
    let signal = shift * shift * alpha_bar;
    signal / (signal + (1.0 - alpha_bar))
}

fn linear_beta(t: u32, timesteps: u32) -> f64 {
    let stretch = LINEAR_STEPS / f64::from(timesteps);
    let passed = f64::from(t) / f64::from(timesteps.saturating_sub(1).max(1));
    stretch * (LINEAR_BETAS[0] + passed * (LINEAR_BETAS[1] - LINEAR_BETAS[0]))
}
