//! Evaluation: tables of the paper, computed; anybody's predictions, scored.
//!
//! - [`perturbation`]: how far noise on a code moves its mode.
//! - [`predictions`]: a file of predictions against the truth.
//! - [`retrieval_data`]: what retrieval needs of shards.

pub mod perturbation;
pub mod predictions;
pub mod retrieval_data;
