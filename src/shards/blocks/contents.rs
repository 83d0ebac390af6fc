//! The contents of data without a manifest, recorded when a run begins: a checksum of every column chunk that training
//! reads.
//!
//! Files from other tools have no manifest with checksums, so the run makes its own. The first scan computes the
//! checksums, every checkpoint stores them, and every worker compares its reads with them. When a run resumes, it
//! hashes every file whose version ([`ByteSource::version`]) has changed, before the first step. Only different bytes
//! are an error, not a changed version alone. Files with an unchanged version are not hashed at that time, but their
//! reads are compared like all others.
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
    /// Checksums in block order. For each block: latitudes, longitudes, each view.
    pub(super) xxh3: Vec<Checksum>,
}
