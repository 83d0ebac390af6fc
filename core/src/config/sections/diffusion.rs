//! `[diffusion]`: timesteps and noise schedule.

use serde::{Deserialize, Serialize};

use crate::config::AutoOr;
use crate::config::errors::Checker;

/// How the noise grows over the timesteps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Schedule {
    /// Squared cosine (Nichol and Dhariwal).
    Cosine,
    /// The cosine schedule with less signal at every timestep; see `shift`.
    ShiftedCosine,
    /// Linearly growing variances, as in DDPM.
    Linear,
}

section! {
    /// The diffusion process: timesteps and noise schedule.
    pub struct DiffusionConfig {
        /// Number of timesteps T of the forward process.
        pub timesteps: u32 = 200,
        /// Noise schedule.
        pub schedule: Schedule = Schedule::ShiftedCosine,
        /// The shifted cosine schedule multiplies the signal-to-noise ratio by the square of this number. "auto":
        /// √(23 / d) for codes of d dimensions, at most 1. Codes with more dimensions need more noise to hide the
        /// location.
        pub shift: AutoOr<f64> = AutoOr::Auto,
        /// Probability of dropping the image in training. Must be above 0 to use `eval.guidance`.
        pub condition_drop: f64 = 0.0,
    }
}

impl DiffusionConfig {
    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        checker.within("diffusion.timesteps", self.timesteps, 2..=10_000);
        if let AutoOr::Value(shift) = self.shift {
            checker.within("diffusion.shift", shift, 1e-4..=1.0);
            if self.schedule != Schedule::ShiftedCosine {
                checker.push("diffusion.shift", "applies only to schedule = \"shifted-cosine\", wanted \"auto\"");
            }
        }
        checker.within("diffusion.condition_drop", self.condition_drop, 0.0..1.0);
    }
}
