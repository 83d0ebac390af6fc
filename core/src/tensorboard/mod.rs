//! TensorBoard event files, with one writer per run. A resumed run first removes the records of the steps that it will
//! repeat.
//!
//! The modules and types in reading order:
//! - [`Board`]: opens the folder of a run and writes scalars, text, histograms and pictures.
//! - [`SteadyBoard`]: the same while a run trains, without errors that would end the run.
//! - [`Histogram`]: buckets and their counts.
//! - [`Hyperparameters`]: the settings of a run, for the HPARAMS page.
//! - `event`: the protobuf messages.
//! - `record`: the TFRecord framing of messages in a file.
//! - `resume`: trims the event files of earlier attempts when a run resumes.
//!
//! Invariants: steps never decrease within a file. However the earlier attempts of a run ended, training records no
//! value twice for the same step. Sources: `tensorflow/core/util/event.proto`, `framework/summary.proto`,
//! `lib/io/record_writer.h`.

mod board;
mod error;
mod event;
mod histogram;
mod hparams;
mod record;
mod resume;
mod steady;

pub use board::{Board, Value};
pub use error::BoardError;
pub use histogram::Histogram;
pub use hparams::{Hyperparameter, Hyperparameters};
pub use steady::SteadyBoard;
