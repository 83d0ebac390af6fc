//! Evaluation: measures a trained network and computes tables of the paper.
//!
//! In reading order:
//! - [`locate`]: one worker's share of an evaluation.
//! - [`truth`]: true places of the rows from a file that overrides the shards.
//! - [`perturbation`]: how far noise on a code moves the mode of its density.
//!
//! Invariant: answers come from [`crate::infer`] and do not depend on the number of workers.

pub mod locate;
pub mod perturbation;
pub mod truth;
