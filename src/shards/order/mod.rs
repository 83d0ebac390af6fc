//! Which row comes when: a function of the data, the seed and the epoch, whoever reads.
//!
//! In reading order: `permutation`, `mask` (rows that are left out), `plan` (pure: index to row), `position` (where training stands),
//! `replay` (the proof of the plan).

mod mask;
mod permutation;
mod plan;
mod position;
mod replay;

pub use mask::Mask;
pub use plan::{Epoch, Layout, Plan, PlanOptions, Sample, Samples, Share, WINDOW_BYTES_MAX};
pub use position::{Bookmark, Position};
pub use replay::Replay;

pub(super) use mask::{caught, panic_text};
