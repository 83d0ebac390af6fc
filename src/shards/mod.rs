//! Sharded embeddings: Parquet in, batches out, in an order that never depends on who reads.
//!
//! In reading order: `manifest` (what is in a folder of shards), `writer`, `dataset` (ours or anybody's Parquet as
//! [`Blocks`]), `plan` (pure: which row comes when), `prefetch` (rows into batches ahead of the trainer), `simulate`.
//! The format is specified in `shards/README.md`.

mod block;
mod checks;
mod checksum;
mod error;
mod file_writer;
mod manifest;
mod statistics;
mod writer;

pub use block::{BlockRows, Blocks, ELEMENT_BYTES};
pub use checksum::Checksum;
pub use error::{ShardsError, Spot};
pub use manifest::{ImageHead, MANIFEST_NAME, Manifest, ManifestFile, ManifestRowGroup, SCHEMA_VERSION};
pub use statistics::{Moments, Statistics};
pub use writer::{FILE_BYTES, ROWS_PER_GROUP, ShardWriter, WriterOptions, WriterRows};
