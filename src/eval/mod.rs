//! Evaluation: how good a model is, and tables of the paper, computed.
//!
//! - [`quick`]: the validation rows, while training.
//! - [`perturbation`]: how far noise on a code moves its mode.

pub mod perturbation;
pub mod quick;
