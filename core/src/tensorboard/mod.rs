//! TensorBoard event files, with one writer per run. A resumed run first removes the records of the steps that it will
//! repeat.
//!
//! The modules and types in reading order:
//! - [`Board`]: opens the folder of a run and writes scalars, text, histograms and pictures.
//! - [`SteadyBoard`]: a [`Board`] for training, which logs its errors instead of ending the run.
//! - [`Histogram`]: buckets and their counts.
//! - [`Hyperparameters`]: the settings of a run, for the HPARAMS page.
//! - `event`: the protobuf messages.
//! - `record`: the TFRecord framing of messages in a file.
//! - `resume`: trims the event files of earlier attempts when a run resumes.
//! - [`read_scalars`]: reads the scalars of a run back.
//!
//! Invariants: steps never decrease within a file. Training records no value twice for the same step, no matter how the
//! earlier attempts of a run ended.
//!
//! Sources: `tensorflow/core/util/event.proto`, `framework/summary.proto`, `lib/io/record_writer.h`.

mod board;
mod error;
mod event;
mod histogram;
mod hparams;
mod record;
mod resume;
mod scalars;
mod steady;

pub use board::{Board, Value, board_folder};
pub use error::BoardError;
pub use histogram::Histogram;
pub use hparams::{Hyperparameter, Hyperparameters};
pub use scalars::{ScalarCurves, read_scalars};
pub use steady::SteadyBoard;
