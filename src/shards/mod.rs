//! Reads embeddings from sharded Parquet files and makes batches for training. The order of rows does not depend on the
//! number of workers.
//!
//! Within this folder, each module imports only `error`, `parallel` and modules listed before it:
//!
//! 1. `format`: writes Parquet files and their manifest, and decodes them from bytes in memory;
//! 2. `source`: resolves a location to numbered files, on disk or on S3, and reads their bytes;
//! 3. `blocks`: presents a data set as numbered blocks (row groups) that any thread can read, and checks every read;
//! 4. `order`: defines the order of rows, the rows that are skipped, and the position of training;
//! 5. `batches`: prefetches rows into batches for the trainer;
//! 6. `usable_rows`: reads blocks without the skipped rows;
//! 7. `survey`, `build`, `join`, `inspect`, `verify`, `linear_head`: serve training runs and the `shards` commands.
//!
//! `shards/README.md` specifies the format.

mod batches;
mod blocks;
mod build;
mod error;
mod format;
mod inspect;
mod join;
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
    Checksum, Coordinates, ELEMENT_BYTES, FILE_BYTES, ImageHead, MANIFEST_NAME, Manifest, ManifestFile,
    ManifestRowGroup, MomentSums, ROWS_PER_GROUP, SCHEMA_VERSION, ShardWriter, Statistics, WriterOptions, WriterRows,
    check_target,
};
pub use inspect::inspect;
pub use join::join;
pub use linear_head::{PROJECTION_SEED, projection};
pub use order::{
    Bookmark, DataLayout, Epoch, Mask, Plan, PlanOptions, Position, Replay, RowWeights, Sample, Samples, Share,
    WINDOW_BYTES_MAX, WeightsMark,
};
pub use source::{ByteSource, DatasetIndex, LocalFiles, Origin, S3Options};
pub use survey::Survey;
pub use verify::{PROBLEMS_MAX, verify};
