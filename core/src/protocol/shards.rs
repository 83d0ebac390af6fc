//! What a worker does with shards for `shards ...`, `bench shards` and `geoclip import`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::ShardsConfig;

/// `shards ...`, `bench shards` and `geoclip import`: work for one worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ShardsJob {
    /// Simulate embeddings of photos at real places.
    Simulate {
        /// How many photos; none: one per place.
        rows: Option<u64>,
        /// Seed of everything random.
        seed: u64,
        /// Folder to make.
        out: PathBuf,
        /// Views per photo.
        views: u32,
        /// Places to take instead of GeoCLIP's gallery.
        coordinates: Option<PathBuf>,
        /// Folder with GeoCLIP's weights and gallery.
        geoclip: PathBuf,
        /// Replace `out` if it exists.
        overwrite: bool,
    },
    /// Shards from a table of coordinates and files of embeddings.
    Build {
        /// CSV or Parquet with ids and coordinates.
        table: PathBuf,
        /// One file of embeddings per view.
        embeddings: Vec<PathBuf>,
        /// Folder to make.
        out: PathBuf,
        /// Replace `out` if it exists.
        overwrite: bool,
        /// Names of the table's columns.
        config: ShardsConfig,
    },
    /// Check checksums, schema and values, and the plan where epochs are given.
    Verify {
        /// Folder, file, glob or URL.
        location: String,
        /// Replay the plan over so many epochs.
        epochs: u32,
        /// For so many workers each.
        world_sizes: Vec<u32>,
        /// Rows of a global batch in that replay.
        global_batch: u32,
        /// Seed of that replay.
        seed: u64,
        /// How the shards are read.
        config: ShardsConfig,
    },
    /// Rows, ranges, statistics and a map.
    Inspect {
        /// Folder, file, glob or URL.
        location: String,
        /// How the shards are read.
        config: ShardsConfig,
    },
    /// Reading speed beside pyarrow's.
    Bench {
        /// Python with pyarrow; none: ours alone.
        python: Option<PathBuf>,
    },
    /// GeoCLIP's weights and gallery from its Python package.
    GeoclipImport {
        /// The package's wheel.
        wheel: PathBuf,
        /// Folder to make.
        out: PathBuf,
        /// Replace `out` if it exists.
        overwrite: bool,
    },
}

impl ShardsJob {
    /// Its name in messages to people.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Simulate { .. } => "shards simulate",
            Self::Build { .. } => "shards build",
            Self::Verify { .. } => "shards verify",
            Self::Inspect { .. } => "shards inspect",
            Self::Bench { .. } => "bench shards",
            Self::GeoclipImport { .. } => "geoclip import",
        }
    }
}
