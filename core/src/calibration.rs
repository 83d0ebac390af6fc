//! Radii around answers that hold the truth with a known probability.
//!
//! The samples of an image are spread around its answer, and a larger spread means a larger error. How much larger is
//! measured on validation photos: they are sorted by spread and cut into groups of equal size, and the 50 % and 90 %
//! quantiles of the errors of a group are the radii for its spread. Between groups, radii are interpolated.
//!
//! The temperature of densities is measured on the same photos: it is the one with the largest likelihood.

use serde::{Deserialize, Serialize};

/// Validation photos per group, at least. With 100 photos, the share within the 90 % radius is known to 3 points.
const GROUP_PHOTOS_MIN: usize = 100;
/// Most groups.
const GROUPS_MAX: usize = 40;
/// The probabilities of the radii.
pub const LEVELS: [f64; 2] = [0.5, 0.9];

/// The temperature of the densities in the report of a run without a calibration. Trained runs have been calibrated to
/// similar temperatures, for example the demo to 0.05.
pub const DEFAULT_TEMPERATURE: f64 = 0.1;

/// The spread and the error of one validation photo, km.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SpreadError {
    /// Mean distance from the samples to the answer.
    pub spread_km: f64,
    /// Distance from the answer to the true place.
    pub error_km: f64,
}

/// The radii of one group of validation photos.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Knot {
    /// Median spread of the group, km.
    pub spread_km: f64,
    /// Radius that holds the truth with 50 % probability, km.
    pub radius_50_km: f64,
    /// Radius that holds the truth with 90 % probability, km.
    pub radius_90_km: f64,
}

/// Turns spreads into radii.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// One entry per group, with ascending spreads. Neither radius decreases.
    knots: Vec<Knot>,
}

impl Calibration {
    /// Measures the radii on validation photos. `None` if there are fewer than 100 of them.
    pub fn fit(photos: &[SpreadError]) -> Option<Self> {
        let groups = (photos.len() / GROUP_PHOTOS_MIN).min(GROUPS_MAX);
        let mut sorted = photos.to_vec();
        sorted.sort_by(|one, other| one.spread_km.total_cmp(&other.spread_km));
        let bounds: Vec<usize> = (0..=groups).map(|group| group * sorted.len() / groups.max(1)).collect();
        let of_group = |bounds: &[usize]| {
            let group = &sorted[bounds[0]..bounds[1]];
            let mut errors: Vec<f64> = group.iter().map(|photo| photo.error_km).collect();
            errors.sort_by(f64::total_cmp);
            let [radius_50_km, radius_90_km] = LEVELS.map(|level| quantile(&errors, level));
            Knot { spread_km: group[group.len() / 2].spread_km, radius_50_km, radius_90_km }
        };
        let mut knots: Vec<Knot> = bounds.windows(2).map(of_group).collect();
        let radii: [fn(&mut Knot) -> &mut f64; 2] = [|knot| &mut knot.radius_50_km, |knot| &mut knot.radius_90_km];
        for radius in radii {
            let values: Vec<f64> = knots.iter_mut().map(|knot| *radius(knot)).collect();
            knots.iter_mut().zip(ascending(&values)).for_each(|(knot, value)| *radius(knot) = value);
        }
        (groups > 0).then_some(Self { knots })
    }

    /// The radii for a spread: 50 % and 90 %, km.
    pub fn radii_km(&self, spread_km: f64) -> [f64; 2] {
        let place = self.knots.partition_point(|knot| knot.spread_km < spread_km);
        let (below, above) = (place.saturating_sub(1), place.min(self.knots.len().saturating_sub(1)));
        let (Some(below), Some(above)) = (self.knots.get(below), self.knots.get(above)) else { return [f64::NAN; 2] };
        let [low, high, at] = [below.spread_km, above.spread_km, spread_km].map(f64::ln_1p);
        let share = if high > low { ((at - low) / (high - low)).clamp(0.0, 1.0) } else { 0.0 };
        let between = |low: f64, high: f64| {
            let [low, high] = [low, high].map(f64::ln_1p);
            (low + share * (high - low)).exp_m1()
        };
        [between(below.radius_50_km, above.radius_50_km), between(below.radius_90_km, above.radius_90_km)]
    }
}

/// The temperatures among which one is chosen, in descending order, each 2^(-1/4) times the one before: 2 to 1/128. At
/// 1, the logarithm of a clean code's density is 1 at its peak; at 1/128, it is 128.
pub fn temperatures() -> Vec<f64> {
    (-4..=28).map(|step| (-f64::from(step) / 4.0).exp2()).collect()
}

/// The temperature at which the true places of the validation photos are most likely.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FittedTemperature {
    /// The temperature.
    pub temperature: f64,
    /// Mean negative log-likelihood of the true places at this temperature, per km².
    pub nll: f64,
    /// Each temperature that was tried, with its mean negative log-likelihood.
    pub tried: Vec<[f64; 2]>,
}

impl FittedTemperature {
    /// Chooses one of [`temperatures`]. Each entry of `photos` has the logarithm of the density at the true place of a
    /// photo for each temperature. `None` if there are no photos, or if a photo has no densities.
    pub fn fit(photos: &[Vec<f64>]) -> Option<Self> {
        let temperatures = temperatures();
        if photos.is_empty() || photos.iter().any(|photo| photo.len() != temperatures.len()) {
            return None;
        }
        let mean = |at: usize| -photos.iter().map(|photo| photo[at]).sum::<f64>() / photos.len() as f64;
        let tried: Vec<[f64; 2]> =
            temperatures.iter().enumerate().map(|(at, temperature)| [*temperature, mean(at)]).collect();
        let [temperature, nll] = tried.iter().copied().min_by(|one, other| one[1].total_cmp(&other[1]))?;
        Some(Self { temperature, nll, tried })
    }
}

/// The smallest error that at least `level` of all photos do not exceed, with one photo more than were seen. `sorted`
/// must be ascending and not empty.
fn quantile(sorted: &[f64], level: f64) -> f64 {
    let rank = ((sorted.len() + 1) as f64 * level).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

/// The ascending sequence that is nearest to `values` (pool adjacent violators).
fn ascending(values: &[f64]) -> Vec<f64> {
    let mut pools: Vec<(f64, usize)> = Vec::new();
    for value in values {
        let mut pool = (*value, 1);
        while let Some((mean, count)) = pools.pop_if(|(mean, _)| *mean > pool.0) {
            let total = count + pool.1;
            pool = ((mean * count as f64 + pool.0 * pool.1 as f64) / total as f64, total);
        }
        pools.push(pool);
    }
    pools.into_iter().flat_map(|(mean, count)| std::iter::repeat_n(mean, count)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Draw, Philox, Stream};

    /// Photos whose errors are exponentially distributed around half of their spread.
    fn photos(seed: u64, count: usize) -> Vec<SpreadError> {
        let mut numbers = vec![0.0_f32; 2 * count];
        let draw = Draw { stream: Stream::Test(1), step: 0, first_sample: 0, elements: 2 };
        Philox::new(seed).fill_uniform(draw, &mut numbers).expect("the draw is in range");
        let photo = |pair: &[f32]| {
            let spread_km = 10.0_f64.powf(4.0 * f64::from(pair[0]));
            SpreadError { spread_km, error_km: -0.5 * spread_km * (1.0 - f64::from(pair[1])).ln() }
        };
        numbers.chunks_exact(2).map(photo).collect()
    }

    #[test]
    fn radii_hold_the_promised_shares_of_other_photos_at_every_spread() {
        let fitted = Calibration::fit(&photos(1, 8000)).expect("there are enough photos");
        let mut tested = photos(2, 20_000);
        tested.sort_by(|one, other| one.spread_km.total_cmp(&other.spread_km));
        for fifth in tested.chunks(4000) {
            for (level, wanted) in LEVELS.into_iter().enumerate() {
                let is_inside = |photo: &&SpreadError| photo.error_km <= fitted.radii_km(photo.spread_km)[level];
                let share = fifth.iter().filter(is_inside).count() as f64 / 4000.0;
                assert!((share - wanted).abs() < 0.03, "{share} of {wanted}");
            }
        }
    }

    #[test]
    fn radii_ascend_and_are_constant_beyond_the_last_group() {
        let fitted = Calibration::fit(&photos(3, 1000)).expect("there are enough photos");
        let radii: Vec<[f64; 2]> = (0..60).map(|step| fitted.radii_km(1.2_f64.powi(step))).collect();
        assert!(radii.windows(2).all(|pair| pair[0][0] <= pair[1][0] && pair[0][1] <= pair[1][1]));
        assert!(radii.iter().all(|[half, most]| half <= most));
        assert_eq!(fitted.radii_km(1e9), fitted.radii_km(2e9));
        assert_eq!(fitted.radii_km(0.0), fitted.radii_km(1e-9));
    }

    #[test]
    fn temperature_with_the_largest_likelihood_is_chosen() {
        // The best temperature of photo k is rung 8 + k of the ladder. The mean is largest at the middle photo.
        let photo = |best: usize| (0..33).map(|at| -((at as f64 - (8 + best) as f64).powi(2))).collect::<Vec<f64>>();
        let fitted = FittedTemperature::fit(&[photo(0), photo(2), photo(4)]).expect("there are photos");
        assert_eq!((fitted.temperature, fitted.tried.len()), (temperatures()[10], 33));
        assert!(fitted.tried.iter().all(|[_, nll]| *nll >= fitted.nll));
        assert_eq!(FittedTemperature::fit(&[]), None);
        assert_eq!(FittedTemperature::fit(&[photo(0), Vec::new()]), None);
        let ends = [temperatures()[0], temperatures()[32]];
        assert_eq!(ends, [2.0, 1.0 / 128.0]);
    }

    #[test]
    fn few_photos_are_not_enough() {
        assert_eq!(Calibration::fit(&photos(1, 99)), None);
        let one = Calibration::fit(&photos(1, 100)).expect("100 photos are enough");
        assert_eq!(one.radii_km(1.0), one.radii_km(5000.0));
    }

    #[test]
    fn violators_are_pooled() {
        assert_eq!(ascending(&[1.0, 3.0, 2.0, 5.0, 4.0, 0.0]), [1.0, 2.5, 2.5, 3.0, 3.0, 3.0]);
    }
}
