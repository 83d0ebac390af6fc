//! S3 objects (`s3://bucket/key`) as numbered files.
//!
//! Invariant: all bytes come from the objects as they were when the data set was opened. There are two checks:
//! - The size and the ETag of every response are compared with those of the listing. If a server sends no ETags, only
//!   the sizes are compared.
//! - Each request names the ETag, so that the server rejects the request if the object has changed. A weak ETag is left
//!   out, because it would never match.
//!
//! Credentials come only from the environment or from a service that the environment names. Secret keys and session
//! tokens from the environment are removed from messages.
//!
//! `object_store` retries after transient failures with exponential backoff, up to a limit on both tries and time.
//! Transient failures are server errors (5xx) and connections that break, even in the middle of a response. Reader
//! threads block while they wait for bytes. A small tokio runtime drives the connections.
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
