//! Evaluation: how good a trained network is, and tables of the paper, computed.
//!
//! In reading order:
//! - [`locate`]: one worker's share of an evaluation.
//! - [`rows`]: the data in blocks whose bits do not depend on who computes them.
//! - [`trained`]: the network of a checkpoint.
//! - [`engine`]: from embeddings to places.
//! - [`retrieve`]: retrieval and LocDiff-H beside it; [`retrieval_data`]: what they need of shards.
//! - [`perturbation`]: how far noise on a code moves its mode.
//!
//! Invariant: the answer for a row is a function of checkpoint, configuration, seed, the row and the fixed block that it lies
//! in; the number of workers has no part in it.

pub mod engine;
mod error;
pub mod locate;
pub mod perturbation;
pub mod retrieval_data;
pub mod retrieve;
pub mod rows;
pub mod trained;

pub use error::EvalError;
