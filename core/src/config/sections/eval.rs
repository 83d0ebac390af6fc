//! `[eval]`: sampling, decoding and scoring.

use serde::{Deserialize, Serialize};

use crate::config::AutoOr;
use crate::config::errors::Checker;

/// Points of an automatic grid, where the degree asks for no more.
const GRID_POINTS_AUTO_MIN: u32 = 21_000;

/// Grid points from which refinement reaches the mode of a code: 4 (L + 1)². `shdd::decode` has the reason.
pub fn grid_points_min(degree: u32) -> u32 {
    4 * (degree + 1).pow(2)
}

/// How the samples of one image become one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Aggregator {
    /// The sample with the most neighbours, which count by what the network expects from the image before anything is drawn.
    PosteriorMedoid,
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

/// Which checkpoint of a run is evaluated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum CheckpointChoice {
    /// The newest that is whole.
    Newest,
    /// The one with the highest validation score.
    Best,
}

/// Among which points a code is decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum DecodeAnchors {
    /// An even grid on the sphere.
    Grid,
    /// The points of `retrieval.gallery`.
    Gallery,
}

section! {
    /// Sampling and scoring.
    pub struct EvalConfig {
        /// CSV with path, lat and lon of the truth; "": the coordinates of the test shards.
        pub truth: String = String::new(),
        /// Which checkpoint of a run is evaluated.
        pub checkpoint: CheckpointChoice = CheckpointChoice::Newest,
        /// Distances within which answers are counted, km, rising.
        pub thresholds_km: Vec<f64> = vec![1.0, 25.0, 200.0, 750.0, 2500.0],
        /// Samples per image, spread over its views.
        pub samples: u32 = 16,
        /// Steps of a sampling chain.
        pub sampler_steps: u32 = 20,
        /// Share of fresh noise in each step: 1 is ancestral sampling, 0 deterministic.
        pub sampler_eta: f64 = 1.0,
        /// Strength of guidance; 0: none. Needs `diffusion.condition_drop` above 0.
        pub guidance: f64 = 0.0,
        /// How the samples of one image become one place.
        pub aggregator: Aggregator = Aggregator::PosteriorMedoid,
        /// Among which points a code is decoded.
        pub anchors: DecodeAnchors = DecodeAnchors::Gallery,
        /// Points of the grid; "auto" is 21000, or 4 (L + 1)² where that is more. With `refine`, at least 4 (L + 1)².
        pub grid_points: AutoOr<u32> = AutoOr::Auto,
        /// Radius of the neighbourhood that a decoder sums over, km; 0: the point alone.
        pub neighbourhood_km: f64 = 0.0,
        /// Refine a decoded place on the continuous sphere.
        pub refine: bool = false,
        /// Steps between two quick evaluations on `shards.validation` while training; 0: none.
        pub every: u64 = 1000,
        /// Validation rows that a quick evaluation locates: the first so many.
        pub quick_rows: u32 = 1024,
        /// Samples per image in a quick evaluation.
        pub quick_samples: u32 = 4,
        /// Evaluate on `shards.test` when training ends, with LocDiff-H, tuned on `shards.validation`, where GeoCLIP is there.
        pub after_train: bool = false,
    }
}

impl EvalConfig {
    /// Points of the grid for codes of degree `degree`, worked out where the configuration says "auto".
    pub fn grid_points(&self, degree: u32) -> u32 {
        self.grid_points.value().unwrap_or_else(|| grid_points_min(degree).max(GRID_POINTS_AUTO_MIN))
    }

    /// `degree` is `model.degree`, which may itself be out of range.
    pub(in crate::config) fn check(&self, degree: u32, checker: &mut Checker) {
        let rising = self.thresholds_km.windows(2).all(|pair| pair[0] < pair[1]);
        let usable = self.thresholds_km.iter().all(|km| *km > 0.0 && km.is_finite());
        if self.thresholds_km.is_empty() || !rising || !usable {
            checker.push("eval.thresholds_km", format!("is {:?}, wanted rising numbers above 0", self.thresholds_km));
        }
        checker.within("eval.samples", self.samples, 1..=4096);
        checker.within("eval.quick_rows", self.quick_rows, 1..=10_000_000);
        checker.within("eval.quick_samples", self.quick_samples, 1..=4096);
        checker.within("eval.sampler_steps", self.sampler_steps, 1..=10_000);
        checker.within("eval.sampler_eta", self.sampler_eta, 0.0..=1.0);
        checker.not_negative("eval.guidance", self.guidance);
        if let Some(points) = self.grid_points.value() {
            checker.within("eval.grid_points", points, 100..=10_000_000);
            // A degree out of range has its own error, and its square might not fit.
            let wanted = grid_points_min(degree.min(1023));
            if self.refine && points < wanted {
                let message = format!(
                    "is {points}, too few for eval.refine at model.degree = {degree}, wanted \"auto\" or at least {wanted}"
                );
                checker.push("eval.grid_points", message);
            }
        }
        checker.within("eval.neighbourhood_km", self.neighbourhood_km, 0.0..=20_000.0);
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{Layer, load};

    fn set(text: &str) -> Layer {
        Layer::Set(text.into())
    }

    fn refused(layers: &[Layer]) -> String {
        load(layers).expect_err("wanted errors").to_string()
    }

    #[test]
    fn grid_is_fine_enough_for_refinement_or_refused() {
        let points = |degree: u32| {
            let found = load(&[set(&format!("model.degree={degree}")), set("eval.refine=true")]).expect("valid");
            found.config.eval.grid_points(degree)
        };
        assert_eq!([47, 71, 72, 127].map(points), [21_000, 21_000, 21_316, 65_536]);
        let layers = |points: u32| [set("model.degree=95"), set(&format!("eval.grid_points={points}"))];
        assert_eq!(load(&layers(21_000)).expect("no refinement").config.eval.grid_points(95), 21_000);
        let refined = |points| [&layers(points)[..], &[set("eval.refine=true")]].concat();
        assert!(load(&refined(36_864)).is_ok());
        let text = refused(&refined(36_863));
        let want = "eval.grid_points: is 36863, too few for eval.refine at model.degree = 95, wanted \"auto\" or at least 36864";
        assert!(text.contains(want), "{text}");
        assert!(refused(&[set("model.degree=4294967295"), refined(100)[1].clone()]).contains("model.degree"));
    }
}
