//! Tests of shards: their format, the order of rows, reading from disk and from S3, damaged and malicious files.

mod build;
mod contents;
mod foreign;
mod format;
mod hostile;
pub(crate) mod memory;
mod placed;
mod plan;
mod prefetch;
pub(crate) mod read_back;
#[cfg(feature = "s3")]
mod s3;
#[cfg(feature = "s3")]
pub(crate) mod s3_server;
pub(crate) mod support;
mod usable_rows;
