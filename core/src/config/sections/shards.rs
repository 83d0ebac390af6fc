//! `[shards]`: where embeddings come from and how they are read.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::config::errors::Checker;

/// What to do with a row that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum OnBadRows {
    /// Stop, naming it.
    Error,
    /// Scan first, leave such rows out, say how many.
    Skip,
}

/// What to do with the rows at the end of an epoch that do not fill a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Tail {
    /// Leave them out of this epoch.
    Drop,
    /// Fill the batch with rows from the start of the epoch.
    Pad,
}

/// Where rows are kept once they have been read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum CacheMode {
    /// The fastest that fits.
    Auto,
    /// Nowhere.
    None,
    /// In main memory.
    Host,
    /// In the memory of the GPU.
    Device,
}

section! {
    /// Where embeddings come from.
    pub struct ShardsConfig {
        /// Training rows: a folder, a file, a glob or an s3:// URL.
        pub train: String = "shards/mp16".into(),
        /// Rows for the quick evaluation while training; "": none.
        pub validation: String = String::new(),
        /// Rows for `eval`.
        pub test: String = "shards/test".into(),
        /// Name of the column of identifiers; where the file has none, row numbers serve.
        pub id_column: String = "id".into(),
        /// Name of the column of latitudes, degrees.
        pub latitude_column: String = "lat".into(),
        /// Name of the column of longitudes, degrees.
        pub longitude_column: String = "lon".into(),
        /// Name of the column of embeddings; further views are NAME_1, NAME_2, ...
        pub embedding_column: String = "embedding".into(),
        /// What to do with a row that cannot be used.
        pub on_bad_rows: OnBadRows = OnBadRows::Error,
        /// What to do with the rows that do not fill the last batch of an epoch.
        pub tail: Tail = Tail::Drop,
        /// Where rows are kept once they have been read.
        pub cache: CacheMode = CacheMode::Auto,
        /// Threads of one worker that read ahead.
        pub reader_threads: u32 = 2,
        /// Batches that are read ahead.
        pub prefetch_batches: u32 = 4,
        /// Row groups that are open at once, among which rows are shuffled.
        pub shuffle_row_groups: u32 = 16,
        /// Folder that keeps what was fetched from s3://; "": locdiff/s3 in XDG_CACHE_HOME or ~/.cache.
        pub cache_dir: String = String::new(),
        /// The most that this folder holds, GiB; 0: nothing is kept.
        pub cache_gib: u32 = 20,
    }
}

impl ShardsConfig {
    /// Whether there may be shards at a location; only of a folder or a file it is known without looking further.
    pub fn may_be_at(location: &str) -> bool {
        let is_plain = !location.contains("://") && !location.contains(['*', '?', '[']);
        !location.is_empty() && (!is_plain || Path::new(location).exists())
    }

    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        for (key, value) in [
            ("shards.train", &self.train),
            ("shards.latitude_column", &self.latitude_column),
            ("shards.longitude_column", &self.longitude_column),
            ("shards.embedding_column", &self.embedding_column),
        ] {
            if value.is_empty() {
                checker.push(key, "is empty");
            }
        }
        checker.within("shards.reader_threads", self.reader_threads, 1..=256);
        checker.within("shards.prefetch_batches", self.prefetch_batches, 1..=1024);
        checker.within("shards.shuffle_row_groups", self.shuffle_row_groups, 1..=65_536);
        checker.within("shards.cache_gib", self.cache_gib, 0..=1 << 20);
        if self.cache_dir.contains("://") {
            checker.push("shards.cache_dir", "is a URL, expected a folder");
        }
    }
}
