//! Metrics of predictions. All functions are pure.
//!
//! - [`tally`]: counts and sums that can be added over ranks.
//! - [`scores`]: accuracy within distances, median error, mean error and GeoScore, each with a confidence interval, for
//!   one predictor or for the difference between two.
//! - [`bootstrap`]: the confidence intervals.
//! - [`places`]: which rows share a place.
//! - [`by_distance`]: accuracy over the distance to the nearest training photo.
//! - [`calibrated`]: how often radii hold the true place, and how likely the true places are.
//! - [`overlap`]: how many test places lie near training places or gallery points.
//! - [`prdc`]: density and coverage, which compare the distributions of predicted and true places.

pub mod bootstrap;
pub mod by_distance;
pub mod calibrated;
mod error;
pub mod overlap;
pub mod places;
pub mod prdc;
pub mod scores;
pub mod tally;

pub use bootstrap::{Bootstrap, Interval};
pub use by_distance::{ByDistance, DistanceBin, DistanceCurve};
pub use calibrated::{CalibrationCheck, CheckedPhoto, RadiusGroup, RadiusShare, even_nll};
pub use error::MetricsError;
pub use overlap::{Overlap, Overlaps};
pub use places::PlaceGroups;
pub use prdc::{DensityCoverage, NEAREST_K, density_coverage};
pub use scores::{NamedIntervals, Rating, Scores, Within, compare, rate, score};
pub use tally::{THRESHOLDS_KM, Tally, geo_score};
