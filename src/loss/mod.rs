//! What training minimises: a divergence between distributions over anchors on the sphere, and distances between codes.
//!
//! In reading order:
//! - [`Loss`]: the weighted sum of the configuration, and [`Losses`], its parts.
//! - `kl`: the divergence over anchors, whole or with each rank holding a share of the anchors.
//!
//! Pure: no I/O, no random numbers; the caller draws the anchors anew for every mini-batch and passes their harmonics.

mod error;
mod kl;
mod weighted;

pub use crate::shdd::CODE_SCALE;
pub use error::LossError;
pub use weighted::{Inputs, Loss, Losses};
