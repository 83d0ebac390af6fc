//! Density and coverage: do predicted places lie where true ones do, and are all true ones met?
//!
//! ```text
//! r_i = distance of true place i to its k-th nearest other true place
//! density  = 1 / (k M) Σ_j Σ_i [d(true_i, predicted_j) < r_i]
//! coverage = 1 / N Σ_i [min_j d(true_i, predicted_j) < r_i]
//! ```
//!
//! Distances are great circles. As in the authors' package `prdc`, a place is its own nearest neighbour at distance 0 and the
//! one that counts comes k places later, and comparisons are strict: a true place with k others on its very spot has a radius
//! of 0 and is never met. An index finds neighbours, so that memory grows with the points and not with their pairs. Source:
//! Naeem, Oh, Uh, Choi, Yoo, "Reliable fidelity and diversity metrics for generative models", ICML 2020.

use super::error::MetricsError;
use crate::geo::{Km, SphereIndex, UnitVector};

/// Neighbours that the paper's tables count.
pub const NEAREST_K: usize = 3;

/// Both numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DensityCoverage {
    /// About 1 where predictions are spread as the truth is; may be more.
    pub density: f64,
    /// Share of true places that a prediction is near to, 0 to 1.
    pub coverage: f64,
}

/// Density and coverage of predicted places, one per image, among the true ones.
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
            "the {k}-th nearest of {got} places, wanted at least the first and more places than that"
        )));
    }
    let (real, fake) = (SphereIndex::new(truth.to_vec()), SphereIndex::new(predicted.to_vec()));
    let (mut inside, mut covered) = (0_u64, 0_u64);
    for place in truth {
        let (_, radius) = real.nearest_many(*place, k + 1)[k];
        inside += fake.count_nearer(*place, radius) as u64;
        let nearest = fake.nearest(*place).map_or(Km(f64::INFINITY), |(_, distance)| distance);
        covered += u64::from(nearest < radius);
    }
    Ok(DensityCoverage {
        density: inside as f64 / (k as f64 * predicted.len() as f64),
        coverage: covered as f64 / truth.len() as f64,
    })
}
