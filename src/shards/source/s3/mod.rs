//! Objects behind `s3://bucket/key` as numbered files.
//!
//! Invariant: every byte that is handed out is of the object as it was when the data set was opened: each request names its ETag,
//! and each answer is compared with it. Credentials come from the environment alone, and no message shows them.
//!
//! Requests that fail for a reason that passes (5xx, connections that break, in the middle of an answer too) are made again by
//! `object_store`, with growing waits and a bound on both tries and time. The waiting threads are those that read; a small tokio
//! runtime drives the connections.
//!
//! In reading order: `url`, `options`, `failure` (what went wrong, without secrets), `bucket`, `cache` (bytes on disk), `objects`, `listing`.

mod bucket;
mod cache;
mod failure;
mod listing;
mod objects;
mod options;
mod url;

pub use options::S3Options;

pub(super) use listing::{from_index, open};
