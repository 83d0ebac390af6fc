//! Checks a calibration on other photos: how often the radii hold the true place, among all photos and among photos with
//! similar radii, and how likely the true places are under the densities.

use serde::Serialize;

use super::bootstrap::{Bootstrap, Interval};
use super::error::MetricsError;
use super::places::PlaceGroups;
use crate::calibration::LEVELS;
use crate::geo::EARTH_RADIUS_KM;

/// Number of groups of photos with similar radii.
const GROUPS: usize = 5;

/// A photo with its radii, its error and its likelihood.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CheckedPhoto {
    /// The 50 % and the 90 % radius, km.
    pub radii_km: [f64; 2],
    /// Distance from the answer to the true place, km.
    pub error_km: f64,
    /// Negative logarithm of the density at the true place, per km²; `None` without a density.
    pub nll: Option<f64>,
}

/// How many photos have their true place within a radius. All values are shares between 0 and 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RadiusShare {
    /// The probability that the radius promises.
    pub level: f64,
    /// The share of photos whose true place is within the radius, with its 95 % interval.
    pub share: f64,
    /// Lower end of the interval.
    pub lo: f64,
    /// Upper end of the interval.
    pub hi: f64,
}

/// Photos with similar radii.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RadiusGroup {
    /// Number of photos.
    pub photos: usize,
    /// Smallest 90 % radius of the group, km.
    pub from_radius_90_km: f64,
    /// Largest 90 % radius of the group, km.
    pub to_radius_90_km: f64,
    /// The shares for the 50 % and the 90 % radius.
    pub rows: Vec<RadiusShare>,
}

/// How well a calibration holds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CalibrationCheck {
    /// The shares among all photos, for the 50 % and the 90 % radius.
    pub rows: Vec<RadiusShare>,
    /// The photos in groups of equal size, by ascending 90 % radius.
    pub fifths: Vec<RadiusGroup>,
    /// Median 90 % radius, km.
    pub median_radius_90_km: f64,
    /// The one radius around all answers that holds 90 % of the true places, km.
    pub constant_radius_90_km: f64,
    /// Mean negative log-likelihood of the true places, per km²; `None` without densities.
    #[serde(skip)]
    pub nll: Option<Interval>,
}

/// The negative log-likelihood of any place under an even density over the Earth, per km².
pub fn even_nll() -> f64 {
    (4.0 * std::f64::consts::PI * EARTH_RADIUS_KM * EARTH_RADIUS_KM).ln()
}

impl CalibrationCheck {
    /// Checks the photos, which are the rows of `groups`. `None` if there are fewer than five photos.
    pub fn new(
        photos: &[CheckedPhoto],
        groups: &PlaceGroups,
        bootstrap: &Bootstrap,
    ) -> Result<Option<Self>, MetricsError> {
        if photos.len() < GROUPS {
            return Ok(None);
        }
        let group_of = by_radius(photos);
        let mut values = vec![0.0; STATISTICS];
        statistics(photos, &group_of, &vec![1; photos.len()], &mut values);
        let found = bootstrap.intervals(groups, &values, |counts, out| statistics(photos, &group_of, counts, out))?;
        let shares = |group: usize| {
            let share = |(at, level): (usize, f64)| {
                let Interval { value, lo, hi } = found[2 * group + at];
                RadiusShare { level, share: value, lo, hi }
            };
            LEVELS.into_iter().enumerate().map(share).collect::<Vec<RadiusShare>>()
        };
        let fifth = |group: usize| {
            let own = || photos.iter().zip(&group_of).filter(|(_, own)| **own == group);
            let radii = own().map(|(photo, _)| photo.radii_km[1]);
            RadiusGroup {
                photos: own().count(),
                from_radius_90_km: radii.clone().fold(f64::INFINITY, f64::min),
                to_radius_90_km: radii.fold(0.0, f64::max),
                rows: shares(group),
            }
        };
        let quantile = |value: fn(&CheckedPhoto) -> f64, level: f64| {
            let mut values: Vec<f64> = photos.iter().map(value).collect();
            values.sort_by(f64::total_cmp);
            values[((values.len() as f64 * level) as usize).min(values.len() - 1)]
        };
        Ok(Some(Self {
            rows: shares(GROUPS),
            fifths: (0..GROUPS).map(fifth).collect(),
            median_radius_90_km: quantile(|photo| photo.radii_km[1], 0.5),
            constant_radius_90_km: quantile(|photo| photo.error_km, LEVELS[1]),
            nll: photos.iter().all(|photo| photo.nll.is_some()).then_some(found[STATISTICS - 1]),
        }))
    }
}

/// The group of each photo, by ascending 90 % radius.
fn by_radius(photos: &[CheckedPhoto]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..photos.len()).collect();
    order.sort_by(|one, other| photos[*one].radii_km[1].total_cmp(&photos[*other].radii_km[1]));
    let mut groups = vec![0; photos.len()];
    order.iter().enumerate().for_each(|(rank, photo)| groups[*photo] = rank * GROUPS / photos.len());
    groups
}

/// The two shares of each group, the two shares of all photos, and the mean negative log-likelihood.
const STATISTICS: usize = 2 * (GROUPS + 1) + 1;

/// Computes the statistics of photos that count as often as `counts` says.
fn statistics(photos: &[CheckedPhoto], group_of: &[usize], counts: &[u32], out: &mut [f64]) {
    let (mut inside, mut total, mut nll) = ([[0.0; 2]; GROUPS + 1], [0.0; GROUPS + 1], 0.0);
    for ((photo, group), count) in photos.iter().zip(group_of).zip(counts) {
        let count = f64::from(*count);
        for at in [*group, GROUPS] {
            total[at] += count;
            let held = photo.radii_km.map(|radius_km| f64::from(u8::from(photo.error_km <= radius_km)));
            (0..2).for_each(|level| inside[at][level] += count * held[level]);
        }
        nll += count * photo.nll.unwrap_or_default();
    }
    let shares = inside.iter().zip(total).flat_map(|(inside, total)| inside.map(|inside| inside / total.max(1.0)));
    let values = shares.chain([nll / total[GROUPS].max(1.0)]);
    out.iter_mut().zip(values).for_each(|(out, value)| *out = value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geo::fibonacci_grid;

    /// Photo k has the 90 % radius k km and the 50 % radius k / 2 km. In each ten photos, four have an error of k / 4,
    /// four of 3 k / 4, and two of 2 k km.
    fn photos(count: usize) -> Vec<CheckedPhoto> {
        let photo = |at: usize| {
            let radius_km = 1.0 + at as f64;
            let part = [0.25, 0.25, 0.25, 0.25, 0.75, 0.75, 0.75, 0.75, 2.0, 2.0][at % 10];
            CheckedPhoto { radii_km: [radius_km / 2.0, radius_km], error_km: part * radius_km, nll: Some(part) }
        };
        (0..count).map(photo).collect()
    }

    fn check(photos: &[CheckedPhoto]) -> Option<CalibrationCheck> {
        let groups = PlaceGroups::of(&fibonacci_grid(photos.len()));
        CalibrationCheck::new(photos, &groups, &Bootstrap { seed: 1, resamples: 200 }).expect("the photos are finite")
    }

    #[test]
    fn shares_of_all_photos_and_of_each_fifth_have_intervals() {
        let mut shuffled = photos(1000);
        shuffled.reverse();
        let found = check(&shuffled).expect("there are enough photos");
        assert_eq!(found.rows.iter().map(|row| row.share).collect::<Vec<f64>>(), [0.4, 0.8]);
        assert!(found.rows.iter().all(|row| row.lo < row.share && row.share < row.hi && row.hi - row.lo < 0.1));
        assert_eq!(found.fifths.len(), 5);
        for (fifth, from) in found.fifths.iter().zip([1.0, 201.0, 401.0, 601.0, 801.0]) {
            assert_eq!((fifth.photos, fifth.from_radius_90_km, fifth.to_radius_90_km), (200, from, from + 199.0));
            assert_eq!(fifth.rows.iter().map(|row| row.share).collect::<Vec<f64>>(), [0.4, 0.8]);
        }
        assert_eq!(found.median_radius_90_km, 501.0);
        let within = shuffled.iter().filter(|photo| photo.error_km <= found.constant_radius_90_km).count();
        assert!((900..=901).contains(&within), "{within}");
        let nll = found.nll.expect("all photos have a likelihood");
        assert!((nll.value - 0.8).abs() < 1e-12 && nll.lo < 0.8 && nll.hi > 0.8);
        assert!((even_nll() - 20.05).abs() < 0.01);
    }

    #[test]
    fn few_photos_have_no_check_and_one_photo_without_a_density_leaves_no_likelihood() {
        assert_eq!(check(&photos(4)), None);
        let mut some = photos(10);
        some[3].nll = None;
        assert_eq!(check(&some).expect("there are enough photos").nll, None);
    }
}
