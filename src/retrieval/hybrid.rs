//! LocDiff-H chooses the gallery point, if any, that replaces LocDiff's answer.
//!
//! | mode         | the answer is                                                                                  |
//! |--------------|------------------------------------------------------------------------------------------------|
//! | `any-sample` | of the gallery points within the radius of any sample, the point with the largest logit (the paper's form) |
//! | `consensus`  | the winner of a vote in two rounds ([`super::pool`])                                           |
//!
//! All functions are pure. A point whose distance equals the radius is in range. Ties go to the first point.
//! LocDiff's answer is kept if no point is in range of any sample (`any-sample`).
//! With `consensus`, a gallery point always wins.

use locdiff_core::config::HybridMode;
use locdiff_core::geo::{EARTH_RADIUS_KM, Km, SphereIndex, UnitVector};
pub use locdiff_core::tuning::Hybrid;

/// LocDiff's output for one image.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageSamples {
    /// LocDiff's answer, the aggregate of the samples.
    pub aggregate: UnitVector,
    /// The samples.
    pub samples: Vec<UnitVector>,
    /// The weight of each sample; empty if all samples count the same.
    pub weights: Vec<f64>,
    /// The code that the network predicts from the image before any sample is drawn: the code of a density. Empty if it
    /// is not known.
    pub expected: Vec<f32>,
}

impl ImageSamples {
    /// The indices of the gallery points whose logits are needed under `setting`, ascending.
    pub fn candidates(&self, setting: &Hybrid, index: &SphereIndex) -> Vec<u32> {
        match setting.mode {
            HybridMode::AnySample => within_any(index, &self.samples, Km(setting.radius_km)),
            HybridMode::Consensus => index.within(self.aggregate, Km(setting.radius_km)),
        }
    }
}

/// The indices of all points within `radius` of any of `places`, ascending, without duplicates.
fn within_any(index: &SphereIndex, places: &[UnitVector], radius: Km) -> Vec<u32> {
    let mut found: Vec<u32> = places.iter().flat_map(|place| index.within(*place, radius)).collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// The distance in km, computed from the chord. This function is faster than [`UnitVector::distance`]. The result is
/// exact to a millimetre except near antipodes, where a larger error does not matter.
pub(super) fn chord_km(one: UnitVector, other: UnitVector) -> f64 {
    2.0 * EARTH_RADIUS_KM * (0.5 * chord2(one, other).sqrt()).min(1.0).asin()
}

/// The squared length of the chord between two points, in squared Earth radii.
pub(super) fn chord2(one: UnitVector, other: UnitVector) -> f64 {
    one.xyz().iter().zip(other.xyz()).map(|(a, b)| (a - b).powi(2)).sum()
}

/// The position of the largest score. On a tie, the first of the largest scores wins.
pub(super) fn first_best(scores: &[f64]) -> Option<usize> {
    let better = |best: usize, place: usize| if scores[place] > scores[best] { place } else { best };
    (0..scores.len()).reduce(better)
}
