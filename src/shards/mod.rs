//! Sharded embeddings: Parquet in, batches out, in an order that never depends on who reads.
//!
//! In reading order: `manifest` (what is in a folder of shards), `writer`, `dataset` (ours or anybody's Parquet as
//! [`Blocks`]), `plan` (pure: which row comes when), `prefetch` (rows into batches ahead of the trainer), `simulate`.
//! The format is specified in `shards/README.md`.

mod block;
mod error;

pub use block::{BlockRows, Blocks, ELEMENT_BYTES};
pub use error::{ShardsError, Spot};
