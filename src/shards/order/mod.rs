//! The order of rows. It depends on the data, the options of the plan (such as the seed) and the epoch, but not on the
//! number of workers.
//!
//! In reading order: `permutation`, `mask` (the rows to skip), `plan` (maps an index to a row, without I/O), `position`
//! (the progress of training), `replay` (checks the plan).

mod mask;
mod permutation;
mod plan;
mod position;
mod replay;

pub use mask::Mask;
pub use plan::{DataLayout, Epoch, Plan, PlanOptions, Sample, Samples, Share, WINDOW_BYTES_MAX};
pub use position::{Bookmark, Position};
pub use replay::Replay;

pub(super) use mask::{catch_panic, panic_text};
