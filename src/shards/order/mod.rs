//! The order of rows. It depends on the data, the options of the plan (such as the seed) and the epoch, but not on the
//! number of workers.
//!
//! In reading order: `permutation`, `mask` (the rows to skip), `weights` (how often each row comes), `layout` (what
//! else determines the order), `plan` (maps an index to a row, without I/O), `position` (the progress of training),
//! `replay` (checks the plan).

mod layout;
mod mask;
mod permutation;
mod plan;
mod position;
mod replay;
mod weights;

pub use layout::{DataLayout, PlanOptions, WINDOW_BYTES_MAX};
pub use mask::Mask;
pub use plan::{Epoch, Plan, Sample, Samples, Share};
pub use position::{Bookmark, Position};
pub use replay::Replay;
pub use weights::{RowWeights, WeightsMark};

pub(super) use mask::{catch_panic, panic_text};
