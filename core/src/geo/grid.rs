//! Nearly uniform grids of any size: the Fibonacci lattice.
//!
//! Point i of n has the z coordinate 1 − (2i + 1) / n. From each point to the next, the longitude grows by a full turn
//! divided by the golden ratio. Source: González, "Measurement of areas on a sphere using Fibonacci and
//! latitude-longitude lattices", Math. Geosci. 42, 2010.

use super::vector::UnitVector;

/// One over the golden ratio, (√5 − 1) / 2: the fraction of a full turn between successive points.
const GOLDEN_TURN: f64 = 0.618_033_988_749_894_8;

/// `count` points from north to south, each representing the same area.
pub fn fibonacci_grid(count: usize) -> Vec<UnitVector> {
    let step = 1.0 / count as f64;
    let point = |index: usize| {
        let z = 1.0 - (2 * index + 1) as f64 * step;
        let turn = (index as f64 * GOLDEN_TURN).fract();
        UnitVector::from_height(z, std::f64::consts::TAU * turn).expect("heights lie between 1/n - 1 and 1 - 1/n")
    };
    (0..count).map(point).collect()
}
