//! Mean and standard deviation of every dimension of the embeddings, over view 0.
//!
//! Sums are float64, and rows are added in data order, so the result does not depend on how the rows are split into row
//! groups and files.

use half::slice::HalfFloatSliceExt;
pub use locdiff_core::protocol::Statistics;

use super::columns::ELEMENT_BYTES;

/// Running sums for [`Statistics`].
#[derive(Debug, Clone)]
pub struct MomentSums {
    rows: u64,
    sums: Vec<f64>,
    squares: Vec<f64>,
    row: Vec<f32>,
}

impl MomentSums {
    /// Starts with no rows, for embeddings of the given width.
    pub fn new(width: usize) -> Self {
        let (sums, squares) = (vec![0.0; width], vec![0.0; width]);
        Self { rows: 0, sums, squares, row: vec![0.0; width] }
    }

    /// Adds embeddings. `values` holds one embedding after the other.
    pub fn add(&mut self, values: &[half::f16]) {
        for row in values.chunks_exact(self.row.len().max(1)) {
            row.convert_to_f32_slice(&mut self.row);
            self.rows += 1;
            for ((&value, sum), square) in self.row.iter().zip(&mut self.sums).zip(&mut self.squares) {
                let value = f64::from(value);
                *sum += value;
                *square += value * value;
            }
        }
    }

    /// Adds the wanted rows of embeddings that are stored as little-endian float16 numbers.
    pub fn add_bytes(&mut self, embeddings: &[u8], is_wanted: impl Fn(usize) -> bool) {
        let mut halves = vec![half::f16::ZERO; self.row.len()];
        let rows = embeddings.as_chunks::<ELEMENT_BYTES>().0.chunks_exact(halves.len().max(1));
        for (_, row) in rows.enumerate().filter(|(row, _)| is_wanted(*row)) {
            halves.iter_mut().zip(row).for_each(|(value, bytes)| *value = half::f16::from_le_bytes(*bytes));
            self.add(&halves);
        }
    }

    /// Computes the statistics, rounded to nine significant digits: every JSON reader preserves that many.
    pub fn statistics(&self) -> Statistics {
        let count = (self.rows as f64).max(1.0);
        let mean: Vec<f64> = self.sums.iter().map(|sum| sum / count).collect();
        let deviation = |(square, mean): (&f64, &f64)| rounded((square / count - mean * mean).max(0.0).sqrt());
        let standard_deviation = self.squares.iter().zip(&mean).map(deviation).collect();
        Statistics { rows: self.rows, mean: mean.into_iter().map(rounded).collect(), standard_deviation }
    }
}

/// Rounds `value` to nine significant digits.
fn rounded(value: f64) -> f64 {
    digits(value).parse().unwrap_or(value)
}

/// Formats `value` with nine significant digits.
pub(super) fn digits(value: f64) -> String {
    format!("{value:.8e}")
}
