//! S3 objects (`s3://bucket/key`) as numbered files.
//!
//! Invariant: all bytes come from the objects as they were when the data set was opened. Each request names the ETag,
//! and each response is compared with it. Credentials come only from the environment and never appear in messages.
//!
//! `object_store` retries transient failures (5xx, broken connections, also in the middle of a response) with
//! exponential backoff and a limit on both tries and time. Reader threads block while they wait; a small tokio runtime
//! drives the connections.
//!
//! In reading order: `url`, `options`, `failure` (error messages without secrets), `bucket`, `cache` (fetched bytes on
//! disk), `objects`, `listing`.

mod bucket;
mod cache;
mod failure;
mod listing;
mod objects;
mod options;
mod url;

pub use options::S3Options;

pub(super) use listing::{from_index, open};
