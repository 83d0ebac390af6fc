//! Density and coverage: do the predicted places lie close to true places, and does every true place have a prediction
//! nearby?
//!
//! ```text
//! r_i = distance of true place i to its k-th nearest other true place
//! density  = 1 / (k M) Σ_j Σ_i [d(true_i, predicted_j) < r_i]
//! coverage = 1 / N Σ_i [min_j d(true_i, predicted_j) < r_i]
//! ```
//!
//! N is the number of true places, M is the number of predicted places, and d is the great-circle distance. A bracket
//! is 1 if its condition holds, and 0 otherwise.
//!
//! The details follow the authors' package `prdc`. Comparisons are strict. A place counts as its own nearest neighbour
//! at distance 0, so the k-th nearest other place is neighbour number k + 1. If k other true places have the same
//! coordinates as a true place, the radius of that place is 0, and the place is never covered. The ceiling of coverage
//! is the share of places with a radius above 0.
//!
//! Neighbours are found with a spatial index, so memory grows with the number of points rather than with the number of
//! pairs.
//!
//! Source: Naeem, Oh, Uh, Choi, Yoo, "Reliable fidelity and diversity metrics for generative models", ICML 2020.

use super::error::MetricsError;
use crate::geo::{Km, SphereIndex, UnitVector};

/// The number of neighbours (k) in the paper's tables.
pub const NEAREST_K: usize = 3;

/// The density and coverage of a set of predictions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DensityCoverage {
    /// About 1 if the predictions are distributed like the true places. The density may exceed 1.
    pub density: f64,
    /// Share of true places with a prediction nearby, 0 to 1.
    pub coverage: f64,
    /// The largest coverage that any predictions can reach. It is below 1 if more than k true places are equal.
    pub ceiling: f64,
}

/// Density and coverage of predicted places with respect to true places. `k` is the number of neighbours.
pub fn density_coverage(
    truth: &[UnitVector],
    predicted: &[UnitVector],
    k: usize,
) -> Result<DensityCoverage, MetricsError> {
    if predicted.is_empty() {
        return Err(MetricsError::no_answers());
    }
    if k == 0 || truth.len() <= k {
        let got = truth.len();
        return Err(MetricsError(format!(
            "density and coverage: got k = {k} and {got} true places, wanted k at least 1 and more than k true places"
        )));
    }
    let (true_index, predicted_index) = (SphereIndex::new(truth.to_vec()), SphereIndex::new(predicted.to_vec()));
    let (mut inside, mut covered, mut coverable) = (0_u64, 0_u64, 0_u64);
    for place in truth {
        let (_, radius) = true_index.nearest_many(*place, k + 1)[k];
        inside += predicted_index.count_nearer(*place, radius) as u64;
        let nearest = predicted_index.nearest(*place).map_or(Km(f64::INFINITY), |(_, distance)| distance);
        covered += u64::from(nearest < radius);
        coverable += u64::from(radius > Km(0.0));
    }
    Ok(DensityCoverage {
        density: inside as f64 / (k as f64 * predicted.len() as f64),
        coverage: covered as f64 / truth.len() as f64,
        ceiling: coverable as f64 / truth.len() as f64,
    })
}
