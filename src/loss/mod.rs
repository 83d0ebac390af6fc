//! The training loss: a KL divergence between distributions over anchors on the sphere, plus distances between codes.
//!
//! In reading order:
//! - [`Loss`]: the weighted sum that the configuration describes. [`Losses`] holds its terms.
//! - `kl`: the divergence over anchors, all on one rank or split over ranks.
//!
//! Pure: no I/O, no random numbers. The caller draws new anchors for every mini-batch and passes their harmonics.

mod error;
mod kl;
mod weighted;

pub use crate::shdd::CODE_SCALE;
pub use error::LossError;
pub use weighted::{Inputs, Loss, Losses};
