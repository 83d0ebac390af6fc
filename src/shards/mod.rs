//! Sharded embeddings: Parquet in, batches out, in an order that never depends on who reads.
//!
//! In reading order: `manifest` (what is in a folder of shards), `writer`, `dataset` (ours or anybody's Parquet as
//! [`Blocks`]), `plan` (pure: which row comes when), `prefetch` (rows into batches ahead of the trainer), `simulate`.
//! The format is specified in `shards/README.md`.

mod block;
mod error;
mod mask;
mod permutation;
mod plan;
mod position;
mod replay;

pub use block::{BlockRows, Blocks, ELEMENT_BYTES};
pub use error::{ShardsError, Spot};
pub use mask::Mask;
pub use plan::{Epoch, Layout, Plan, PlanOptions, Sample, Samples, Share, WINDOW_BYTES_MAX};
pub use position::{Bookmark, Position};
pub use replay::{Replay, ReplayReport, ReplayedSize};
