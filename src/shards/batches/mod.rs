//! Rows into batches, ahead of the trainer.
//!
//! In reading order: `cache` (where rows are kept), `segments` (what a worker needs of each window), `readers` (threads that read blocks),
//! `delivery` (a batch and its memory), `filling` (rows into their places), `device` (all rows on a GPU), `gather` (the thread
//! that puts it together), `prefetch` (what the trainer holds), `inline` (the same without threads).

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
