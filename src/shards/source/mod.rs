//! Resolves a location to numbered files, on disk or on S3, and reads bytes from them.
//!
//! In reading order:
//! - `bytes`: the trait of a source.
//! - `local`: files on disk.
//! - `s3`: S3 objects.
//! - `origin`: finds out where rows came from.
//! - `locate`: resolves a location to a source.
//! - `index`: everything that a process needs to open a data set, in a form that can be sent to other processes.

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
