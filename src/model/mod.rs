//! The network: a U-Net of six C-Siren modules that predicts a clean code from a noised one, an image and a timestep.
//!
//! In reading order:
//! - [`Architecture`]: widths, and with them the name, shape, split and first value of every parameter.
//! - [`Parameters`]: the flat, ordered list of weights; what of each this rank holds.
//! - [`CsUnet`]: the network. Time and image terms come out as values of their own ([`TimeTable`], [`Conditioned`]), so
//!   that a sampling chain computes them once.
//!
//! Numbers only: no files, no sockets, no global generator. Names and shapes are those of the PyTorch reference.

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
