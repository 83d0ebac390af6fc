//! The network: a U-Net of six C-Siren modules that predicts a clean code from a noised code, an image and a timestep.
//!
//! In reading order:
//! - [`Architecture`]: the widths of the layers. They determine the name, shape, split and initial values of every
//!   parameter.
//! - [`Parameters`]: the weights as a flat, ordered list. The list holds this rank's part of each weight.
//! - [`Standardisation`]: the mean and the standard deviation of the embeddings.
//! - [`CsUnet`]: the network. The terms that depend only on the timestep or only on the image are separate values
//!   ([`TimeTable`], [`Conditioned`]), so that a sampling chain computes them only once.
//! - [`Collapsed`]: the network at the timesteps of a sampler, with one matrix product per module.
//!
//! This module neither reads files nor uses a global random generator. If the network is split over ranks, it
//! communicates through [`crate::comm`]. The parameters have the names and shapes of the PyTorch reference
//! implementation (`tests/golden/make_reference.py`).

mod architecture;
mod c_siren;
mod collapsed;
mod compute;
mod cs_unet;
mod error;
mod flops;
mod gather;
mod parameters;
mod split;
mod standardisation;

pub use architecture::{Architecture, ModuleShape};
pub(crate) use architecture::{Init, Spec, linear_layer};
pub use c_siren::DropoutDraws;
pub use collapsed::{Collapsed, ImageTerms, Workspace};
pub use compute::Placement;
pub use cs_unet::{Conditioned, CsUnet, TimeTable, Timesteps};
pub use error::ModelError;
pub use parameters::{Parameter, Parameters};
pub use split::Split;
pub use standardisation::Standardisation;
