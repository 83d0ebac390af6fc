//! Neighbourhood sums in log space: the score of an anchor is replaced by `log Σ exp(score)` over all anchors within a
//! given radius of that anchor.
//!
//! Raw scores reach 183 at L = 47 and grow with (L+1)², so only differences from the largest score are exponentiated.
//! Scores that are more than [`NEGLIGIBLE_NATS`] below the largest score are skipped. Even a million skipped scores
//! would change the largest sum by less than a factor of 1 + 1e-7.
//!
//! A cubic grid divides the space around the sphere into cells, and anchors are sorted by cell. The side of a cell is
//! at least the chord of the radius, so all neighbours of an anchor lie in its own cell and the 26 adjacent cells. The
//! date line and the poles need no special treatment.
//!
//! Source: the decoder of the paper. The computation in log space is not from the paper.

use locdiff_core::geo::{EARTH_RADIUS_KM, UnitVector};

use crate::shdd::ShddError;

/// Scores that are further than this below the largest score are skipped. The weight of a skipped score is less than
/// e⁻³² = 1.3e-14 of the largest weight.
pub const NEGLIGIBLE_NATS: f32 = 32.0;
/// Smallest side of a cell. It limits the keys of cells to 30 bits even if the radius is tiny.
const CELL_SIDE_MIN: f64 = 2.0 / 1024.0;

/// The anchors, sorted by cell.
#[derive(Debug)]
pub struct Neighbourhood {
    chord_square: f64,
    cell_side: f64,
    cells_per_axis: usize,
    /// The keys of the anchors' cells, in ascending order.
    keys: Vec<usize>,
    /// The indices of the anchors, in the order of `keys`.
    anchors: Vec<usize>,
    /// The unit vectors of the anchors, in the order of `keys`.
    vectors: Vec<[f64; 3]>,
}

impl Neighbourhood {
    /// Prepares neighbourhoods of radius `radius_km` around each of `points`.
    pub fn new(points: &[UnitVector], radius_km: f64) -> Result<Self, ShddError> {
        if !(radius_km > 0.0 && radius_km.is_finite()) {
            let text =
                format!("decoder: radius of the neighbourhood is {radius_km} km, wanted a finite number above 0");
            return Err(ShddError::Bad(text));
        }
        let half_angle = (radius_km / EARTH_RADIUS_KM / 2.0).min(std::f64::consts::FRAC_PI_2);
        let chord = 2.0 * half_angle.sin();
        let cell_side = chord.max(CELL_SIDE_MIN);
        let cells_per_axis = (2.0 / cell_side).ceil().max(1.0) as usize;
        let mut found = Self {
            // Slightly larger than the squared chord, so that rounding does not exclude points at exactly the radius.
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

    /// `log Σ exp(score)` over the neighbourhood of each anchor. Minus infinity if all scores in the neighbourhood are
    /// negligible.
    ///
    /// `scores` must hold one score per anchor, and no score may be NaN.
    pub fn log_sums(&self, scores: &[f32]) -> Vec<f64> {
        assert_eq!(scores.len(), self.anchors.len(), "the number of scores is not the number of anchors");
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

    /// Adds `weight` to the sums of all anchors within the radius of the anchor at `position`, including that anchor.
    fn scatter(&self, position: usize, weight: f64, sums: &mut [f64]) {
        let center = self.vectors[position];
        let [x, y, z] = self.cell(center);
        let around = |cell: usize| cell.saturating_sub(1)..=(cell + 1).min(self.cells_per_axis - 1);
        for x in around(x) {
            for y in around(y) {
                // The keys of cells that differ only in z are adjacent, so one range of keys covers them.
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
