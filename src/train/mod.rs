//! Training: batches in, weights out, killed at any moment at no cost but the steps since the last checkpoint.
//!
//! In reading order:
//! - [`run`]: the loop.
//! - `data`: what rank 0 finds out about the data and tells the others; batches.
//! - `step`: one optimiser step (`Trainer`), the same bits for the same step wherever the run was interrupted: on CUDA replayed.
//! - `work`: what the device does in it; `feed`: what it is given.
//! - `schedule`: learning rate and decay of the average, functions of the step alone.
//! - `saved`: the state as parts of a checkpoint, and back.
//! - `quick`: how good the averaged weights are, on the validation rows, while training.
//! - `observe`: what rank 0 tells TensorBoard and the launcher, with
//!   - `meter`: operations per second, their share of the peak, memory;
//!   - `weights`: histograms of the weights;
//!   - `pictures`: answers and densities on maps.
//!
//! Invariant: the state after step n is a function of the configuration, the data and the layout of workers; neither clocks
//! nor restarts have a part in it.

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
