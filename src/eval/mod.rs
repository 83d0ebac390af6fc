//! Evaluation: locates photos with a trained network, and repeats the paper's perturbation experiment. The launcher
//! computes the scores from the answers.
//!
//! In reading order:
//! - [`locate`]: one worker's share of an evaluation, or of a prediction.
//! - [`serve`]: locates single photos as the launcher sends them, with a model that stays loaded.
//! - [`likely`]: sums up the samples of an image.
//! - `rows`: the rows that are sent to the launcher.
//! - `density`: the densities of a row.
//! - `report_photos`: the photos that the report shows one by one.
//! - [`truth`]: reads the true places of the test rows from a file. They override the coordinates in the shards.
//! - [`perturbation`]: adds noise to codes, and measures how far the noise moves the mode of a code's density.
//!
//! Invariant: all answers come from [`crate::infer`] and do not depend on the number of workers.

mod density;
pub mod likely;
pub mod locate;
pub mod perturbation;
mod report_photos;
mod rows;
pub mod serve;
pub mod truth;
