//! `[eval]`: sampling, decoding and scoring.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::errors::Checker;

/// How the samples of one image become one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Aggregator {
    /// The sample with the most neighbours.
    KernelMedoid,
    /// The mean of the unit vectors.
    MeanVector,
    /// The geometric median on the sphere.
    GeometricMedian,
    /// The mean of the codes, decoded.
    MeanCode,
    /// The mode of the samples' mixture density.
    Mixture,
}

/// Among which points a code is decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DecodeAnchors {
    /// An even grid on the sphere.
    Grid,
    /// The points of `retrieval.gallery`.
    Gallery,
}

/// Sampling and scoring.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EvalConfig {
    /// CSV with path, lat and lon of the truth; "": the coordinates of the test shards.
    pub truth: String,
    /// Samples per image.
    pub samples: u32,
    /// Steps of a sampling chain.
    pub sampler_steps: u32,
    /// Share of fresh noise in each step: 1 is ancestral sampling, 0 deterministic.
    pub sampler_eta: f64,
    /// Strength of guidance; 0: none. Needs `diffusion.condition_drop` above 0.
    pub guidance: f64,
    /// How the samples of one image become one place.
    pub aggregator: Aggregator,
    /// Among which points a code is decoded.
    pub anchors: DecodeAnchors,
    /// Points of the grid.
    pub grid_points: u32,
    /// Radius of the neighbourhood that a decoder sums over, km; 0: the point alone.
    pub neighbourhood_km: f64,
    /// Refine a decoded place on the continuous sphere.
    pub refine: bool,
    /// Steps between two quick evaluations on `shards.validation` while training; 0: none.
    pub every: u64,
    /// Evaluate, with the hybrid phase, when training ends.
    pub after_train: bool,
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self {
            truth: String::new(),
            samples: 16,
            sampler_steps: 20,
            sampler_eta: 1.0,
            guidance: 0.0,
            aggregator: Aggregator::KernelMedoid,
            anchors: DecodeAnchors::Gallery,
            grid_points: 21_000,
            neighbourhood_km: 0.0,
            refine: false,
            every: 0,
            after_train: false,
        }
    }
}

impl EvalConfig {
    pub(super) fn check(&self, checker: &mut Checker) {
        checker.within("eval.samples", self.samples, 1..=4096);
        checker.within("eval.sampler_steps", self.sampler_steps, 1..=10_000);
        checker.within("eval.sampler_eta", self.sampler_eta, 0.0..=1.0);
        checker.not_negative("eval.guidance", self.guidance);
        checker.within("eval.grid_points", self.grid_points, 100..=10_000_000);
        checker.within("eval.neighbourhood_km", self.neighbourhood_km, 0.0..=20_000.0);
    }
}
