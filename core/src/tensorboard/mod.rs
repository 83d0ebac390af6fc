//! TensorBoard event files: one writer per run, and a resumed run that doubles no step.
//!
//! In reading order:
//! - [`Board`]: opens the folder of a run and writes scalars, text, histograms and pictures.
//! - [`Histogram`]: how many values lie where.
//! - [`Hyperparameters`]: what a run was made with, and its results.
//! - `event`: the messages, as far as they are used here.
//! - `record`: how messages lie in a file.
//! - `resume`: what of earlier attempts stays.
//!
//! Invariants: steps never go back within a file; what is in the folder never has a step twice, whatever happened to the
//! attempts before. Sources: `tensorflow/core/util/event.proto`, `framework/summary.proto`, `lib/io/record_writer.h`.

mod board;
mod error;
mod event;
mod histogram;
mod hparams;
mod record;
mod resume;

pub use board::{Board, Value};
pub use error::BoardError;
pub use histogram::Histogram;
pub use hparams::{Hyperparameter, Hyperparameters};
