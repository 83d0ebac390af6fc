//! Bootstrap intervals: each statistic is recomputed on many resamples of the places, drawn with replacement.
//!
//! A resample takes all rows of each place that it draws (a cluster bootstrap). The number of rows therefore differs
//! between resamples, unless every place has the same number of rows. If every place has one row, this is the ordinary
//! bootstrap over rows.
//!
//! For resample r of n places, the place numbers are elements 0 to n − 1 of sample r of [`Stream::Bootstrap`]. They are
//! a function of (seed, r, n), so the intervals depend only on the seed, the rows and the order of the rows, not on
//! workers or threads. Two predictors on the same rows get the same resamples, which makes their comparison paired.
//!
//! The intervals are percentile intervals: they reach from the 2.5 % to the 97.5 % quantile over the resamples.
//! Quantiles are interpolated as in NumPy. If all rows have the same value, the interval has zero width. Sources: Efron
//! and Tibshirani, "An introduction to the bootstrap", 1993, chapter 13; Davison and Hinkley, "Bootstrap methods and
//! their application", 1997, section 3.8 (clusters).

use super::error::MetricsError;
use super::places::PlaceGroups;
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
    /// Computes the intervals of `values`, which are statistics of the rows of `groups`. For each resample,
    /// `statistics` gets the number of times that each row was drawn, and writes the statistics of the resample to its
    /// second argument.
    pub(super) fn intervals(
        &self,
        groups: &PlaceGroups,
        values: &[f64],
        mut statistics: impl FnMut(&[u32], &mut [f64]),
    ) -> Result<Vec<Interval>, MetricsError> {
        let places = groups.count();
        check_below("bootstrap places", places as u64, 1 << 32)?;
        let bound = places as u32;
        let philox = Philox::new(self.seed);
        let (mut drawn, mut of_place) = (vec![0_i64; places], vec![0_u32; places]);
        let mut counts = vec![0_u32; groups.of_row().len()];
        let mut found = vec![vec![0.0; self.resamples as usize]; values.len()];
        let mut one = vec![0.0; values.len()];
        for resample in 0..self.resamples as usize {
            let draw = Draw { stream: Stream::Bootstrap, step: 0, first_sample: resample as u64, elements: places };
            philox.fill_int(draw, bound, &mut drawn)?;
            of_place.fill(0);
            drawn.iter().for_each(|place| of_place[*place as usize] += 1);
            counts.iter_mut().zip(groups.of_row()).for_each(|(count, place)| *count = of_place[*place as usize]);
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
    use crate::geo::{UnitVector, fibonacci_grid};

    #[test]
    fn quantiles_are_interpolated() {
        assert_eq!(quantile_of(&[], 0.5), None);
        assert_eq!(quantile_of(&[7.0], 0.975), Some(7.0));
        assert_eq!(quantile_of(&[1.0, 2.0, 4.0], 0.75), Some(3.0));
    }

    #[test]
    fn each_resample_draws_whole_places_as_many_as_the_data_has() {
        let places = fibonacci_grid(33);
        // The last 30 rows repeat the first 10 places.
        let truth: Vec<UnitVector> = places.iter().chain(places[..10].iter().cycle().take(30)).copied().collect();
        let groups = PlaceGroups::of(&truth);
        let mut seen = Vec::new();
        let options = Bootstrap { seed: 5, resamples: 20 };
        options.intervals(&groups, &[0.0], |counts, _| seen.push(counts.to_vec())).expect("the numbers are in range");
        assert_eq!((seen.len(), groups.count()), (20, 33));
        for counts in &seen {
            assert_eq!(counts[..33].iter().sum::<u32>(), 33, "a resample has another number of places than the data");
            assert!((33..63).all(|row| counts[row] == counts[(row - 33) % 10]), "a place was drawn only in part");
        }
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 20, "some resamples are equal");
    }
}
