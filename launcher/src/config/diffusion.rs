//! `[diffusion]`: the noise schedule.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::errors::Checker;

/// How noise grows over the timesteps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Schedule {
    /// The squared cosine of Nichol and Dhariwal.
    Cosine,
    /// Variances growing linearly, as in DDPM.
    Linear,
}

/// The diffusion process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DiffusionConfig {
    /// Timesteps T of the forward process.
    pub timesteps: u32,
    /// Noise schedule.
    pub schedule: Schedule,
    /// Probability with which training drops the image, which guidance needs; 0: no guidance.
    pub condition_drop: f64,
}

impl Default for DiffusionConfig {
    fn default() -> Self {
        Self { timesteps: 200, schedule: Schedule::Cosine, condition_drop: 0.0 }
    }
}

impl DiffusionConfig {
    pub(super) fn check(&self, checker: &mut Checker) {
        checker.within("diffusion.timesteps", self.timesteps, 2..=10_000);
        checker.within("diffusion.condition_drop", self.condition_drop, 0.0..1.0);
    }
}
