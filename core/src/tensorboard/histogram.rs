//! Histograms in the form of TensorBoard's `histograms` plugin: rows of left edge, right edge and count.
//!
//! Source: `tensorboard/plugins/histogram/summary_v2.py`.

/// A histogram: buckets and their counts.
#[derive(Debug, Clone, PartialEq)]
pub struct Histogram {
    rows: Vec<[f64; 3]>,
}

impl Histogram {
    /// A histogram with one bucket for each of `counts`. The buckets have equal width and reach from `lowest` to
    /// `highest`.
    ///
    /// If `lowest` equals `highest`, all buckets have zero width and the last bucket gets the sum of the counts, as in
    /// TensorBoard's plugin when all values are equal. The histogram is empty if there are no counts, if a bound is not
    /// finite, or if `lowest` is above `highest`.
    pub fn even(lowest: f64, highest: f64, counts: &[u64]) -> Self {
        let width = (highest - lowest) / counts.len() as f64;
        if counts.is_empty() || !width.is_finite() || width < 0.0 {
            return Self { rows: Vec::new() };
        }
        let edge = |index: usize| if index == counts.len() { highest } else { lowest + index as f64 * width };
        if width == 0.0 {
            let mut rows = vec![[lowest, lowest, 0.0]; counts.len()];
            rows[counts.len() - 1][2] = counts.iter().sum::<u64>() as f64;
            return Self { rows };
        }
        let row = |(index, count): (usize, &u64)| [edge(index), edge(index + 1), *count as f64];
        Self { rows: counts.iter().enumerate().map(row).collect() }
    }

    /// Left edge, right edge and count of every bucket.
    pub fn rows(&self) -> &[[f64; 3]] {
        &self.rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_touch_and_keep_every_count() {
        let histogram = Histogram::even(-0.1, 0.2, &[1, 0, 5]);
        let rows = histogram.rows();
        assert_eq!((rows[0][0], rows[2][1]), (-0.1, 0.2));
        assert!(rows.windows(2).all(|pair| pair[0][1] == pair[1][0] && pair[0][0] < pair[0][1]));
        assert_eq!(rows.iter().map(|row| row[2]).collect::<Vec<_>>(), [1.0, 0.0, 5.0]);
    }

    #[test]
    fn a_constant_fills_the_last_bucket_and_bad_bounds_give_no_buckets() {
        let constant = Histogram::even(0.5, 0.5, &[3, 4]);
        assert_eq!(constant.rows(), [[0.5, 0.5, 0.0], [0.5, 0.5, 7.0]]);
        for (lowest, highest) in [(f64::NAN, 1.0), (f64::INFINITY, f64::NEG_INFINITY), (1.0, 0.0), (0.0, f64::INFINITY)]
        {
            assert_eq!(Histogram::even(lowest, highest, &[1]).rows(), [[0.0; 3]; 0]);
        }
        assert_eq!(Histogram::even(0.0, 1.0, &[]).rows().len(), 0);
    }
}
