//! A data set as numbered blocks, one per row group.
//!
//! In reading order: `block` (what a block is), `contents` (checksums of data without a manifest), `dataset` (opening),
//! `reading` and `direct` (reading one block), `changes` (detecting changed data), `scan` (reading everything once).

mod block;
mod changes;
mod contents;
mod dataset;
mod direct;
mod reading;
mod scan;

pub use block::{BlockRows, Blocks};
pub use contents::Contents;
pub use dataset::Dataset;
pub use scan::{BadRow, Scan};
