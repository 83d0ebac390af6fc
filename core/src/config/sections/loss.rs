//! `[loss]`: weights of the KL divergence over anchors and of the terms added to it.

use serde::{Deserialize, Serialize};

use crate::config::AutoOr;
use crate::config::errors::Checker;

/// The weight "auto" of the KL divergence is this number divided by the number of dimensions: 0.01 at L = 23, and
/// 0.0025 at L = 47. This number must not change, because runs store "auto" and not the resulting weight.
const KL_WEIGHT_AUTO: f64 = 5.76;

/// Direction of the KL divergence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum KlDirection {
    /// KL(prediction ‖ truth), as in the paper.
    Reverse,
    /// KL(truth ‖ prediction).
    Forward,
}

section! {
    /// The training loss: a weighted sum of its terms.
    pub struct LossConfig {
        /// Number of random points on the sphere at which the KL compares densities, drawn anew for every mini-batch.
        pub anchors: u32 = 2048,
        /// With train.method = "geoclip": number of gallery points that each step draws as wrong answers. The loss asks
        /// for the location of a photo among these points and the locations of all photos of the step.
        pub negatives: u32 = 3072,
        /// Direction of the KL divergence.
        pub kl: KlDirection = KlDirection::Reverse,
        /// Weight of the KL divergence. "auto": 5.76 / d for codes of d dimensions, because the KL grows with d. d is
        /// (L + 1)², or `model.low_pass_dims` if that is set.
        pub kl_weight: AutoOr<f64> = AutoOr::Auto,
        /// Weight of the mean squared error. With the KL divergence alone, samples would drift.
        pub l2_weight: f64 = 1.0,
        /// Weight of the mean absolute error.
        pub l1_weight: f64 = 0.0,
        /// Weight of the cosine distance (1 - cosine similarity).
        pub cosine_weight: f64 = 0.0,
    }
}

impl LossConfig {
    /// Weight of the KL divergence for codes of `dims` dimensions, with "auto" resolved.
    pub fn kl_weight(&self, dims: f64) -> f64 {
        self.kl_weight.value().unwrap_or(KL_WEIGHT_AUTO / dims)
    }

    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        checker.within("loss.anchors", self.anchors, 2..=10_000_000);
        checker.within("loss.negatives", self.negatives, 0..=10_000_000);
        let kl_weight = self.kl_weight.value().unwrap_or(1.0);
        checker.not_negative("loss.kl_weight", kl_weight);
        checker.not_negative("loss.l2_weight", self.l2_weight);
        checker.not_negative("loss.l1_weight", self.l1_weight);
        checker.not_negative("loss.cosine_weight", self.cosine_weight);
        if [kl_weight, self.l2_weight, self.l1_weight, self.cosine_weight].iter().all(|weight| *weight == 0.0) {
            checker.push("loss.kl_weight", "is 0, and so is every other weight; wanted at least one weight above 0");
        }
    }
}
