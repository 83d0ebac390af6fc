//! Nearly uniform grids of any size (the Fibonacci lattice), and a division of the sphere into cells.
//!
//! Fibonacci lattice: point i of n has the z coordinate 1 − (2i + 1) / n. From each point to the next, the longitude
//! grows by a full turn divided by the golden ratio. Source: González, "Measurement of areas on a sphere using
//! Fibonacci and latitude-longitude lattices", Math. Geosci. 42, 2010.

use std::ops::RangeInclusive;

use super::place::Place;
use super::vector::UnitVector;

/// One over the golden ratio, (√5 − 1) / 2: the fraction of a full turn between successive points.
const GOLDEN_TURN: f64 = 0.618_033_988_749_894_8;

/// Heights of cells that [`cell_of`] accepts, degrees.
pub const CELL_DEGREES_RANGE: RangeInclusive<f64> = 0.001..=90.0;

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

/// The number of the cell that contains a place. Cells are `degrees` of latitude high, and their width in km is about
/// equal to their height. Numbers are comparable only between cells of the same height.
pub fn cell_of(place: Place, degrees: f64) -> u64 {
    let band = ((place.latitude().0 + 90.0) / degrees).floor();
    let middle = (band + 0.5) * degrees - 90.0;
    let cells = (360.0 * middle.to_radians().cos() / degrees).round().max(1.0);
    let cell = ((place.longitude().0 + 180.0) / 360.0 * cells).floor();
    (band as u64) << 32 | cell as u64
}
