//! A data set as numbered blocks, one per row group: opened, read, checked, compared with what it was.
//!
//! In reading order: `block` (what a block is), `contents` (what data without a manifest was), `dataset` (opening), `reading` and
//! `direct` (one block), `changes` (is it what it was?), `scan` (everything once).

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
