//! What data without a manifest was when a run began: a checksum of every column chunk that training reads.
//!
//! It is the manifest that others' files lack. The first scan makes it, every checkpoint keeps it, every worker compares what it
//! reads with it. Resuming reads nothing again of a file that its source says is the same ([`ByteSource::version`]); any other is
//! hashed before the first step. A version never condemns a file, and is never the last word for one: bytes are.
//!
//! [`ByteSource::version`]: crate::shards::ByteSource::version

use serde::{Deserialize, Serialize};

use crate::shards::format::Checksum;

/// Checksums of all column chunks that are ever read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contents {
    /// What the source said of each file before it was read.
    pub(super) versions: Vec<String>,
    /// Block after block: latitudes, longitudes, each view.
    pub(super) xxh3: Vec<Checksum>,
}
