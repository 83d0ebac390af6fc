//! A data set as numbered blocks, one per row group.
//!
//! In reading order:
//! - `block`: the trait of a data set, and the rows of a block.
//! - `contents`: checksums of data without a manifest.
//! - `dataset`: opens a data set.
//! - `reading` and `direct`: read one block.
//! - `mean`: averages views.
//! - `changes`: detects changed data.
//! - `scan`: reads all data once.

mod block;
mod changes;
mod contents;
mod dataset;
mod direct;
mod mean;
mod reading;
mod scan;

pub use block::{BlockRows, Blocks};
pub use contents::Contents;
pub use dataset::Dataset;
pub use scan::{BadRow, Scan};
