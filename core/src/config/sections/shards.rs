//! `[shards]`: where embeddings are read from, and how.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::config::errors::Checker;
use crate::geo::CELL_DEGREES_RANGE;

/// What to do with unusable rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum OnBadRows {
    /// Stop with an error that names the row.
    Error,
    /// Scan all rows first, leave out the unusable ones, and log how many there were.
    Skip,
}

/// What to do with rows at the end of an epoch that do not fill a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Tail {
    /// Leave these rows out of the epoch.
    Drop,
    /// Fill up the batch with rows from the start of the epoch.
    Pad,
}

/// Where rows are cached after the first read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum CacheMode {
    /// The fastest memory that has room for all rows; if no memory has room, no cache.
    Auto,
    /// No cache.
    None,
    /// Main memory.
    Host,
    /// GPU memory.
    Device,
}

section! {
    /// Where embeddings are read from, and how.
    pub struct ShardsConfig {
        /// Training rows: a folder, a file, a glob or an s3:// URL.
        pub train: String = "shards/mp16".into(),
        /// Rows for the quick evaluation during training and for tuning. "": none.
        pub validation: String = String::new(),
        /// Rows for `eval`.
        pub test: String = "shards/test".into(),
        /// Name of the identifier column. In files without an identifier column, row numbers are the identifiers. If
        /// this field or one of the next three fields has its default, columns with other common names are found too.
        pub id_column: String = "id".into(),
        /// Name of the column with the latitude in degrees.
        pub latitude_column: String = "lat".into(),
        /// Name of the column with the longitude in degrees.
        pub longitude_column: String = "lon".into(),
        /// Name of the embedding column. Columns of further views are NAME_1, NAME_2, ...
        pub embedding_column: String = "embedding".into(),
        /// Number of views of a photo that are averaged into one embedding, in training and in evaluation. Views that
        /// are left over join the last mean, so 16 views with 3 give four means of three and one of four. A row with
        /// fewer views gives one mean. 1: no averaging.
        pub mean_views: u32 = 1,
        /// What to do with unusable rows.
        pub on_bad_rows: OnBadRows = OnBadRows::Error,
        /// What to do with rows at the end of an epoch that do not fill a batch.
        pub tail: Tail = Tail::Drop,
        /// Where rows are cached after the first read.
        pub cache: CacheMode = CacheMode::Auto,
        /// Reader threads per worker.
        pub reader_threads: u32 = 2,
        /// Number of batches to read ahead.
        pub prefetch_batches: u32 = 4,
        /// Number of row groups whose rows are shuffled together.
        pub shuffle_row_groups: u32 = 16,
        /// How strongly training evens out the density of photos: rows are drawn in proportion to n^-density_alpha,
        /// where n is the number of training rows in the same cell of the Earth. 0: each row once per epoch. 1: each
        /// cell equally often.
        pub density_alpha: f64 = 0.0,
        /// Height of the cells in which density_alpha counts rows, degrees of latitude. Cells are about as wide as they
        /// are high.
        pub density_cell_degrees: f64 = 1.0,
        /// Cache folder for data from s3://. "": locdiff/s3 in XDG_CACHE_HOME or ~/.cache.
        pub cache_dir: String = String::new(),
        /// Size limit of the cache folder, GiB. 0: no cache.
        pub cache_gib: u32 = 20,
    }
}

impl ShardsConfig {
    /// Whether a location is a path rather than a glob or a URL.
    pub fn is_path(location: &str) -> bool {
        !location.contains("://") && !location.contains(['*', '?', '['])
    }

    /// Whether shards may exist at a location. Paths are checked; globs and URLs are assumed to exist.
    pub fn may_exist_at(location: &str) -> bool {
        !location.is_empty() && (!Self::is_path(location) || Path::new(location).exists())
    }

    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        for (key, value) in [
            ("shards.train", &self.train),
            ("shards.latitude_column", &self.latitude_column),
            ("shards.longitude_column", &self.longitude_column),
            ("shards.embedding_column", &self.embedding_column),
        ] {
            if value.is_empty() {
                checker.push(key, "is empty, wanted a value");
            }
        }
        checker.within("shards.mean_views", self.mean_views, 1..=1024);
        checker.within("shards.reader_threads", self.reader_threads, 1..=256);
        checker.within("shards.prefetch_batches", self.prefetch_batches, 1..=1024);
        checker.within("shards.shuffle_row_groups", self.shuffle_row_groups, 1..=65_536);
        checker.within("shards.density_alpha", self.density_alpha, 0.0..=1.0);
        checker.within("shards.density_cell_degrees", self.density_cell_degrees, CELL_DEGREES_RANGE);
        checker.within("shards.cache_gib", self.cache_gib, 0..=1 << 20);
        if self.cache_dir.contains("://") {
            checker.push("shards.cache_dir", "is a URL, wanted a folder");
        }
    }
}
