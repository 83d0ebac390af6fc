//! What LocDiff-H and retrieval with consensus know about each gallery point: how much its vote counts under
//! `eval.prior` and under the user's prior, and how far away the nearest training photo is.

use locdiff_core::config::Prior;
use locdiff_core::geo::{Km, SphereIndex};
use locdiff_core::parallel::in_parallel;

/// The density of a gallery is the number of its points within this distance, in the first and in the second round. With
/// `eval.prior = "even"`, votes are divided by it.
const DENSITY_KM: [f64; 2] = [100.0, 25.0];
/// LocDiff's density is smoothed over this many times the distance to the nearest training photo.
const SMOOTHING: f32 = 15.0;
/// The widths over which LocDiff's density can be smoothed, km. The first means that it is not smoothed.
pub(super) const SMOOTHED_KM: [f64; 4] = [0.0, 150.0, 300.0, 600.0];
/// LocDiff does not know a point that is farther than this from every training photo.
const KNOWN_KM: f32 = 2.0;

/// The surroundings of all points of a gallery.
#[derive(Debug, Clone, Default)]
pub struct Surroundings {
    /// Logarithms of the factors that multiply the vote of each point in the two rounds. Empty if all factors are 1.
    log_factors: Vec<[f32; 2]>,
    /// Logarithm of the user's prior at each point. Empty without a prior.
    log_prior: Vec<f32>,
    /// The distance from each point to the nearest training photo. Empty if it is not known.
    training_km: Vec<f32>,
}

impl Surroundings {
    /// Measures the surroundings of the points of `index`. `training_km` holds the distance from each point to the
    /// nearest training photo; `None` if it is not known.
    pub fn new(index: &SphereIndex, prior: Prior, training_km: Option<&[f32]>, threads: usize) -> Self {
        let log_factors = match prior {
            Prior::Training => Vec::new(),
            Prior::Even => in_parallel(threads, index.points(), |point| {
                DENSITY_KM.map(|km| -(index.count_nearer(*point, Km(km)).max(1) as f32).ln())
            }),
        };
        Self { log_factors, log_prior: Vec::new(), training_km: training_km.unwrap_or_default().to_vec() }
    }

    /// Adds the logarithm of the user's prior at each point; none if `log_prior` is empty.
    #[must_use]
    pub fn with_log_prior(self, log_prior: Vec<f32>) -> Self {
        Self { log_prior, ..self }
    }

    pub(super) fn log_factors(&self, point: u32) -> [f64; 2] {
        let factors = self.log_factors.get(point as usize).copied().unwrap_or_default().map(f64::from);
        factors.map(|factor| factor + self.log_prior(point))
    }

    pub(super) fn log_prior(&self, point: u32) -> f64 {
        self.log_prior.get(point as usize).copied().map_or(0.0, f64::from)
    }

    /// The width over which LocDiff's density is smoothed at a point, as an index of `SMOOTHED_KM`.
    pub(super) fn level(&self, point: u32) -> usize {
        let width_km = f64::from(SMOOTHING * self.training_km(point));
        SMOOTHED_KM.iter().rposition(|least| width_km >= *least).unwrap_or(0)
    }

    /// Whether the prior is even and the point is far from every training photo. With the prior `training`, such a point
    /// is not probable.
    pub(super) fn is_probable_but_unknown(&self, point: u32) -> bool {
        !self.log_factors.is_empty() && self.training_km(point) > KNOWN_KM
    }

    fn training_km(&self, point: u32) -> f32 {
        self.training_km.get(point as usize).copied().unwrap_or(0.0)
    }
}
