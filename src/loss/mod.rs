//! The training loss: the weighted sum of a KL divergence and several distances between codes. The KL divergence
//! compares two distributions over anchors on the sphere.
//!
//! In reading order:
//! - [`Loss`]: computes the weighted sum of the loss terms. The weights come from the configuration. [`Losses`] holds
//!   the sum and the terms.
//! - `kl`: computes the KL divergence over anchors, which may be split over ranks.
//!
//! This module draws no random numbers: the caller draws new anchors for every mini-batch and passes their harmonics.
//! If the anchors are split over ranks, the ranks exchange values through [`crate::comm`].

mod error;
mod kl;
mod weighted;

pub use crate::shdd::CODE_SCALE;
pub use error::LossError;
pub use weighted::{Inputs, Loss, Losses, largest_finite, not_finite};
