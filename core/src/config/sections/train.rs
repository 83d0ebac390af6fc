//! `[train]`: optimisation.

use serde::{Deserialize, Serialize};

use crate::config::AutoOr;
use crate::config::errors::Checker;

/// Upper limit of an automatic warm-up, steps. Must not change: saved runs contain "auto" and rely on this value.
const WARMUP_STEPS_AUTO_MAX: u64 = 500;

/// What a run trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum TrainMethod {
    /// LocDiff: the diffusion model.
    Locdiff,
    /// GeoCLIP's image head, with GeoCLIP's contrastive loss. `retrieval.head = "trained"` uses the head.
    Geoclip,
}

/// Course of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum LearningRateSchedule {
    /// Decays to zero along half a cosine.
    Cosine,
    /// Stays constant.
    Constant,
}

/// Number format of matrix products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// `bf16` on CUDA, `f32` on the CPU.
    Auto,
    /// 32-bit floats everywhere.
    F32,
    /// Products in bfloat16, with 32-bit master weights.
    Bf16,
}

section! {
    /// Optimisation with AdamW.
    pub struct TrainConfig {
        /// What to train.
        pub method: TrainMethod = TrainMethod::Locdiff,
        /// Number of optimiser steps.
        pub steps: u64 = 40_000,
        /// Rows per step over all workers. Does not depend on the number of workers.
        pub global_batch: u32 = 4096,
        /// Largest number of rows that a worker passes through the network at once. If the worker's share of the batch
        /// is larger, gradients are accumulated over several passes. 0: no limit.
        pub micro_batch: u32 = 0,
        /// Seed of all random numbers, 0 to 2⁶³ - 1.
        pub seed: u64 = 0,
        /// Run or checkpoint folder whose weights a new run starts from. "": random weights.
        pub init_from: String = String::new(),
        /// Learning rate after the warm-up.
        pub learning_rate: f64 = 8e-4,
        /// Steps over which the learning rate rises from zero. "auto": 500, or a tenth of `steps` if that is less.
        pub warmup_steps: AutoOr<u64> = AutoOr::Auto,
        /// Course of the learning rate after the warm-up.
        pub schedule: LearningRateSchedule = LearningRateSchedule::Cosine,
        /// Decay rate of AdamW's first moment.
        pub beta1: f64 = 0.9,
        /// Decay rate of AdamW's second moment.
        pub beta2: f64 = 0.99,
        /// AdamW's epsilon, which is added to the square root of the second moment.
        pub epsilon: f64 = 1e-8,
        /// Decoupled weight decay.
        pub weight_decay: f64 = 0.1,
        /// Gradients with a larger global norm are scaled down to this norm. 0: no clipping.
        pub clip_norm: f64 = 1.0,
        /// Decay rate of the moving average of the weights. Evaluation uses the averaged weights.
        pub ema_decay: f64 = 0.999,
        /// Number format of matrix products.
        pub precision: Precision = Precision::Auto,
        /// On CUDA, record the training step once and replay it as a CUDA graph. false: launch each kernel separately, for
        /// debugging.
        pub cuda_graph: bool = true,
        /// CPU threads per worker. "auto": 1 for a worker with a GPU; workers without a GPU share the cores of the
        /// node. The number is chosen when a run is created, and stored with the run. It affects results in the last
        /// bits, so a resumed run cannot change it.
        pub threads: AutoOr<u32> = AutoOr::Auto,
        /// Steps whose gradient is not finite are skipped. This many skipped steps in a row end the run.
        pub nonfinite_steps_max: u32 = 20,
        /// Steps between log lines and between points in TensorBoard.
        pub log_every: u64 = 20,
        /// Steps between histograms of the weights in TensorBoard. 0: none.
        pub histogram_every: u64 = 500,
        /// Steps between checks that all replicas of the model have the same bits. The replicas are also checked before
        /// each checkpoint. 0: only before each checkpoint.
        pub replica_check_every: u64 = 1000,
        /// Steps between checks in which every worker recomputes its neighbour's gradient and compares the bits. 0:
        /// never. A checked step takes two to three times as long.
        pub replay_check_every: u64 = 0,
        /// Peak speed of one GPU in the number format of `precision`, TFLOP/s. TensorBoard shows the utilisation relative
        /// to this speed. "auto": looked up by the name of the GPU, if known.
        pub peak_tflops: AutoOr<f64> = AutoOr::Auto,
    }
}

impl TrainConfig {
    /// Steps over which the learning rate rises, with "auto" resolved.
    pub fn warmup_steps(&self) -> u64 {
        self.warmup_steps.value().unwrap_or_else(|| WARMUP_STEPS_AUTO_MAX.min(self.steps / 10))
    }

    /// CPU threads per worker. The launcher replaces "auto" with a number before it starts workers. In a
    /// configuration in which "auto" was not replaced, it counts as 1.
    pub fn threads(&self) -> u32 {
        self.threads.value().unwrap_or(1)
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
        if let Some(threads) = self.threads.value() {
            checker.within("train.threads", threads, 1..=1024);
        }
        checker.within("train.nonfinite_steps_max", self.nonfinite_steps_max, 1..);
        checker.within("train.log_every", self.log_every, 1..);
        if let Some(peak_tflops) = self.peak_tflops.value() {
            checker.positive("train.peak_tflops", peak_tflops);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{Layer, load};

    #[test]
    fn automatic_warm_up_is_a_tenth_of_the_steps_but_at_most_500() {
        let set = |texts: &[&str]| load(&texts.iter().map(|text| Layer::Set((*text).into())).collect::<Vec<_>>());
        let steps = |texts: &[&str]| set(texts).expect("the configuration is valid").config.train.warmup_steps();
        assert_eq!(steps(&[]), 500);
        assert_eq!(steps(&["train.steps=100"]), 10);
        assert_eq!(steps(&["train.steps=5"]), 0);
        assert_eq!(steps(&["train.steps=100", "train.warmup_steps=auto"]), 10);
        assert_eq!(steps(&["train.steps=600", "train.warmup_steps=500"]), 500);
        let text =
            set(&["train.steps=100", "train.warmup_steps=101"]).expect_err("the warm-up is too long").to_string();
        assert!(text.contains("train.warmup_steps: is 101, more than train.steps = 100"), "{text}");
        let presets = [("demo", 60), ("l23", 500), ("l47", 500), ("paper-l47", 0), ("l95", 500), ("geoclip", 400)];
        for (preset, want) in presets {
            let found = load(&[Layer::Preset(preset.into())]).expect("the configuration is valid");
            assert_eq!(found.config.train.warmup_steps(), want, "{preset}");
        }
        assert_eq!(presets.len(), crate::config::PRESETS.len());
    }
}
