//! Sharded embeddings: Parquet files in, batches out, in an order that does not depend on the number of workers.
//!
//! Each module imports only the modules listed before it, `error` and `parallel`:
//!
//! 1. `format`: encodes and decodes Parquet files and their manifest, in memory;
//! 2. `source`: resolves a location to numbered files and reads their bytes, local or on S3;
//! 3. `blocks`: a data set as numbered blocks (row groups) that any thread can read, with checks;
//! 4. `order`: the order of rows, the rows that are skipped, and the position of training;
//! 5. `batches`: prefetches rows into batches for the trainer;
//! 6. `usable_rows`: reads blocks without the skipped rows;
//! 7. `survey`, `build`, `inspect`, `verify`, `linear_head`: used by training runs and the `shards` commands.
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
    Checksum, ELEMENT_BYTES, FILE_BYTES, ImageHead, MANIFEST_NAME, Manifest, ManifestFile, ManifestRowGroup,
    MomentSums, ROWS_PER_GROUP, SCHEMA_VERSION, ShardWriter, Statistics, WriterOptions, WriterRows,
};
pub use inspect::inspect;
pub use linear_head::{PROJECTION_SEED, projection};
pub use order::{
    Bookmark, DataLayout, Epoch, Mask, Plan, PlanOptions, Position, Replay, Sample, Samples, Share, WINDOW_BYTES_MAX,
};
pub use source::{ByteSource, DatasetIndex, LocalFiles, Origin, S3Options};
pub use survey::Survey;
pub use verify::{PROBLEMS_MAX, verify};
