//! `[train]`: optimisation.

use serde::{Deserialize, Serialize};

use crate::config::AutoOr;
use crate::config::errors::Checker;

/// Steps of an automatic warm-up, where a tenth of all steps is no less. Part of the format: runs say "auto".
const WARMUP_STEPS_AUTO_MAX: u64 = 500;

/// What the learning rate does after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum LearningRateSchedule {
    /// Falls to zero along half a cosine.
    Cosine,
    /// Stays.
    Constant,
}

/// Numbers in which matrices are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// `bf16` on CUDA, `f32` on the CPU.
    Auto,
    /// 32 bits everywhere.
    F32,
    /// 16-bit products with 32-bit master weights.
    Bf16,
}

section! {
    /// Optimisation with AdamW.
    pub struct TrainConfig {
        /// Optimiser steps.
        pub steps: u64 = 40_000,
        /// Rows per step over all workers, whatever their number.
        pub global_batch: u32 = 4096,
        /// Rows that one worker takes through the network at once; a larger share of the batch is accumulated from several.
        /// 0: its whole share.
        pub micro_batch: u32 = 0,
        /// Seed of everything random. 0 to 2⁶³ - 1.
        pub seed: u64 = 0,
        /// Folder of a run, or a checkpoint of one, whose weights a new run starts from; "": random weights.
        pub init_from: String = String::new(),
        /// Learning rate after the warm-up.
        pub learning_rate: f64 = 8e-4,
        /// Steps over which the learning rate rises from zero; "auto" is 500, or a tenth of `steps` where that is less.
        pub warmup_steps: AutoOr<u64> = AutoOr::Auto,
        /// What the learning rate does then.
        pub schedule: LearningRateSchedule = LearningRateSchedule::Cosine,
        /// Decay of AdamW's first moment.
        pub beta1: f64 = 0.9,
        /// Decay of AdamW's second moment.
        pub beta2: f64 = 0.99,
        /// Added to the root of AdamW's second moment.
        pub epsilon: f64 = 1e-8,
        /// Decoupled weight decay.
        pub weight_decay: f64 = 0.1,
        /// Largest norm of the whole gradient; it is scaled down to this. 0: no limit.
        pub clip_norm: f64 = 1.0,
        /// Decay of the moving average of the weights, which evaluation uses.
        pub ema_decay: f64 = 0.999,
        /// Numbers in which matrices are multiplied.
        pub precision: Precision = Precision::Auto,
        /// On CUDA: record the whole step once and replay it as one graph. false: launch every kernel anew, for debugging.
        pub cuda_graph: bool = true,
        /// CPU threads of one worker. Results depend on it in the last bits, so a run keeps it.
        pub threads: u32 = 1,
        /// Steps in a row whose gradient is not finite, and which are therefore skipped, before the run ends.
        pub nonfinite_steps_max: u32 = 20,
        /// Steps between two lines of the log and two points in TensorBoard.
        pub log_every: u64 = 20,
        /// Steps between two histograms of the weights in TensorBoard; 0: none.
        pub histogram_every: u64 = 500,
        /// What one GPU can do at most in the numbers of `precision`, TFLOP/s, for the share of it that TensorBoard shows. "auto":
        /// by the GPU's name, where it is known.
        pub peak_tflops: AutoOr<f64> = AutoOr::Auto,
    }
}

impl TrainConfig {
    /// Steps over which the learning rate rises, worked out where the configuration says "auto".
    pub fn warmup_steps(&self) -> u64 {
        self.warmup_steps.value().unwrap_or_else(|| WARMUP_STEPS_AUTO_MAX.min(self.steps / 10))
    }

    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        checker.within("train.steps", self.steps, 1..=u64::from(u32::MAX));
        if self.warmup_steps() > self.steps {
            let message = format!("is {}, more than train.steps = {}", self.warmup_steps(), self.steps);
            checker.push("train.warmup_steps", message);
        }
        checker.within("train.global_batch", self.global_batch, 1..=1 << 24);
        checker.positive("train.learning_rate", self.learning_rate);
        checker.within("train.beta1", self.beta1, 0.0..1.0);
        checker.within("train.beta2", self.beta2, 0.0..1.0);
        checker.positive("train.epsilon", self.epsilon);
        checker.not_negative("train.weight_decay", self.weight_decay);
        checker.not_negative("train.clip_norm", self.clip_norm);
        checker.within("train.ema_decay", self.ema_decay, 0.0..1.0);
        checker.within("train.threads", self.threads, 1..=1024);
        checker.within("train.nonfinite_steps_max", self.nonfinite_steps_max, 1..=u32::MAX);
        checker.within("train.log_every", self.log_every, 1..=u64::MAX);
        if let Some(peak_tflops) = self.peak_tflops.value() {
            checker.positive("train.peak_tflops", peak_tflops);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{Layer, load};

    #[test]
    fn warm_up_is_given_or_a_tenth_of_the_steps_but_no_more_than_500() {
        let set = |texts: &[&str]| load(&texts.iter().map(|text| Layer::Set((*text).into())).collect::<Vec<_>>());
        let steps = |texts: &[&str]| set(texts).expect("valid").config.train.warmup_steps();
        assert_eq!(steps(&[]), 500);
        assert_eq!(steps(&["train.steps=100"]), 10);
        assert_eq!(steps(&["train.steps=5"]), 0);
        assert_eq!(steps(&["train.steps=100", "train.warmup_steps=auto"]), 10);
        assert_eq!(steps(&["train.steps=600", "train.warmup_steps=500"]), 500);
        let text = set(&["train.steps=100", "train.warmup_steps=101"]).expect_err("too many").to_string();
        assert!(text.contains("train.warmup_steps: is 101, more than train.steps = 100"), "{text}");
        let presets = [("demo", 100), ("l23", 500), ("l47", 500), ("paper-l47", 500), ("l95", 500)];
        for (preset, want) in presets {
            let found = load(&[Layer::Preset(preset.into())]).expect("valid");
            assert_eq!(found.config.train.warmup_steps(), want, "{preset}");
        }
        assert_eq!(presets.len(), crate::config::PRESETS.len());
    }
}
