//! Finds a mode of a code on the continuous sphere, by damped Newton steps in f64.
//!
//! If the Hessian is negative definite, the search takes a Newton step. Otherwise, it takes a step along the gradient.
//! No step is longer than a quarter of the resolution π / L, where L is the degree. A step that would decrease the
//! value is halved until it does not decrease the value. After 40 halvings, the search ends. The value therefore never
//! decreases by more than rounding errors, and the search normally ends at the top of the hill on which it started. A
//! code that contains NaN or infinity is an error.
//!
//! Source: Absil, Mahony, Sepulchre, "Optimization Algorithms on Matrix Manifolds", 2008, chapters 4 and 6.

use locdiff_core::geo::UnitVector;

use crate::shdd::{Basis, Local, ShddError};

/// The search has converged when a Newton step is shorter than this, in radians. On Earth, this is 6 mm.
pub const STEP_RAD_MIN: f64 = 1e-9;
/// Maximum length of a step, as a fraction of the resolution π / L.
const STEP_OF_RESOLUTION: f64 = 0.25;
/// Maximum number of steps. If the search starts on the right hill, 4 to 8 steps are enough.
const STEPS_MAX: u32 = 100;
const HALVINGS_MAX: u32 = 40;
/// Relative decrease of the value that a step may cause. Rounding alone can cause a decrease of this size.
const ROUNDING: f64 = 1e-12;

/// The result of a search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Refined {
    /// The mode, or the last place of the search if it did not converge.
    pub point: UnitVector,
    /// The score at `point`. If the search converged, this is the score before the last step, because that step is too
    /// short to change the score.
    pub value: f64,
    /// Number of steps taken.
    pub steps: u32,
    /// Whether the last Newton step was shorter than [`STEP_RAD_MIN`]. False if the search ended on a plateau, at a
    /// saddle or at the maximum number of steps.
    pub converged: bool,
}

/// Climbs from `start` to a mode of Σ_i code\[i\] · Y_i, where Y_i are the harmonics of `basis`. Every value of `code`
/// must be finite.
pub fn refine(basis: &Basis, code: &[f64], start: UnitVector) -> Result<Refined, ShddError> {
    if let Some(index) = code.iter().position(|value| !value.is_finite()) {
        return Err(ShddError::Bad(format!(
            "decoder: coefficient {index} of the code is {}, wanted a finite number",
            code[index]
        )));
    }
    ascend(basis.degree(), start, |point| basis.value_gradient_hessian(code, point))
}

/// Climbs from `start` to a mode of `function`, which must not vary faster than the harmonics up to `degree`.
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

/// Tries the steps `step`, `step / 2`, `step / 4` and so on, at most [`HALVINGS_MAX`] steps. Takes the first one that
/// does not lower the value by more than rounding errors. Returns `None` if there is no such step, or if `step` is 0.
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

/// The Newton step −H⁻¹ g along east and north, where g is the gradient and H the Hessian. `None` if H is not negative
/// definite.
fn newton_step(local: &Local) -> Option<[f64; 2]> {
    let [[a, b], [_, d]] = local.hessian;
    let determinant = a * d - b * b;
    // Compare the determinant with the squared entries and not with 0: on a plateau, the determinant consists only of
    // rounding errors.
    if !(a + d < 0.0 && determinant > 1e-10 * (a * a + d * d + 2.0 * b * b)) {
        return None;
    }
    let [east, north] = gradient(local);
    Some([(b * north - d * east) / determinant, (b * east - a * north) / determinant])
}

/// A step of length `longest` in the direction of the gradient, or no step if the gradient is 0.
fn uphill(local: &Local, longest: f64) -> [f64; 2] {
    let gradient = gradient(local);
    let steepness = length(gradient);
    if steepness > 0.0 { gradient.map(|part| part / steepness * longest) } else { [0.0; 2] }
}

fn limited(step: [f64; 2], longest: f64) -> [f64; 2] {
    let length = length(step);
    if length > longest { step.map(|part| part / length * longest) } else { step }
}

/// The components of the gradient in the directions east and north.
pub(in crate::shdd) fn gradient(local: &Local) -> [f64; 2] {
    let along = |axis: [f64; 3]| axis.iter().zip(local.gradient).map(|(a, g)| a * g).sum();
    [along(local.basis.east), along(local.basis.north)]
}

fn length([east, north]: [f64; 2]) -> f64 {
    east.hypot(north)
}
