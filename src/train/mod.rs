//! Training: batches in, weights out. A run can be killed at any moment and loses only the steps since the last
//! checkpoint.
//!
//! In reading order:
//! - [`run`]: the loop.
//! - `data`: surveys the data on rank 0, shares the findings with all ranks, and makes the batches.
//! - `step`: one optimiser step (`Trainer`). A step gives the same bits wherever the run was interrupted. On CUDA it is
//!   replayed as a graph.
//! - `work`: the device's part of a step. `feed` holds its inputs, `codes` encodes points.
//! - `schedule`: learning rate and decay of the weight average, as functions of the step.
//! - `saved`: writes the state as parts of a checkpoint and restores it.
//! - `quick`: evaluates the averaged weights on the validation rows during training.
//! - `observe`: reports from rank 0 to TensorBoard and the launcher, with
//!   - `meter`: FLOP/s, their share of the peak, memory;
//!   - `weights`: histograms of the weights;
//!   - `pictures`: answers and densities on maps.
//!
//! Invariant: the state after step n is a function of the configuration, the data and the layout of workers. It does
//! not depend on clocks or restarts.

mod codes;
mod data;
mod error;
mod feed;
mod meter;
mod observe;
mod pictures;
mod quick;
mod run;
mod saved;
mod schedule;
mod step;
mod weights;
mod work;

pub use error::TrainError;
pub use run::run;
