//! Prefetches rows into batches for the trainer.
//!
//! In reading order:
//! - `cache`: where rows are cached.
//! - `segments`: the rows of a window that a worker needs.
//! - `readers`: threads that read blocks.
//! - `delivery`: a batch and its memory.
//! - `filling`: puts rows into batches.
//! - `device`: a cache of all rows on a GPU.
//! - `gather`: the thread that requests rows from the readers and sends batches.
//! - `prefetch`: the interface for the trainer.
//! - `inline`: makes the same batches without threads.

mod cache;
mod delivery;
mod device;
mod filling;
mod gather;
mod inline;
mod prefetch;
mod readers;
mod segments;

pub use cache::{Cache, Room};
pub use delivery::Batch;
pub use inline::InlineBatches;
pub use prefetch::{BatchOptions, Batches};
