//! Evaluation: how good a trained network is, and tables of the paper, computed.
//!
//! In reading order:
//! - [`locate`]: one worker's share of an evaluation.
//! - [`truth`]: where rows really are, where a file knows better than the shards.
//! - [`score`]: from answers to metrics, once the launcher has gathered them.
//! - [`choose`]: which settings of LocDiff-H are best.
//! - [`predictions`]: anybody's predictions against the truth.
//! - [`perturbation`]: how far noise on a code moves its mode.
//!
//! Invariant: a worker's answers are those of [`crate::infer`], whatever the number of workers.

pub mod choose;
mod error;
pub mod locate;
pub mod perturbation;
pub mod predictions;
pub mod score;
pub mod truth;

pub use error::EvalError;
