//! Bootstrap intervals: each statistic is recomputed on many resamples of the rows, drawn with replacement.
//!
//! For resample r of n rows, the row numbers are elements 0 to n − 1 of sample r of [`Stream::Bootstrap`]. They are a
//! function of (seed, r, n), so the intervals depend only on the seed, the rows and the order of the rows, not on
//! workers or threads. Two predictors on the same rows get the same resamples, which makes their comparison paired.
//!
//! The intervals are percentile intervals: they reach from the 2.5 % to the 97.5 % quantile over the resamples.
//! Quantiles are interpolated as in NumPy. If all rows have the same value, the interval has zero width. Source: Efron
//! and Tibshirani, "An introduction to the bootstrap", 1993, chapter 13.

use super::error::MetricsError;
use crate::random::{Draw, Philox, Stream, check_below};

/// The ends of a 95 % interval are these quantiles over the resamples.
const QUANTILES: [f64; 2] = [0.025, 0.975];

/// Settings of the bootstrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bootstrap {
    /// Seed of the random numbers.
    pub seed: u64,
    /// Number of resamples.
    pub resamples: u32,
}

impl Default for Bootstrap {
    /// 1000 resamples, as is usual in the field.
    fn default() -> Self {
        Self { seed: 0, resamples: 1000 }
    }
}

/// A value and its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// The statistic over the original rows.
    pub value: f64,
    /// The 2.5 % quantile over the resamples.
    pub lo: f64,
    /// The 97.5 % quantile over the resamples.
    pub hi: f64,
}

impl Bootstrap {
    /// Computes the intervals of `values`, which are statistics of `rows` rows. For each resample, `statistics` gets
    /// the number of times that each row was drawn, and writes the statistics of the resample to its second argument.
    pub(super) fn intervals(
        &self,
        rows: usize,
        values: &[f64],
        mut statistics: impl FnMut(&[u32], &mut [f64]),
    ) -> Result<Vec<Interval>, MetricsError> {
        check_below("bootstrap rows", rows as u64, 1 << 32)?;
        let bound = rows as u32;
        let philox = Philox::new(self.seed);
        let (mut drawn, mut counts) = (vec![0_i64; rows], vec![0_u32; rows]);
        let mut found = vec![vec![0.0; self.resamples as usize]; values.len()];
        let mut one = vec![0.0; values.len()];
        for resample in 0..self.resamples as usize {
            let draw = Draw { stream: Stream::Bootstrap, step: 0, first_sample: resample as u64, elements: rows };
            philox.fill_int(draw, bound, &mut drawn)?;
            counts.fill(0);
            drawn.iter().for_each(|row| counts[*row as usize] += 1);
            statistics(&counts, &mut one);
            found.iter_mut().zip(&one).for_each(|(all, value)| all[resample] = *value);
        }
        let interval = |(value, all): (&f64, &mut Vec<f64>)| {
            all.sort_unstable_by(f64::total_cmp);
            let [lo, hi] = QUANTILES.map(|quantile| quantile_of(all, quantile).unwrap_or(*value));
            Interval { value: *value, lo, hi }
        };
        Ok(values.iter().zip(&mut found).map(interval).collect())
    }
}

/// A quantile of sorted numbers, interpolated linearly. `None` if there are no numbers.
fn quantile_of(sorted: &[f64], quantile: f64) -> Option<f64> {
    let position = quantile * sorted.len().checked_sub(1)? as f64;
    let (below, part) = (position.floor() as usize, position.fract());
    let above = (below + 1).min(sorted.len() - 1);
    Some(sorted[below] + part * (sorted[above] - sorted[below]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_interpolated() {
        assert_eq!(quantile_of(&[], 0.5), None);
        assert_eq!(quantile_of(&[7.0], 0.975), Some(7.0));
        assert_eq!(quantile_of(&[1.0, 2.0, 4.0], 0.75), Some(3.0));
    }

    #[test]
    fn each_resample_draws_as_many_rows_as_the_data_has() {
        let mut seen = Vec::new();
        let options = Bootstrap { seed: 5, resamples: 20 };
        options.intervals(33, &[0.0], |counts, _| seen.push(counts.to_vec())).expect("the number of rows is in range");
        assert!(seen.len() == 20 && seen.iter().all(|counts| counts.iter().sum::<u32>() == 33));
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 20, "some resamples are equal");
    }
}
