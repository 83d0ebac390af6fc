//! HEALPix: a division of the sphere into 12·4^order cells of equal area, numbered in the nested scheme. The four cells
//! 4c to 4c + 3 of the next order divide cell c.
//!
//! Source: Górski et al., "HEALPix: a framework for high-resolution discretization and fast analysis of data
//! distributed on the sphere", ApJ 622, 2005.

use std::f64::consts::{FRAC_PI_2, FRAC_PI_4, PI};

use super::EARTH_RADIUS_KM;
use super::vector::UnitVector;

/// For each of the 12 base cells: the ring of its southernmost corner, in units of the rings of a base cell.
const RING: [i64; 12] = [2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4];
/// For each of the 12 base cells: the longitude of its centre, in units of 45 degrees.
const LONGITUDE: [i64; 12] = [1, 3, 5, 7, 0, 2, 4, 6, 1, 3, 5, 7];
/// The largest order whose cells all functions of this module number correctly.
const ORDER_MAX: u32 = 24;

/// An upper bound of the radius of a cell of order 0, radians. The radius of a cell of order k is at most 2^-k times
/// this.
const RADIUS: f64 = 1.2;

/// The cells of one order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Healpix {
    order: u32,
}

impl Healpix {
    /// The cells of `order`, which is at most 24.
    pub fn new(order: u32) -> Self {
        Self { order: order.min(ORDER_MAX) }
    }

    /// The smallest order with at least `cells` cells.
    pub fn with_cells(cells: u64) -> Self {
        let order = (0..ORDER_MAX).find(|order| Self::new(*order).cells() >= cells);
        Self::new(order.unwrap_or(ORDER_MAX))
    }

    /// The order of the cells.
    pub fn order(self) -> u32 {
        self.order
    }

    /// Number of cells.
    pub fn cells(self) -> u64 {
        12 << (2 * self.order)
    }

    /// Area of a cell, km².
    pub fn cell_km2(self) -> f64 {
        4.0 * PI * EARTH_RADIUS_KM * EARTH_RADIUS_KM / self.cells() as f64
    }

    /// An upper bound of the angle from the centre of a cell to any point of the cell, radians.
    pub fn radius(self) -> f64 {
        RADIUS / (1_u64 << self.order) as f64
    }

    /// The centre of a cell. Cells are counted from 0; a number beyond the last cell counts from 0 again.
    pub fn centre(self, cell: u64) -> UnitVector {
        let cell = cell % self.cells();
        let side = 1_i64 << self.order;
        let (base, within) = ((cell >> (2 * self.order)) as usize, cell & ((1 << (2 * self.order)) - 1));
        let [x, y] = [within, within >> 1].map(|bits| every_second_bit(bits) as i64);
        let ring = (RING[base] << self.order) - x - y - 1;
        let (per_quarter, z) = if ring < side {
            (ring, 1.0 - (ring * ring) as f64 / (3 * side * side) as f64)
        } else if ring > 3 * side {
            let from_south = 4 * side - ring;
            (from_south, (from_south * from_south) as f64 / (3 * side * side) as f64 - 1.0)
        } else {
            (side, 2.0 * (2 * side - ring) as f64 / (3 * side) as f64)
        };
        let angle = FRAC_PI_4 * (LONGITUDE[base] * per_quarter + x - y) as f64 / per_quarter as f64;
        UnitVector::from_height(z, angle).expect("the height of a ring is between -1 and 1")
    }

    /// The cell that contains a point.
    pub fn cell_of(self, point: UnitVector) -> u64 {
        let [x, y, z] = point.xyz();
        let (side, quarters) = (1_i64 << self.order, (y.atan2(x) / FRAC_PI_2).rem_euclid(4.0));
        let (base, x, y) = if z.abs() <= 2.0 / 3.0 {
            let (along, across) = (side as f64 * (0.5 + quarters), side as f64 * z * 0.75);
            let [rising, falling] = [along - across, along + across].map(|line| line.floor() as i64);
            let [above, below] = [rising >> self.order, falling >> self.order];
            let base = match above.cmp(&below) {
                std::cmp::Ordering::Equal => above | 4,
                std::cmp::Ordering::Less => above,
                std::cmp::Ordering::Greater => below + 8,
            };
            (base, falling & (side - 1), side - (rising & (side - 1)) - 1)
        } else {
            let quarter = quarters.floor().min(3.0);
            let part = quarters - quarter;
            // √(3 (1 - |z|)), without the loss of digits near a pole.
            let from_pole = side as f64 * x.hypot(y) * (3.0 / (1.0 + z.abs())).sqrt();
            let [rising, falling] = [part, 1.0 - part].map(|part| ((part * from_pole).floor() as i64).min(side - 1));
            if z >= 0.0 {
                (quarter as i64, side - falling - 1, side - rising - 1)
            } else {
                (quarter as i64 + 8, rising, falling)
            }
        };
        ((base as u64) << (2 * self.order)) | spread_bits(x as u64) | spread_bits(y as u64) << 1
    }
}

/// One number for a HEALPix cell of any order: 4^(order + 1) plus the number of the cell in the nested scheme.
pub fn unique_cell(order: u32, cell: u64) -> u64 {
    (4 << (2 * order)) + cell
}

/// The order and the number of the cell of [`unique_cell`].
pub fn order_and_cell(unique: u64) -> (u32, u64) {
    let order = (unique.max(4).ilog2() / 2).saturating_sub(1);
    (order, unique.saturating_sub(4 << (2 * order)))
}

/// Moves bit 2k of `bits` to bit k, and drops all other bits.
fn every_second_bit(bits: u64) -> u64 {
    (0..ORDER_MAX).map(|bit| (bits >> (2 * bit) & 1) << bit).sum()
}

/// Moves bit k of `bits` to bit 2k.
fn spread_bits(bits: u64) -> u64 {
    (0..ORDER_MAX).map(|bit| (bits >> bit & 1) << (2 * bit)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geo::fibonacci_grid;

    #[test]
    fn each_centre_is_in_its_own_cell_and_in_the_parent_cell_of_every_lower_order() {
        for order in 0..7 {
            let grid = Healpix::new(order);
            for cell in 0..grid.cells() {
                assert_eq!(grid.cell_of(grid.centre(cell)), cell, "order {order}");
            }
        }
        for point in fibonacci_grid(2000) {
            let finest = Healpix::new(24).cell_of(point);
            for order in 0..24 {
                assert_eq!(Healpix::new(order).cell_of(point), finest >> (2 * (24 - order)), "order {order}");
            }
        }
    }

    #[test]
    fn finer_centres_of_a_cell_are_within_its_radius() {
        for order in 0..5 {
            let (grid, fine) = (Healpix::new(order), Healpix::new(order + 5));
            for cell in 0..fine.cells() {
                let angle = fine.centre(cell).angle(grid.centre(cell >> 10));
                assert!(angle + fine.radius() / 2.0 < grid.radius(), "order {order}, cell {cell}: {angle}");
            }
        }
    }

    #[test]
    fn unique_numbers_stand_for_one_cell_of_one_order() {
        // The numbers of an order follow those of the order before.
        for order in 0..4 {
            let (first, count) = (4 << (2 * order), Healpix::new(order).cells());
            for (number, cell) in (first..).zip(0..count) {
                assert_eq!((unique_cell(order, cell), order_and_cell(number)), (number, (order, cell)));
            }
        }
        for order in 0..12 {
            let last = Healpix::new(order).cells() - 1;
            for cell in [0, 1, last] {
                assert_eq!(order_and_cell(unique_cell(order, cell)), (order, cell));
            }
        }
    }

    #[test]
    fn cells_hold_equal_shares_of_even_points_and_poles_have_cells() {
        let grid = Healpix::with_cells(700);
        assert_eq!((grid.order(), grid.cells()), (3, 768));
        let mut counts = vec![0; 768];
        fibonacci_grid(768_000).into_iter().for_each(|point| counts[grid.cell_of(point) as usize] += 1);
        assert!(counts.iter().all(|count| (990..1010).contains(count)), "{counts:?}");
        assert_eq!(grid.cell_of(UnitVector::NORTH_POLE) >> 6, 0);
        assert_eq!(grid.cell_of(UnitVector::SOUTH_POLE) >> 6, 8);
        assert!((grid.cell_km2() * 768.0 / 510_065_621.7 - 1.0).abs() < 1e-6);
    }
}
