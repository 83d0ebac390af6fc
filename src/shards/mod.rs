//! Sharded embeddings: Parquet in, batches out, in an order that never depends on who reads.
//!
//! Five rooms and what stands on them. Each imports only those before it, `error` and `parallel`:
//!
//! 1. `format`: Parquet files and their manifest, from and to bytes in memory;
//! 2. `source`: bytes of numbered files, local or on S3, and how a location becomes files;
//! 3. `blocks`: a data set as blocks (row groups) that any thread reads and checks;
//! 4. `order`: which row comes when; rows that are left out; where training stands;
//! 5. `batches`: rows into batches ahead of the trainer;
//! 6. `usable_rows`: blocks without the rows that are left out;
//! 7. `survey`, `build`, `inspect`, `verify`, `linear_head`: what runs and verbs do with them.
//!
//! The format is specified in `shards/README.md`.

mod batches;
mod blocks;
mod build;
mod error;
mod format;
mod inspect;
mod linear_head;
mod order;
mod parallel;
mod source;
mod survey;
mod usable_rows;
mod verify;

pub use batches::{Batch, BatchOptions, Batches, Cache, InlineBatches, Room};
pub use blocks::{BadRow, BlockRows, Blocks, Contents, Dataset, Scan};
pub use build::{Build, build};
pub use error::{ShardsError, Spot};
pub use format::{
    Checksum, ELEMENT_BYTES, FILE_BYTES, ImageHead, MANIFEST_NAME, Manifest, ManifestFile, ManifestRowGroup, Moments,
    ROWS_PER_GROUP, SCHEMA_VERSION, ShardWriter, Statistics, WriterOptions, WriterRows,
};
pub use inspect::inspect;
pub use linear_head::{PROJECTION_SEED, projection};
pub use order::{
    Bookmark, Epoch, Layout, Mask, Plan, PlanOptions, Position, Replay, Sample, Samples, Share, WINDOW_BYTES_MAX,
};
pub use source::{ByteSource, DatasetIndex, LocalFiles, Origin, S3Options};
pub use survey::Survey;
pub use verify::{PROBLEMS_MAX, verify};
