//! `[loss]`: the anchor KL and what is added to it.

use serde::{Deserialize, Serialize};

use crate::config::AutoOr;
use crate::config::errors::Checker;

/// Which distribution the KL divergence weighs by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum KlDirection {
    /// KL(prediction ‖ truth), the paper's.
    Reverse,
    /// KL(truth ‖ prediction).
    Forward,
}

section! {
    /// What training minimises: the weighted sum of its parts.
    pub struct LossConfig {
        /// Anchors on the sphere, drawn anew for every mini-batch.
        pub anchors: u32 = 2048,
        /// Direction of the KL divergence.
        pub kl: KlDirection = KlDirection::Reverse,
        /// Weight of the KL; "auto" is 5.76 / (L + 1)², since the KL grows with (L + 1)². With
        /// `model.low_pass_dims` that number stands in place of (L + 1)².
        pub kl_weight: AutoOr<f64> = AutoOr::Auto,
        /// Weight of the mean squared error. The KL alone lets a sampling chain drift; with this it does not.
        pub l2_weight: f64 = 1.0,
        /// Weight of the mean absolute error.
        pub l1_weight: f64 = 0.0,
        /// Weight of one minus the cosine similarity.
        pub cosine_weight: f64 = 0.0,
    }
}

impl LossConfig {
    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        checker.within("loss.anchors", self.anchors, 2..=10_000_000);
        let kl_weight = self.kl_weight.value().unwrap_or(1.0);
        checker.not_negative("loss.kl_weight", kl_weight);
        checker.not_negative("loss.l2_weight", self.l2_weight);
        checker.not_negative("loss.l1_weight", self.l1_weight);
        checker.not_negative("loss.cosine_weight", self.cosine_weight);
        if [kl_weight, self.l2_weight, self.l1_weight, self.cosine_weight].iter().all(|weight| *weight == 0.0) {
            checker.push("loss.kl_weight", "is 0 like every other weight, wanted at least one above 0");
        }
    }
}
