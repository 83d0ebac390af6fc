//! Combines several places into one: mean of unit vectors, geometric median, kernel medoid, posterior medoid.
//!
//! All functions compute with unit vectors and great circles, so the date line and the poles need no special treatment.
//! No function returns NaN. If several places are equally good (antipodal samples, ties), the result is the first of
//! the best samples.
//!
//! Sources: Vardi and Zhang, "The multivariate L1-median", PNAS 2000; Fletcher, Venkatasubramanian, Joshi, "The
//! geometric median on Riemannian manifolds", NeuroImage 2009.

use locdiff_core::geo::UnitVector;

use crate::shdd::ShddError;

/// Widths of the two exponentials in the kernel medoid, in km. They are about the sizes of a town and of a country.
pub const KERNEL_WIDTHS_KM: [f64; 2] = [50.0, 500.0];
/// The posterior medoid raises a sample's expected density to at least this fraction of the largest expected density.
const EXPECTED_MIN: f64 = 0.02;
/// If the mean of the unit vectors is shorter than this, its direction is only rounding error.
const MEAN_LENGTH_MIN: f64 = 1e-9;
/// The search for the median ends when a step is not longer than this, in radians. On Earth, this is 6 micrometres.
const MEDIAN_STEP_RAD: f64 = 1e-12;
/// Maximum number of Weiszfeld's steps. The steps converge linearly. They converge slowly only if nearly all samples
/// lie on one line.
const MEDIAN_STEPS_MAX: usize = 1000;
/// A sample that is closer than this to the current place, in radians, counts as being at that place.
const COINCIDENT_RAD: f64 = 1e-13;
/// If the relative difference of two sums is below this value, the sums count as equal: rounding can cause such a
/// difference.
const TIE: f64 = 1e-12;

/// The direction of the sum of all unit vectors. If the sum is almost 0, such as for antipodal samples, returns the
/// kernel medoid instead.
pub fn mean_vector(points: &[UnitVector]) -> Result<UnitVector, ShddError> {
    let medoid = kernel_medoid(points, &[])?;
    let sum = points.iter().fold([0.0; 3], |sum, point| add(sum, point.xyz(), 1.0));
    if norm(sum) < MEAN_LENGTH_MIN * points.len() as f64 {
        return Ok(points[medoid]);
    }
    Ok(UnitVector::new(sum).expect("a sum of this length has a direction"))
}

/// The place with the least sum of great-circle distances to the samples. The search starts at the sample with the
/// least sum.
///
/// The search is Weiszfeld's iteration in the tangent plane. If the current place is itself a sample, the search uses
/// Vardi and Zhang's step. The sum never increases. If a whole line of places is optimal, such as the line between two
/// samples, the first of the best samples is returned.
pub fn geometric_median(points: &[UnitVector]) -> Result<UnitVector, ShddError> {
    let costs: Vec<f64> = points.iter().map(|point| cost(points, *point)).collect();
    let start = first_best(&costs, |cost, best| cost < best * (1.0 - TIE)).ok_or_else(no_samples)?;
    let (mut place, mut least) = (points[start], costs[start]);
    for _ in 0..MEDIAN_STEPS_MAX {
        match downhill(points, place, least) {
            Some(better) => (place, least) = better,
            None => break,
        }
    }
    Ok(place)
}

/// The index of the sample with the densest surroundings. The density around a sample is
/// `Σ (exp(-d / 50 km) + exp(-d / 500 km))`, where d runs over the distances from this sample to all samples. If
/// several samples have the largest density, the first of them is chosen. In the sums, each sample has its weight in
/// `weights`, or 1 if `weights` is empty.
pub fn kernel_medoid(points: &[UnitVector], weights: &[f64]) -> Result<usize, ShddError> {
    weighted_medoid(points, |sample| weights.get(sample).copied().unwrap_or(1.0))
}

/// Like [`kernel_medoid`], but each sample has a weight in the sums. `expected` holds the density that the network
/// expects at each sample. Each density is divided by the largest density. Quotients below 0.02 are raised to 0.02. The
/// weight of a sample is the square of its quotient.
///
/// If several regions are probable, a small ensemble, such as sixteen samples, does not show which of them is the most
/// probable. `expected` does not depend on the ensemble: it comes from the code that the network predicts from pure
/// noise, which is the mean code over all probable places. This code is coarse but has no sampling error, so samples in
/// improbable regions get small weights.
///
/// Each of these weights is multiplied by the weight of the sample in `weights`, if `weights` is not empty.
pub fn posterior_medoid(points: &[UnitVector], expected: &[f64], weights: &[f64]) -> Result<usize, ShddError> {
    let most = expected.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    let own = |sample: usize| weights.get(sample).copied().unwrap_or(1.0);
    weighted_medoid(points, |sample| own(sample) * (expected[sample] / most).max(EXPECTED_MIN).powi(2))
}

fn weighted_medoid(points: &[UnitVector], weight: impl Fn(usize) -> f64) -> Result<usize, ShddError> {
    let closeness = |one: UnitVector, other: UnitVector| {
        let distance_km = one.distance(other).0;
        KERNEL_WIDTHS_KM.iter().map(|width_km| (-distance_km / width_km).exp()).sum::<f64>()
    };
    let weights: Vec<f64> = (0..points.len()).map(weight).collect();
    let score =
        |one: &UnitVector| points.iter().zip(&weights).map(|(other, weight)| weight * closeness(*one, *other)).sum();
    let scores: Vec<f64> = points.iter().map(score).collect();
    first_best(&scores, |score, best| score > best * (1.0 + TIE)).ok_or_else(no_samples)
}

pub(super) fn no_samples() -> ShddError {
    ShddError::Bad("aggregator: 0 samples, wanted at least 1".to_owned())
}

fn first_best(values: &[f64], better: impl Fn(f64, f64) -> bool) -> Option<usize> {
    let mut best = None;
    for (index, value) in values.iter().enumerate() {
        if best.is_none_or(|best: usize| better(*value, values[best])) {
            best = Some(index);
        }
    }
    best
}

/// The next place in the search for the median, and its cost. `None` if no step lowers the cost.
fn downhill(points: &[UnitVector], place: UnitVector, least: f64) -> Option<(UnitVector, f64)> {
    let mut step = median_step(points, place);
    while norm(step) > MEDIAN_STEP_RAD {
        let next = place.walk(step).expect("a sum of unit vectors divided by a positive weight is finite");
        let cost = cost(points, next);
        if cost < least {
            return Some((next, cost));
        }
        step = step.map(|value| value * 0.5);
    }
    None
}

/// Weiszfeld's step at `place`. The step is a tangent vector in radians.
fn median_step(points: &[UnitVector], place: UnitVector) -> [f64; 3] {
    let (mut pull, mut weights, mut coincident) = ([0.0; 3], 0.0, 0.0);
    for point in points {
        let distance = place.angle(*point);
        if distance < COINCIDENT_RAD {
            coincident += 1.0;
            continue;
        }
        weights += 1.0 / distance;
        let along = add(point.xyz(), place.xyz(), -place.dot(*point));
        let length = norm(along);
        // The direction towards an antipodal sample is undefined, so this sample adds nothing to `pull`.
        if length > COINCIDENT_RAD {
            pull = add(pull, along, 1.0 / length);
        }
    }
    let strength = norm(pull);
    if strength <= coincident || weights == 0.0 {
        return [0.0; 3];
    }
    pull.map(|value| value * (1.0 - coincident / strength) / weights)
}

fn cost(points: &[UnitVector], place: UnitVector) -> f64 {
    points.iter().map(|point| place.angle(*point)).sum()
}

fn add(one: [f64; 3], other: [f64; 3], factor: f64) -> [f64; 3] {
    std::array::from_fn(|axis| one[axis] + factor * other[axis])
}

fn norm(vector: [f64; 3]) -> f64 {
    vector.iter().map(|value| value * value).sum::<f64>().sqrt()
}
