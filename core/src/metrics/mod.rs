//! How good answers are. Pure: numbers in, numbers out.
//!
//! - [`tally`]: sums over answers that add up over ranks.
//! - [`scores`]: shares within distances, median, mean and GeoScore, each with its interval; differences of two predictors.
//! - [`bootstrap`]: where intervals come from.
//! - [`prdc`]: are places where the truth is? Density and coverage.

pub mod bootstrap;
mod error;
pub mod prdc;
pub mod scores;
pub mod tally;

pub use bootstrap::{Bootstrap, Interval};
pub use error::MetricsError;
pub use prdc::{DensityCoverage, NEAREST_K, density_coverage};
pub use scores::{Named, Rating, Scores, Within, compare, rate, score};
pub use tally::{THRESHOLDS_KM, Tally, geo_score};
