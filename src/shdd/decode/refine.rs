//! Finds the mode of a code on the continuous sphere, by damped Newton in f64.
//!
//! If the Hessian is negative definite, it takes a Newton step, else a step along the gradient. No step is longer than a
//! quarter of the resolution π / L, and each is halved until the value does not decrease. The value therefore never
//! decreases by more than rounding, and the search ends at the top of the hill on which it started. A code with a value
//! that is not finite is an error.
//!
//! Source: Absil, Mahony, Sepulchre, "Optimization Algorithms on Matrix Manifolds", 2008, chapters 4 and 6.

use locdiff_core::geo::UnitVector;

use crate::shdd::{Basis, Local, ShddError};

/// The search ends when a Newton step is shorter than this, in radians (6 mm on Earth).
pub const STEP_RAD_MIN: f64 = 1e-9;
/// Longest step as a fraction of the resolution π / L.
const STEP_OF_RESOLUTION: f64 = 0.25;
/// Limit of steps. From a start on the right hill, 4 to 8 are enough.
const STEPS_MAX: u32 = 100;
const HALVINGS_MAX: u32 = 40;
/// Relative decrease of the value that is accepted, because rounding explains it.
const ROUNDING: f64 = 1e-12;

/// The result of a search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Refined {
    /// The mode, or the last place of a search that did not converge.
    pub point: UnitVector,
    /// The score there.
    pub value: f64,
    /// Number of steps taken.
    pub steps: u32,
    /// Whether the last Newton step was shorter than [`STEP_RAD_MIN`]. False on a plateau, at a saddle, or at the step limit.
    pub converged: bool,
}

/// Climbs from `start` to the nearest mode of Σ `code`_i Y_i. Every value of the code must be finite.
pub fn refine(basis: &Basis, code: &[f64], start: UnitVector) -> Result<Refined, ShddError> {
    if let Some(index) = code.iter().position(|value| !value.is_finite()) {
        return Err(ShddError::Bad(format!("coefficient {index} is {}, wanted a finite number", code[index])));
    }
    ascend(basis.degree(), start, |point| basis.value_gradient_hessian(code, point))
}

/// Climbs from `start` to the nearest mode of any function that varies no faster than harmonics up to `degree`.
pub(in crate::shdd) fn ascend(
    degree: u32,
    start: UnitVector,
    function: impl Fn(UnitVector) -> Result<Local, ShddError>,
) -> Result<Refined, ShddError> {
    let longest = STEP_OF_RESOLUTION * std::f64::consts::PI / f64::from(degree.max(1));
    let (mut point, mut local) = (start, function(start)?);
    for steps in 0..STEPS_MAX {
        let newton = newton_step(&local);
        if let Some(step) = newton
            && length(step) < STEP_RAD_MIN
        {
            let point = point.walk(local.basis.combine(step))?;
            return Ok(Refined { point, value: local.value, steps: steps + 1, converged: true });
        }
        let step = limited(newton.unwrap_or_else(|| uphill(&local, longest)), longest);
        match climb(&function, point, &local, step)? {
            Some(higher) => (point, local) = higher,
            None => return Ok(Refined { point, value: local.value, steps, converged: false }),
        }
    }
    Ok(Refined { point, value: local.value, steps: STEPS_MAX, converged: false })
}

/// Takes the first of step, step / 2, step / 4, ... that does not lower the value. `None` if all do.
fn climb(
    function: impl Fn(UnitVector) -> Result<Local, ShddError>,
    point: UnitVector,
    local: &Local,
    mut step: [f64; 2],
) -> Result<Option<(UnitVector, Local)>, ShddError> {
    if length(step) == 0.0 {
        return Ok(None);
    }
    for _ in 0..HALVINGS_MAX {
        let next = point.walk(local.basis.combine(step))?;
        let there = function(next)?;
        if there.value >= local.value - ROUNDING * local.value.abs() {
            return Ok(Some((next, there)));
        }
        step = step.map(|part| part / 2.0);
    }
    Ok(None)
}

/// The Newton step −H⁻¹ g along east and north, or `None` if H is not negative definite.
fn newton_step(local: &Local) -> Option<[f64; 2]> {
    let [[a, b], [_, d]] = local.hessian;
    let determinant = a * d - b * b;
    // Relative to the squared entries, because on a plateau the determinant is nothing but rounding errors.
    if !(a + d < 0.0 && determinant > 1e-10 * (a * a + d * d + 2.0 * b * b)) {
        return None;
    }
    let [east, north] = gradient(local);
    Some([(b * north - d * east) / determinant, (b * east - a * north) / determinant])
}

/// A step of the greatest allowed length along the gradient.
fn uphill(local: &Local, longest: f64) -> [f64; 2] {
    let gradient = gradient(local);
    let steepness = length(gradient);
    if steepness > 0.0 { gradient.map(|part| part / steepness * longest) } else { [0.0; 2] }
}

fn limited(step: [f64; 2], longest: f64) -> [f64; 2] {
    let length = length(step);
    if length > longest { step.map(|part| part / length * longest) } else { step }
}

/// The components of the gradient along east and north.
pub(in crate::shdd) fn gradient(local: &Local) -> [f64; 2] {
    let along = |axis: [f64; 3]| axis.iter().zip(local.gradient).map(|(a, g)| a * g).sum();
    [along(local.basis.east), along(local.basis.north)]
}

fn length([east, north]: [f64; 2]) -> f64 {
    east.hypot(north)
}
