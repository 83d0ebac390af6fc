//! Neighbourhood sums in log space: an anchor's score becomes `log Σ exp(score)` over all anchors within a radius.
//!
//! Raw scores reach 183 at L = 47 and grow with (L+1)², so only differences from the largest score are exponentiated.
//! Scores more than [`NEGLIGIBLE_NATS`] below the largest are skipped. Even a million of them would add less than 1e-7 to
//! the winner.
//!
//! Anchors are sorted by the cells of a cubic grid around the sphere. The side of a cell is the chord of the radius, so the
//! neighbours of an anchor lie in its own cell and the 26 around it. The date line and the poles need no special treatment.
//!
//! Source: the paper's decoder, with the sum computed in log space.

use locdiff_core::geo::{EARTH_RADIUS_KM, UnitVector};

use crate::shdd::ShddError;

/// Scores this far below the largest are skipped. e⁻³² is 1.3e-14.
pub const NEGLIGIBLE_NATS: f32 = 32.0;
/// Smallest side of a cell, so that keys fit 30 bits even if the radius is tiny.
const CELL_SIDE_MIN: f64 = 2.0 / 1024.0;

/// The anchors, sorted by cell.
#[derive(Debug)]
pub struct Neighbourhood {
    chord_square: f64,
    cell_side: f64,
    cells_per_axis: usize,
    /// Cell of each anchor, ascending.
    keys: Vec<usize>,
    /// Anchors in the order of `keys`.
    anchors: Vec<usize>,
    /// Unit vectors of the anchors in the order of `keys`.
    vectors: Vec<[f64; 3]>,
}

impl Neighbourhood {
    /// Prepares neighbourhoods of this radius around each of `points`.
    pub fn new(points: &[UnitVector], radius_km: f64) -> Result<Self, ShddError> {
        if !(radius_km > 0.0 && radius_km.is_finite()) {
            let text = format!("decoder: radius of the neighbourhood is {radius_km} km, wanted more than 0 and finite");
            return Err(ShddError::Bad(text));
        }
        let half_angle = (radius_km / EARTH_RADIUS_KM / 2.0).min(std::f64::consts::FRAC_PI_2);
        let chord = 2.0 * half_angle.sin();
        let cell_side = chord.max(CELL_SIDE_MIN);
        let cells_per_axis = (2.0 / cell_side).ceil().max(1.0) as usize;
        let mut found = Self {
            // Slightly larger, so that rounding does not exclude points at exactly the radius.
            chord_square: chord * chord * (1.0 + 4.0 * f64::EPSILON),
            cell_side,
            cells_per_axis,
            keys: Vec::new(),
            anchors: (0..points.len()).collect(),
            vectors: Vec::new(),
        };
        let keys: Vec<usize> = points.iter().map(|point| found.key(found.cell(point.xyz()))).collect();
        found.anchors.sort_by_key(|anchor| (keys[*anchor], *anchor));
        found.keys = found.anchors.iter().map(|anchor| keys[*anchor]).collect();
        found.vectors = found.anchors.iter().map(|anchor| points[*anchor].xyz()).collect();
        Ok(found)
    }

    /// `log Σ exp(score)` around each anchor. Minus infinity if all scores around it are negligible.
    ///
    /// `scores` must have one entry per anchor, none of them NaN.
    pub fn log_sums(&self, scores: &[f32]) -> Vec<f64> {
        assert_eq!(scores.len(), self.anchors.len(), "one score per anchor");
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sums = vec![0.0; scores.len()];
        for (position, anchor) in self.anchors.iter().enumerate() {
            if scores[*anchor] >= largest - NEGLIGIBLE_NATS {
                self.scatter(position, f64::from(scores[*anchor] - largest).exp(), &mut sums);
            }
        }
        let mut log_sums = vec![f64::NEG_INFINITY; scores.len()];
        for (anchor, sum) in self.anchors.iter().zip(sums) {
            log_sums[*anchor] = sum.ln() + f64::from(largest);
        }
        log_sums
    }

    /// Adds `weight` to the sums of all anchors within the radius of the anchor at `position`, including itself.
    fn scatter(&self, position: usize, weight: f64, sums: &mut [f64]) {
        let center = self.vectors[position];
        let [x, y, z] = self.cell(center);
        let around = |cell: usize| cell.saturating_sub(1)..=(cell + 1).min(self.cells_per_axis - 1);
        for x in around(x) {
            for y in around(y) {
                // Cells that differ only in z are adjacent in key order.
                let (low, high) = (self.key([x, y, *around(z).start()]), self.key([x, y, *around(z).end()]));
                let first = self.keys.partition_point(|key| *key < low);
                let count = self.keys[first..].partition_point(|key| *key <= high);
                let near = first..first + count;
                for (sum, vector) in sums[near.clone()].iter_mut().zip(&self.vectors[near]) {
                    if chord_square(center, *vector) <= self.chord_square {
                        *sum += weight;
                    }
                }
            }
        }
    }

    fn cell(&self, vector: [f64; 3]) -> [usize; 3] {
        vector.map(|value| (((value + 1.0) / self.cell_side).max(0.0) as usize).min(self.cells_per_axis - 1))
    }

    fn key(&self, [x, y, z]: [usize; 3]) -> usize {
        (x * self.cells_per_axis + y) * self.cells_per_axis + z
    }
}

fn chord_square(one: [f64; 3], other: [f64; 3]) -> f64 {
    one.iter().zip(other).map(|(a, b)| (a - b) * (a - b)).sum()
}
