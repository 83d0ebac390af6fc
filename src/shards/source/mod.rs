//! Where bytes come from: numbered files on disk or behind `s3://`, and how a location becomes files.
//!
//! In reading order: `bytes` (what a source is), `local`, `s3`, `origin`, `locate` (from a location to a source), `index` (all that opening
//! needs, in one piece that can be sent).

mod bytes;
mod index;
mod local;
mod locate;
mod origin;
#[cfg(feature = "s3")]
mod s3;
#[cfg(not(feature = "s3"))]
#[path = "no_s3.rs"]
mod s3;

pub use bytes::ByteSource;
pub use index::DatasetIndex;
pub use local::LocalFiles;
pub use origin::Origin;
pub use s3::S3Options;

pub(super) use bytes::BufferPool;
