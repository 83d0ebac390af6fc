//! Checksums for data without a manifest: one for every column chunk that training reads, recorded when a run begins.
//!
//! Files from other tools have no manifest with checksums, so the run computes its own. The first scan computes them,
//! every checkpoint stores them, and every worker verifies them for the chunks that it reads.
//!
//! Before its first step, a resumed run hashes every file whose version ([`ByteSource::version`]) has changed.
//! Different bytes are an error, but a changed version alone is not. Files with an unchanged version are not hashed at
//! that time. Their chunks, like the chunks of all files, are checked when they are read.
//!
//! [`ByteSource::version`]: crate::shards::ByteSource::version

use serde::{Deserialize, Serialize};

use crate::shards::format::Checksum;

/// Checksums of all column chunks that training reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contents {
    /// Version of each file, as reported by the source before the file was read.
    pub(super) versions: Vec<String>,
    /// Checksums in block order. Each block has one checksum for the latitudes, one for the longitudes and one for each
    /// view.
    pub(super) xxh3: Vec<Checksum>,
}
