//! Sharded embeddings: Parquet in, batches out, in an order that never depends on who reads.
//!
//! In reading order: `manifest` (what is in a folder of shards), `writer`, `dataset` (ours or anybody's Parquet as
//! [`Blocks`]; `reading` and `direct` read one), `mask` (rows that are left out), `plan` (pure: which row comes when;
//! `permutation` behind it), `position` (where training stands), `replay` (the proof of the plan), `cache` and `prefetch`
//! (rows into batches ahead of the trainer), `simulate`.
//! The format is specified in `shards/README.md`.

mod block;
mod build;
mod cache;
mod careful;
mod checks;
mod checksum;
mod contents;
mod coordinates;
mod dataset;
mod decode;
mod direct;
mod error;
mod file_writer;
mod footer;
mod ids;
mod index;
mod inspect;
mod levels;
mod linear_head;
mod locate;
mod manifest;
mod mask;
mod matrix;
mod origin;
mod page_header;
mod permutation;
mod plan;
mod position;
mod prefetch;
mod reading;
mod replay;
#[cfg(feature = "s3")]
mod s3;
mod scan;
mod simulate;
mod source;
mod statistics;
mod table;
mod verify;
mod world;
mod writer;

pub use block::{BlockRows, Blocks, ELEMENT_BYTES};
pub use build::{Build, Built, build};
pub use cache::{Cache, Room};
pub use checksum::Checksum;
pub use contents::Contents;
pub use dataset::Dataset;
pub use error::{ShardsError, Spot};
pub use index::DatasetIndex;
pub use inspect::inspect;
pub use linear_head::{PROJECTION_SEED, projection};
pub use manifest::{ImageHead, MANIFEST_NAME, Manifest, ManifestFile, ManifestRowGroup, SCHEMA_VERSION};
pub use mask::Mask;
pub use origin::Origin;
pub use plan::{Epoch, Layout, Plan, PlanOptions, Sample, Samples, Share, WINDOW_BYTES_MAX};
pub use position::{Bookmark, Position};
pub use prefetch::{Batch, BatchOptions, Batches, InlineBatches};
pub use replay::Replay;
#[cfg(feature = "s3")]
pub use s3::S3Options;
pub use scan::{BadRow, Scan, Survey};
pub use simulate::{Simulation, simulate};
pub use source::{ByteSource, LocalFiles};
pub use statistics::{Moments, Statistics};
pub use verify::{PROBLEMS_MAX, Problem, verify, verify_skipping};
pub use world::{BLOCK_PHOTOS, Candidates, Photo, Source, Spots, World};
pub use writer::{FILE_BYTES, ROWS_PER_GROUP, ShardWriter, WriterOptions, WriterRows};
