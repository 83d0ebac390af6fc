//! Sharded embeddings: Parquet in, batches out, in an order that never depends on who reads.
//!
//! In reading order: `manifest` (what is in a folder of shards), `writer`, `dataset` (ours or anybody's Parquet as
//! [`Blocks`]), `mask` (rows that are left out), `plan` (pure: which row comes when; `permutation` behind it),
//! `position` (where training stands), `replay` (the proof of the plan), `cache` and `prefetch` (rows into batches ahead
//! of the trainer), `simulate`.
//! The format is specified in `shards/README.md`.

mod block;
mod cache;
mod error;
mod mask;
mod permutation;
mod plan;
mod position;
mod prefetch;
mod replay;

pub use block::{BlockRows, Blocks, ELEMENT_BYTES};
pub use cache::{Cache, Room};
pub use error::{ShardsError, Spot};
pub use mask::Mask;
pub use plan::{Epoch, Layout, Plan, PlanOptions, Sample, Samples, Share, WINDOW_BYTES_MAX};
pub use position::{Bookmark, Position};
pub use prefetch::{Batch, BatchOptions, Batches};
pub use replay::{Replay, ReplayReport, ReplayedSize};
