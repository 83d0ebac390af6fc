//! Training computes weights from batches of rows. A run can be killed at any moment and loses only the steps since the
//! last checkpoint.
//!
//! In reading order:
//! - [`run`]: the training loop.
//! - `data`: scans the data on rank 0, broadcasts the findings to all ranks, and makes the batches.
//! - `step`: one optimiser step (`Trainer`). The bits of a step do not depend on where the run was interrupted. On CUDA
//!   a step can be recorded as a graph and replayed.
//! - `work`: the part of a step that runs on the device, with autograd or with hand-written kernels.
//! - `replicas`: finds ranks whose bits differ from those of their peers.
//! - `schedule`: learning rate and decay of the weight average, as functions of the step.
//! - `saved`: writes the state of a run as parts of a checkpoint, and restores it.
//! - `quick`: evaluates the averaged weights on the validation rows during training.
//! - `faults`: injects faults.
//! - `bench`: times steps, for `bench train`. `profile`: the time of each operator or kernel of a step.
//! - `observe`: reports from rank 0 to TensorBoard and the launcher, with `meter` (speed and memory of the device),
//!   `weights` (histograms), `pictures` (maps of answers and densities) and `summary` (sizes of the model and the data).
//!
//! Invariant: the state after step n is a function of the configuration, the data, the initial weights, the kind of
//! device and the layout of workers. It does not depend on clocks or restarts.

mod bench;
mod data;
mod error;
mod faults;
mod observe;
mod profile;
mod quick;
mod replicas;
mod run;
mod saved;
mod schedule;
mod step;
mod work;

pub use bench::bench;
pub(crate) use bench::{ceilings, embedding_width, peak_gib, spread};
pub use error::TrainError;
pub use observe::{Launcher, SendMessage};
pub(crate) use profile::profile_steps;
pub use run::run;
