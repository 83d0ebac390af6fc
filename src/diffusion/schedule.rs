//! Noise schedules: ᾱ_t, the share of the signal's variance that is left at timestep t.
//!
//! Timesteps count from 0 (least noise) to T - 1 (almost pure noise), and ᾱ is strictly decreasing. All values are
//! computed in f64.
//!
//! Sources:
//! - Cosine: Nichol and Dhariwal, "Improved denoising diffusion probabilistic models", 2021, eq. 17.
//! - Linear: DDPM, section 4. DDPM gives the range of β for 1000 timesteps. This range is rescaled to T timesteps, as
//!   in the code of Nichol and Dhariwal.
//! - Shifted cosine: Hoogeboom, Heek and Salimans, "simple diffusion", 2023, section 3.1, with the number of dimensions
//!   in place of the number of pixels.

use std::f64::consts::FRAC_PI_2;

use locdiff_core::config::{DiffusionConfig, ModelConfig, Schedule};

use super::error::DiffusionError;

/// Offset of the cosine schedule, which keeps β from vanishing near t = 0 (Nichol and Dhariwal, section 3.2).
const COSINE_OFFSET: f64 = 0.008;
/// Upper limit of β, the share of the signal's variance that one step removes (Nichol and Dhariwal, section 3.2).
const BETA_MAX: f64 = 0.999;
/// First and last β of the linear schedule with 1000 timesteps (DDPM, section 4).
const LINEAR_BETAS: [f64; 2] = [1e-4, 0.02];
/// The number of timesteps for which [`LINEAR_BETAS`] are defined.
const LINEAR_STEPS: f64 = 1000.0;
/// The ratio of the signal's squared length to the noise variance in the middle of a schedule with the shift "auto". At
/// about this ratio, a noised code starts to reveal its place. The value is twice the logarithm of the number of
/// distinguishable places. This constant must not change, because checkpoints store "auto" and not the resulting shift.
const SIGNAL_HALFWAY: f64 = 23.0;

/// ᾱ at every timestep.
#[derive(Debug, Clone, PartialEq)]
pub struct NoiseSchedule {
    alphas_bar: Vec<f64>,
}

impl NoiseSchedule {
    /// The schedule of a validated configuration. A shift of "auto" depends on the number of dimensions that the
    /// low-pass filter of `model` keeps.
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

    /// The number of timesteps T.
    pub fn timesteps(&self) -> usize {
        self.alphas_bar.len()
    }

    /// ᾱ at every timestep, in order.
    pub fn alphas_bar(&self) -> &[f64] {
        &self.alphas_bar
    }

    /// ᾱ at timestep `t`.
    pub fn alpha_bar(&self, t: usize) -> Result<f64, DiffusionError> {
        let out_of_range = || format!("timestep is {t}, wanted below {}", self.timesteps());
        self.alphas_bar.get(t).copied().ok_or_else(|| DiffusionError::Bad(out_of_range()))
    }
}

/// ᾱ of the cosine schedule after `t` of `timesteps` timesteps, up to a constant factor. The upper limit of β is not
/// applied.
fn cosine(t: u32, timesteps: u32) -> f64 {
    let passed = f64::from(t) / f64::from(timesteps);
    ((passed + COSINE_OFFSET) / (1.0 + COSINE_OFFSET) * FRAC_PI_2).cos().powi(2)
}

/// Multiplies the signal-to-noise ratio ᾱ / (1 − ᾱ) by `shift²`.
fn shifted(alpha_bar: f64, shift: f64) -> f64 {
    let signal = shift * shift * alpha_bar;
    signal / (signal + (1.0 - alpha_bar))
}

fn linear_beta(t: u32, timesteps: u32) -> f64 {
    let scale = LINEAR_STEPS / f64::from(timesteps);
    let passed = f64::from(t) / f64::from(timesteps.saturating_sub(1).max(1));
    scale * (LINEAR_BETAS[0] + passed * (LINEAR_BETAS[1] - LINEAR_BETAS[0]))
}
