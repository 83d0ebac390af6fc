//! Evaluation: how good a trained network is, and tables of the paper, computed.
//!
//! In reading order:
//! - [`locate`]: one worker's share of an evaluation.
//! - [`truth`]: where rows really are, where a file knows better than the shards.
//! - [`perturbation`]: how far noise on a code moves its mode.
//!
//! Invariant: a worker's answers are those of [`crate::infer`], whatever the number of workers.

pub mod locate;
pub mod perturbation;
pub mod truth;
