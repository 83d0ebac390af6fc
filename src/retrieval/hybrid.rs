//! LocDiff-H chooses the gallery point, if any, that replaces LocDiff's answer.
//!
//! | mode         | candidates: gallery points within | the answer is the candidate with the largest              |
//! |--------------|-----------------------------------|-----------------------------------------------------------|
//! | `any-sample` | the radius of any sample          | logit (the paper's form)                                  |
//! | `aggregate`  | the radius of LocDiff's answer    | logit                                                     |
//! | `fusion`     | the radius of LocDiff's answer    | score s = logit + λ log Σ_k exp(-d_k / h)                 |
//! | `consensus`  | the radius of LocDiff's answer    | sum of votes, Σ_j exp(s_j) Σ_w exp(-d_j / w)              |
//!
//! In `fusion`, λ is `density_weight`, h is `density_km`, and d_k is the distance from the candidate to LocDiff's
//! sample k. In `consensus`, the candidates with the highest scores s are the voters, and the answer is one of them.
//! Voter j has the score s_j and is at distance d_j from the candidate, and w runs over `CONSENSUS_WIDTHS_KM`.
//!
//! The logit distinguishes streets well but confuses continents. LocDiff's samples find the region well. `fusion` adds
//! the logit to the log density of the samples, as if both were log probabilities, and chooses the most probable point.
//! `consensus` treats exp(s) as a posterior over the gallery, and chooses the point that is expected to be close to the
//! truth on the usual distance scales.
//!
//! All functions are pure. A point whose distance equals the radius is a candidate. Ties go to the first gallery point.
//! If there are no candidates, LocDiff's answer is kept.

use std::sync::OnceLock;

use locdiff_core::config::HybridMode;
use locdiff_core::geo::{EARTH_RADIUS_KM, Km, SphereIndex, UnitVector};
pub use locdiff_core::tuning::Hybrid;

/// The maximum number of voters in a consensus. The candidates with the highest scores vote.
const CONSENSUS_POINTS: usize = 64;
/// A candidate votes only if its weight is at least e⁻⁹ times the weight of the best candidate.
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
    /// The indices of the gallery points that are candidates under `setting`, ascending.
    pub fn candidates(&self, setting: &Hybrid, index: &SphereIndex) -> Vec<u32> {
        match setting.mode {
            HybridMode::AnySample => within_any(index, &self.samples, Km(setting.radius_km)),
            _ => index.within(self.aggregate, Km(setting.radius_km)),
        }
    }

    /// LocDiff-H's answer under `setting`, as the index of a gallery point. It is one of `candidates`, or `None` if there
    /// are no candidates. `logits` holds the logit of each candidate.
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

/// The indices of all points within `radius` of any of `places`, ascending, without duplicates.
pub(super) fn within_any(index: &SphereIndex, places: &[UnitVector], radius: Km) -> Vec<u32> {
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

/// log Σ_k exp(-d_k / h), where d_k is the distance to sample k and h is `width_km`. If there are no samples, the
/// result is 0, so that a fused score equals the logit.
pub(super) fn log_density(distances_km: &[f64], width_km: f64) -> f64 {
    let nearest = distances_km.iter().copied().fold(f64::INFINITY, f64::min);
    if nearest == f64::INFINITY {
        return 0.0;
    }
    let term = |distance: &f64| {
        let exponent = (nearest - distance) / width_km;
        // The term of the nearest sample is 1. A term with an exponent below -37 is too small to change the sum.
        if exponent < -37.0 { 0.0 } else { exponent.exp() }
    };
    distances_km.iter().map(term).sum::<f64>().ln() - nearest / width_km
}

/// The position of the largest score. On a tie, the first of the largest scores wins.
fn first_best(scores: &[f64]) -> Option<usize> {
    let better = |best: usize, place: usize| if scores[place] > scores[best] { place } else { best };
    (0..scores.len()).reduce(better)
}

/// Lets the candidates with the highest scores vote, at most `CONSENSUS_POINTS` of them. A candidate whose score is
/// more than `CONSENSUS_DEPTH` below the highest score does not vote. Of candidates with equal scores, those that come
/// first in the gallery are preferred. Returns the position in `candidates` of the voter that gets the largest sum of
/// votes, or `None` if there are no candidates.
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

/// Retrieval with consensus: the best gallery points of a photo vote, with weights exp(scale · logit). `best` lists the
/// points as (gallery point, logit), best first. Returns the winner for each of `scales`: the voter with the largest
/// sum of votes. Points whose weight is less than e⁻⁹ of the largest weight do not vote. `None` if `best` is empty.
pub(super) fn retrieval_consensus(points: &[UnitVector], best: &[(u32, f32)], scales: &[f64]) -> Option<Vec<u32>> {
    let highest = f64::from(best.first()?.1);
    let depth = |place: usize| highest - f64::from(best[place].1);
    let voters =
        |scale: f64| best.partition_point(|(_, logit)| scale * (highest - f64::from(*logit)) <= CONSENSUS_DEPTH);
    let most = scales.iter().map(|scale| voters(*scale)).max()?;
    let vectors: Vec<UnitVector> = best[..most].iter().map(|(point, _)| points[*point as usize]).collect();
    // Row i, column j: how close voter j is to voter i. All scales share this matrix.
    let mut closenesses = vec![closeness(0.0) as f32; most * most];
    let table = ClosenessTable::shared();
    for (one, here) in vectors.iter().enumerate() {
        for (other, there) in vectors.iter().enumerate().skip(one + 1) {
            let close = table.at(chord2(*here, *there) as f32);
            (closenesses[one * most + other], closenesses[other * most + one]) = (close, close);
        }
    }
    let winner = |scale: &f64| {
        let voters = voters(*scale);
        let weights: Vec<f32> = (0..voters).map(|place| (-scale * depth(place)).exp() as f32).collect();
        let votes = |place: usize| -> f64 {
            // Eight sums at once, which the compiler turns into vector instructions.
            let (mut sums, row) = ([0.0_f32; 8], &closenesses[place * most..place * most + voters]);
            for (close, weight) in row.chunks(8).zip(weights.chunks(8)) {
                sums.iter_mut().zip(close.iter().zip(weight)).for_each(|(sum, (close, weight))| *sum += close * weight);
            }
            sums.iter().map(|sum| f64::from(*sum)).sum()
        };
        let votes: Vec<f64> = (0..voters).map(votes).collect();
        first_best(&votes).map(|place| best[place].0)
    };
    scales.iter().map(winner).collect()
}

/// [`closeness`] as a function of the squared chord, by linear interpolation. The default of 1000 voters gives half a
/// million pairs per photo, and the table is ten times as fast as exponentials. From 10 m on, its error is below 1e-5.
struct ClosenessTable(Vec<f32>);

impl ClosenessTable {
    /// The smallest squared chord in the table, 2⁻⁴⁰, belongs to a distance of 6 m.
    const FIRST: f32 = 9.094_947e-13;
    /// Number of low bits of an f32 between two entries: each power of two has 256 entries.
    const STEP_BITS: u32 = 15;

    fn shared() -> &'static Self {
        static TABLE: OnceLock<ClosenessTable> = OnceLock::new();
        TABLE.get_or_init(|| {
            let last = (4.1_f32.to_bits() - Self::FIRST.to_bits()) >> Self::STEP_BITS;
            let entry = |index: u32| {
                let square = f64::from(f32::from_bits(Self::FIRST.to_bits() + (index << Self::STEP_BITS)));
                let half = (0.5 * square.sqrt()).min(1.0);
                closeness(2.0 * EARTH_RADIUS_KM * half.asin()) as f32
            };
            Self((0..=last + 1).map(entry).collect())
        })
    }

    /// The closeness of two points whose chord has the squared length `square`, in squared Earth radii.
    fn at(&self, square: f32) -> f32 {
        let bits = square.clamp(Self::FIRST, 4.0).to_bits() - Self::FIRST.to_bits();
        let (index, rest) = ((bits >> Self::STEP_BITS) as usize, bits & ((1 << Self::STEP_BITS) - 1));
        let part = rest as f32 / (1_u32 << Self::STEP_BITS) as f32;
        self.0[index] + part * (self.0[index + 1] - self.0[index])
    }
}

fn closeness(distance_km: f64) -> f64 {
    let term = |width_km: &f64| {
        let exponent = distance_km / width_km;
        // Such a small term cannot change the order of the votes.
        if exponent > 37.0 { 0.0 } else { (-exponent).exp() }
    };
    CONSENSUS_WIDTHS_KM.iter().map(term).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closeness_table_is_close_to_the_formula() {
        let table = ClosenessTable::shared();
        for step in 0..4000 {
            let distance_km = 0.001 * (20_015_000.0_f64).powf(f64::from(step) / 4000.0);
            let square = (2.0 * (0.5 * distance_km / EARTH_RADIUS_KM).sin()).powi(2);
            let (got, want) = (f64::from(table.at(square as f32)), closeness(distance_km));
            assert!(
                (got - want).abs() < 0.01 || (distance_km > 0.01 && (got - want).abs() < 2e-5),
                "{distance_km} km: {got}, wanted {want}"
            );
        }
    }
}
