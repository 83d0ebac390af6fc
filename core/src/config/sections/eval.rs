//! `[eval]`: sampling, decoding and scoring.

use serde::{Deserialize, Serialize};

use crate::config::AutoOr;
use crate::config::errors::Checker;

/// Minimum number of points of an automatic grid.
const GRID_POINTS_AUTO_MIN: u32 = 21_000;

/// The least number of grid points with which refinement reliably reaches the mode of a location code: 4 (L + 1)².
/// L is `degree`. `shdd::decode` explains why.
pub fn grid_points_min(degree: u32) -> u32 {
    4 * (degree + 1).pow(2)
}

/// Most photos that a report shows with their samples.
pub const REPORT_PHOTOS_MAX: u32 = 100;

/// How the samples of one image are combined into one location.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Aggregator {
    /// The sample with the most neighbours. A neighbour counts more where the network predicts a higher density from
    /// the image alone, before sampling.
    PosteriorMedoid,
    /// The sample with the most neighbours, where all neighbours have the same weight.
    KernelMedoid,
    /// The direction of the mean of the samples' unit vectors.
    MeanVector,
    /// The geometric median on the sphere.
    GeometricMedian,
    /// The decoded mean of the codes.
    MeanCode,
    /// The mode of the mixture of the samples' densities.
    Mixture,
}

/// Which checkpoint of a run to evaluate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "CheckpointName", try_from = "CheckpointName")]
pub enum CheckpointChoice {
    /// The newest intact checkpoint.
    Newest,
    /// The checkpoint with the highest validation score.
    Best,
    /// The checkpoint of this step.
    Step(u64),
}

/// A [`CheckpointChoice`] in a configuration file: "newest", "best" or a number.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum CheckpointName {
    Step(u64),
    Word(String),
    Other(f64),
}

impl From<CheckpointChoice> for CheckpointName {
    fn from(choice: CheckpointChoice) -> Self {
        match choice {
            CheckpointChoice::Newest => Self::Word("newest".to_owned()),
            CheckpointChoice::Best => Self::Word("best".to_owned()),
            CheckpointChoice::Step(step) => Self::Step(step),
        }
    }
}

impl TryFrom<CheckpointName> for CheckpointChoice {
    type Error = &'static str;

    fn try_from(name: CheckpointName) -> Result<Self, Self::Error> {
        match name {
            CheckpointName::Step(step) => Ok(Self::Step(step)),
            CheckpointName::Word(word) if word == "newest" => Ok(Self::Newest),
            CheckpointName::Word(word) if word == "best" => Ok(Self::Best),
            _ => Err("wanted \"newest\", \"best\" or the step of a checkpoint"),
        }
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for CheckpointChoice {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "CheckpointChoice".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "oneOf": [
            { "const": "newest", "description": "The newest intact checkpoint." },
            { "const": "best", "description": "The checkpoint with the highest validation score." },
            { "type": "integer", "minimum": 0, "description": "The checkpoint of this step." },
        ] })
    }

    fn inline_schema() -> bool {
        true
    }
}

/// The points that codes are decoded to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum DecodeAnchors {
    /// An even grid of `grid_points` points on the sphere.
    Grid,
    /// The points of `retrieval.gallery`. If that is empty, the points depend on the retrieval head: the locations of
    /// the training rows with "knn", and the points of GeoCLIP with any other head.
    Gallery,
}

/// Where the photos to locate are expected to be from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Prior {
    /// From the same places as the training photos and the gallery, which are mostly cities and sights.
    Training,
    /// From everywhere that the gallery covers: points in dense areas of the gallery count less.
    Even,
}

section! {
    /// Sampling, decoding and scoring.
    pub struct EvalConfig {
        /// CSV or Parquet file with ids and true coordinates of the test rows. "": the coordinates in the shards.
        pub truth: String = String::new(),
        /// Which checkpoint of a run to evaluate: "newest", "best", or the step of a checkpoint.
        pub checkpoint: CheckpointChoice = CheckpointChoice::Newest,
        /// Distances at which accuracy is reported, km, in increasing order.
        pub thresholds_km: Vec<f64> = vec![1.0, 25.0, 200.0, 750.0, 2500.0],
        /// Samples per image, distributed over its views.
        pub samples: u32 = 16,
        /// Denoising steps per sample, at most `diffusion.timesteps`.
        pub sampler_steps: u32 = 20,
        /// Amount of fresh noise in each step (η of DDIM): 1 is ancestral sampling, 0 is deterministic.
        pub sampler_eta: f64 = 1.0,
        /// Strength of classifier-free guidance; 0: off. Requires `diffusion.condition_drop` above 0.
        pub guidance: f64 = 0.0,
        /// How the samples of one image are combined into one location.
        pub aggregator: Aggregator = Aggregator::PosteriorMedoid,
        /// The points that codes are decoded to.
        pub anchors: DecodeAnchors = DecodeAnchors::Gallery,
        /// Number of grid points. "auto": 21000, or 4 (L + 1)² if that is more. `refine` requires at least 4 (L + 1)².
        pub grid_points: AutoOr<u32> = AutoOr::Auto,
        /// Score each point by the sum of the density over the points within this radius, km. 0: by the point's own
        /// density.
        pub neighbourhood_km: f64 = 0.0,
        /// Move each decoded point to the nearest mode on the continuous sphere.
        pub refine: bool = false,
        /// Distance from a photo's true place, km, within which retrieval and LocDiff-H ignore gallery points (or
        /// training photos, if retrieval.head = "knn"). 0: none are ignored. LocDiff's own answers are not affected,
        /// even with anchors = "gallery".
        pub exclude_km: f64 = 0.0,
        /// Where the photos are expected to be from. LocDiff-H and retrieval with consensus use it, unless
        /// retrieval.head = "knn".
        pub prior: Prior = Prior::Training,
        /// Steps between quick evaluations on `shards.validation` during training; 0: none.
        pub every: u64 = 1000,
        /// Number of rows in a quick evaluation, from the start of the validation data.
        pub quick_rows: u32 = 1024,
        /// Samples per image in a quick evaluation.
        pub quick_samples: u32 = 4,
        /// Number of test photos whose samples, alternatives and densities along the denoising steps the report shows,
        /// spread evenly over the rows, at most 100; 0: none.
        pub report_photos: u32 = 12,
        /// Evaluate on `shards.test` when training ends. Includes LocDiff-H, tuned on `shards.validation`, if the
        /// retrieval data is available.
        pub after_train: bool = false,
    }
}

impl EvalConfig {
    /// Number of grid points for codes of degree `degree`, with "auto" resolved.
    pub fn grid_points(&self, degree: u32) -> u32 {
        self.grid_points.value().unwrap_or_else(|| grid_points_min(degree).max(GRID_POINTS_AUTO_MIN))
    }

    /// Checks the section. `degree` is `model.degree`, which may itself be out of range.
    pub(in crate::config) fn check(&self, degree: u32, checker: &mut Checker) {
        let increasing = self.thresholds_km.windows(2).all(|pair| pair[0] < pair[1]);
        let usable = self.thresholds_km.iter().all(|km| *km > 0.0 && km.is_finite());
        if self.thresholds_km.is_empty() || !increasing || !usable {
            let message = format!("is {:?}, wanted increasing numbers above 0", self.thresholds_km);
            checker.push("eval.thresholds_km", message);
        }
        checker.within("eval.samples", self.samples, 1..=4096);
        checker.within("eval.quick_rows", self.quick_rows, 1..=10_000_000);
        checker.within("eval.quick_samples", self.quick_samples, 1..=4096);
        checker.within("eval.report_photos", self.report_photos, 0..=REPORT_PHOTOS_MAX);
        checker.within("eval.sampler_steps", self.sampler_steps, 1..=10_000);
        checker.within("eval.sampler_eta", self.sampler_eta, 0.0..=1.0);
        checker.not_negative("eval.guidance", self.guidance);
        if let Some(points) = self.grid_points.value() {
            checker.within("eval.grid_points", points, 100..=10_000_000);
            // `ModelConfig::check` reports a degree that is out of range. `min` prevents an overflow of the degree's
            // square.
            let wanted = grid_points_min(degree.min(1023));
            if self.refine && points < wanted {
                let message = format!(
                    "is {points}, too few for eval.refine at model.degree = {degree}, wanted \"auto\" or at least {wanted}"
                );
                checker.push("eval.grid_points", message);
            }
        }
        checker.within("eval.neighbourhood_km", self.neighbourhood_km, 0.0..=20_000.0);
        checker.within("eval.exclude_km", self.exclude_km, 0.0..=20_000.0);
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{Layer, load};

    fn set(text: &str) -> Layer {
        Layer::Set(text.into())
    }

    fn error_text(layers: &[Layer]) -> String {
        load(layers).expect_err("the configuration is invalid").to_string()
    }

    #[test]
    fn grid_too_coarse_for_refinement_is_refused() {
        let points = |degree: u32| {
            let layers = [set(&format!("model.degree={degree}")), set("eval.refine=true")];
            let found = load(&layers).expect("the settings are valid");
            found.config.eval.grid_points(degree)
        };
        assert_eq!([47, 71, 72, 127].map(points), [21_000, 21_000, 21_316, 65_536]);
        let layers = |points: u32| [set("model.degree=95"), set(&format!("eval.grid_points={points}"))];
        assert_eq!(load(&layers(21_000)).expect("the grid is fine enough").config.eval.grid_points(95), 21_000);
        let refined = |points| [&layers(points)[..], &[set("eval.refine=true")]].concat();
        assert!(load(&refined(36_864)).is_ok());
        let text = error_text(&refined(36_863));
        let want = "eval.grid_points: is 36863, too few for eval.refine at model.degree = 95, wanted \"auto\" or at least 36864";
        assert!(text.contains(want), "{text}");
        assert!(error_text(&[set("model.degree=4294967295"), refined(100)[1].clone()]).contains("model.degree"));
    }
}
