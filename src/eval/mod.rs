//! Evaluation: tables of the paper, computed.
//!
//! - [`perturbation`]: how far noise on a code moves its mode.

pub mod perturbation;
