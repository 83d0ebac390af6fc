//! The state of data without a manifest when a run began: a checksum of every column chunk that training reads.
//!
//! It stands in for the manifest that files from other tools lack. The first scan creates it, every checkpoint stores
//! it, and every worker checks its reads against it. On resume, a file with an unchanged version
//! ([`ByteSource::version`]) is not read again. Any other file is hashed before the first step. A changed version alone
//! is not an error, and an unchanged one does not replace the check on every read: only the bytes decide.
//!
//! [`ByteSource::version`]: crate::shards::ByteSource::version

use serde::{Deserialize, Serialize};

use crate::shards::format::Checksum;

/// Checksums of all column chunks that training reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contents {
    /// Version of each file, from the source, taken before the file was read.
    pub(super) versions: Vec<String>,
    /// Checksums, block by block: latitudes, longitudes, each view.
    pub(super) xxh3: Vec<Checksum>,
}
