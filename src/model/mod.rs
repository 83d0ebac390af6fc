//! The network: a U-Net of six C-Siren modules that predicts a clean code from a noised code, an image and a timestep.
//!
//! In reading order:
//! - [`Architecture`]: the layer widths, and from them the name, shape, split and initial value of every parameter.
//! - [`Parameters`]: the flat, ordered list of weights, with the part of each that this rank holds.
//! - [`CsUnet`]: the network. Time and image terms are separate values ([`TimeTable`], [`Conditioned`]), so that a
//!   sampling chain computes them only once.
//!
//! Pure computation: no files, no sockets, no global random generator. Names and shapes are those of the PyTorch
//! reference.

mod architecture;
mod c_siren;
mod compute;
mod cs_unet;
mod error;
mod flops;
mod gather;
mod parameters;
mod split;

pub use architecture::Architecture;
pub use c_siren::DropoutDraws;
pub use compute::Placement;
pub use cs_unet::{Conditioned, CsUnet, TimeTable, Timesteps};
pub use error::ModelError;
pub use parameters::{Parameter, Parameters};
pub use split::Split;
