//! The mode of a code on the continuous sphere: damped Newton in f64.
//!
//! Where the Hessian is negative definite a Newton step, elsewhere a step along the gradient; no step is longer than a quarter of
//! the resolution π / L, and each is halved until the value does not fall. Hence the value never falls by more than rounding, and
//! the mode found is that of the hill on which the start lies. A code with a number that is none is an error. Source: Absil, Mahony, Sepulchre, "Optimization
//! Algorithms on Matrix Manifolds", 2008, chapters 4 and 6.

use locdiff_core::geo::UnitVector;

use crate::shdd::{Basis, Local, ShddError};

/// A Newton step shorter than this ends the search, radians: 6 mm on Earth.
pub const STEP_RAD_MIN: f64 = 1e-9;
/// Longest step as a part of the resolution π / L.
const STEP_OF_RESOLUTION: f64 = 0.25;
/// From a start on the right hill 4 to 8 are enough.
const STEPS_MAX: u32 = 100;
const HALVINGS_MAX: u32 = 40;
/// A value may fall by this part of its size, which is what rounding does.
const ROUNDING: f64 = 1e-12;

/// Where a search ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Refined {
    /// The mode, or the best place on the way to it.
    pub point: UnitVector,
    /// The score there.
    pub value: f64,
    /// Steps taken.
    pub steps: u32,
    /// The last Newton step was shorter than [`STEP_RAD_MIN`]. False on a plateau, at a saddle, or when steps ran out.
    pub converged: bool,
}

/// Climbs from `start` to the nearest mode of Σ `code`_i Y_i. Every number of the code must be finite.
pub fn refine(basis: &Basis, code: &[f64], start: UnitVector) -> Result<Refined, ShddError> {
    if let Some(index) = code.iter().position(|value| !value.is_finite()) {
        return Err(ShddError::Bad(format!("coefficient {index} is {}, wanted a finite number", code[index])));
    }
    ascend(basis.degree(), start, |point| basis.value_gradient_hessian(code, point))
}

/// Climbs from `start` to the nearest mode of any function that varies no faster than harmonics to `degree`.
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

/// The first of step, step / 2, step / 4, ... that does not lead down; none where all do.
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

/// −H⁻¹ g along east and north, where H is negative definite.
fn newton_step(local: &Local) -> Option<[f64; 2]> {
    let [[a, b], [_, d]] = local.hessian;
    let determinant = a * d - b * b;
    // Compared with the squares of its entries: a plateau's determinant is rounding alone.
    if !(a + d < 0.0 && determinant > 1e-10 * (a * a + d * d + 2.0 * b * b)) {
        return None;
    }
    let [east, north] = gradient(local);
    Some([(b * north - d * east) / determinant, (b * east - a * north) / determinant])
}

/// Along the gradient, as far as is allowed.
fn uphill(local: &Local, longest: f64) -> [f64; 2] {
    let gradient = gradient(local);
    let steepness = length(gradient);
    if steepness > 0.0 { gradient.map(|part| part / steepness * longest) } else { [0.0; 2] }
}

fn limited(step: [f64; 2], longest: f64) -> [f64; 2] {
    let length = length(step);
    if length > longest { step.map(|part| part / length * longest) } else { step }
}

/// The gradient along east and north.
pub(in crate::shdd) fn gradient(local: &Local) -> [f64; 2] {
    let along = |axis: [f64; 3]| axis.iter().zip(local.gradient).map(|(a, g)| a * g).sum();
    [along(local.basis.east), along(local.basis.north)]
}

fn length([east, north]: [f64; 2]) -> f64 {
    east.hypot(north)
}
