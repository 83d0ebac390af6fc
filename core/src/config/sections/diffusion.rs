//! `[diffusion]`: the noise schedule.

use serde::{Deserialize, Serialize};

use crate::config::AutoOr;
use crate::config::errors::Checker;

/// How noise grows over the timesteps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Schedule {
    /// The squared cosine of Nichol and Dhariwal.
    Cosine,
    /// The same with less signal everywhere, `shift` says how much less.
    ShiftedCosine,
    /// Variances growing linearly, as in DDPM.
    Linear,
}

section! {
    /// The diffusion process.
    pub struct DiffusionConfig {
        /// Timesteps T of the forward process.
        pub timesteps: u32 = 200,
        /// Noise schedule.
        pub schedule: Schedule = Schedule::ShiftedCosine,
        /// The shifted cosine multiplies the ratio of signal to noise by the square of this; "auto" is √(23 / d) for codes of d
        /// dimensions, at most 1. The more dimensions tell of one place, the more noise it takes to hide it.
        pub shift: AutoOr<f64> = AutoOr::Auto,
        /// Probability with which training drops the image, which guidance needs; 0: no guidance.
        pub condition_drop: f64 = 0.0,
    }
}

impl DiffusionConfig {
    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        checker.within("diffusion.timesteps", self.timesteps, 2..=10_000);
        if let AutoOr::Value(shift) = self.shift {
            checker.within("diffusion.shift", shift, 1e-4..=1.0);
            if self.schedule != Schedule::ShiftedCosine {
                checker.push("diffusion.shift", "is for schedule = \"shifted-cosine\", wanted \"auto\" with any other");
            }
        }
        checker.within("diffusion.condition_drop", self.condition_drop, 0.0..1.0);
    }
}
