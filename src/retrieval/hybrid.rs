//! LocDiff-H: which gallery point, if any, replaces LocDiff's answer.
//!
//! | mode         | candidates: gallery points within | the answer is the candidate with the largest                      |
//! |--------------|-----------------------------------|-------------------------------------------------------------------|
//! | `any-sample` | the radius of any sample          | logit (the paper's form)                                          |
//! | `aggregate`  | the radius of LocDiff's answer    | logit                                                             |
//! | `fusion`     | the radius of LocDiff's answer    | s = logit + λ log Σ_k exp(-d_k / h), d_k the distance to sample k |
//! | `consensus`  | the radius of LocDiff's answer    | Σ_j exp(s_j) Σ_w exp(-d_j / w), over the best by s and widths w   |
//!
//! The logit is good at streets but confuses continents; the samples are good at the region. `fusion` adds their
//! logarithms, as if both were densities. `consensus` treats the sum as a posterior over the gallery. It answers with
//! the point that is expected to be close on the usual distance scales, whereas `fusion` answers with the single most
//! probable point.
//!
//! Pure. Radii are inclusive, and ties go to the first gallery point. If no gallery point is in range, LocDiff's own
//! answer stands.
// λ `density_weight` · h `density_km`

use locdiff_core::config::HybridMode;
use locdiff_core::geo::{EARTH_RADIUS_KM, Km, SphereIndex, UnitVector};
pub use locdiff_core::tuning::Hybrid;

/// The most points that vote in a consensus: the best by fused score.
const CONSENSUS_POINTS: usize = 64;
/// Points vote only if their weight is at least e⁻⁹ of the best one's.
const CONSENSUS_DEPTH: f64 = 9.0;
/// Kernel widths of a consensus, km: the usual accuracy thresholds up to 750 km.
const CONSENSUS_WIDTHS_KM: [f64; 4] = [1.0, 25.0, 200.0, 750.0];

/// LocDiff's output for one image.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageSamples {
    /// LocDiff's answer, the aggregate of the samples.
    pub aggregate: UnitVector,
    /// The samples.
    pub samples: Vec<UnitVector>,
}

impl ImageSamples {
    /// The candidate gallery points under a setting, ascending.
    pub fn candidates(&self, setting: &Hybrid, index: &SphereIndex) -> Vec<u32> {
        match setting.mode {
            HybridMode::AnySample => within_any(index, &self.samples, Km(setting.radius_km)),
            _ => index.within(self.aggregate, Km(setting.radius_km)),
        }
    }

    /// The answer among `candidates` with these `logits`; `None` if there are no candidates.
    pub fn answer(&self, setting: &Hybrid, points: &[UnitVector], candidates: &[u32], logits: &[f32]) -> Option<u32> {
        let logit = |place: usize| f64::from(logits[place]);
        let scores: Vec<f64> = match setting.mode {
            HybridMode::AnySample | HybridMode::Aggregate => (0..candidates.len()).map(logit).collect(),
            HybridMode::Fusion | HybridMode::Consensus => {
                let density = |place: usize| {
                    let point = points[candidates[place] as usize];
                    let distances: Vec<f64> = self.samples.iter().map(|sample| chord_km(point, *sample)).collect();
                    log_density(&distances, setting.density_km)
                };
                (0..candidates.len()).map(|place| setting.fused(logit(place), density(place))).collect()
            }
        };
        let place = match setting.mode {
            HybridMode::Consensus => consensus(points, candidates, &scores),
            _ => first_best(&scores),
        };
        place.map(|place| candidates[place])
    }
}

/// Points within a radius of any of several places, ascending, without duplicates.
pub(super) fn within_any(index: &SphereIndex, places: &[UnitVector], radius: Km) -> Vec<u32> {
    let mut found: Vec<u32> = places.iter().flat_map(|place| index.within(*place, radius)).collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// The distance computed from the chord. It is faster, and exact to a millimetre except near antipodes, where every
/// kernel is zero.
pub(super) fn chord_km(one: UnitVector, other: UnitVector) -> f64 {
    2.0 * EARTH_RADIUS_KM * (0.5 * chord2(one, other).sqrt()).min(1.0).asin()
}

/// The squared chord, in Earth radii.
pub(super) fn chord2(one: UnitVector, other: UnitVector) -> f64 {
    one.xyz().iter().zip(other.xyz()).map(|(a, b)| (a - b).powi(2)).sum()
}

/// log Σ_k exp(-d_k / h). Without samples it is 0, so that scores do not change.
pub(super) fn log_density(distances_km: &[f64], width_km: f64) -> f64 {
    let nearest = distances_km.iter().copied().fold(f64::INFINITY, f64::min);
    if nearest == f64::INFINITY {
        return 0.0;
    }
    let term = |distance: &f64| {
        let exponent = (nearest - distance) / width_km;
        // Too small to change the sum: the nearest sample contributes 1.
        if exponent < -37.0 { 0.0 } else { exponent.exp() }
    };
    distances_km.iter().map(term).sum::<f64>().ln() - nearest / width_km
}

/// Position of the largest score; the first one on a tie.
fn first_best(scores: &[f64]) -> Option<usize> {
    let better = |best: usize, place: usize| if scores[place] > scores[best] { place } else { best };
    (0..scores.len()).reduce(better)
}

/// Position of the candidate with the most weight near it. On equal scores the first gallery points vote.
pub(super) fn consensus(points: &[UnitVector], candidates: &[u32], scores: &[f64]) -> Option<usize> {
    let mut best: Vec<usize> = (0..scores.len()).collect();
    let before = |a: &usize, b: &usize| scores[*b].total_cmp(&scores[*a]).then(candidates[*a].cmp(&candidates[*b]));
    if best.len() > CONSENSUS_POINTS {
        best.select_nth_unstable_by(CONSENSUS_POINTS, before);
        best.truncate(CONSENSUS_POINTS);
    }
    best.sort_unstable_by(before);
    let highest = scores[*best.first()?];
    best.truncate(best.partition_point(|place| scores[*place] >= highest - CONSENSUS_DEPTH));
    let voters: Vec<(UnitVector, f64)> =
        best.iter().map(|place| (points[candidates[*place] as usize], (scores[*place] - highest).exp())).collect();
    let mut votes: Vec<f64> = voters.iter().map(|(_, weight)| weight * closeness(0.0)).collect();
    for (one, (here, weight)) in voters.iter().enumerate() {
        for (other, (there, other_weight)) in voters.iter().enumerate().skip(one + 1) {
            let closeness = closeness(chord_km(*here, *there));
            votes[one] += other_weight * closeness;
            votes[other] += weight * closeness;
        }
    }
    first_best(&votes).map(|place| best[place])
}

fn closeness(distance_km: f64) -> f64 {
    CONSENSUS_WIDTHS_KM.iter().map(|width_km| (-distance_km / width_km).exp()).sum()
}
