//! Sharded embeddings: Parquet in, batches out, in an order that never depends on who reads.
//!
//! In reading order: `manifest` (what is in a folder of shards), `writer`, `dataset` (ours or anybody's Parquet as
//! [`Blocks`]), `plan` (pure: which row comes when), `prefetch` (rows into batches ahead of the trainer), `simulate`.
//! The format is specified in `shards/README.md`.

mod block;
mod careful;
mod checks;
mod checksum;
mod dataset;
mod decode;
mod error;
mod file_writer;
mod footer;
mod index;
mod inspect;
mod levels;
mod locate;
mod manifest;
#[cfg(feature = "s3")]
mod s3;
mod source;
mod statistics;
mod verify;
mod writer;

pub use block::{BlockRows, Blocks, ELEMENT_BYTES};
pub use checksum::Checksum;
pub use dataset::{BadRow, Dataset, Scan};
pub use error::{ShardsError, Spot};
pub use index::DatasetIndex;
pub use inspect::{Inspection, inspect};
pub use manifest::{ImageHead, MANIFEST_NAME, Manifest, ManifestFile, ManifestRowGroup, SCHEMA_VERSION};
#[cfg(feature = "s3")]
pub use s3::S3Options;
pub use source::{ByteSource, LocalFiles};
pub use statistics::{Moments, Statistics};
pub use verify::{PROBLEMS_MAX, Problem, verify};
pub use writer::{FILE_BYTES, ROWS_PER_GROUP, ShardWriter, WriterOptions, WriterRows};

use decode::Number;
