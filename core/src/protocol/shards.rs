//! What a worker does with shards for `shards ...`, `bench shards`, `geoclip import` and `eval --predictions`, and its results.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize};

use super::train::number_or_none;
use crate::config::{RunConfig, ShardsConfig, Tail};
use crate::files::Written;

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
    /// Ids and places of the test shards' usable rows, for the launcher to score predictions with.
    Truth {
        /// Parquet file to write.
        out: PathBuf,
        /// Which shards, and how they are read.
        config: Box<RunConfig>,
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
            Self::Truth { .. } => "eval --predictions (truth)",
        }
    }
}

/// A folder of shards that `shards simulate` or `shards build` has made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardsMade {
    /// The folder.
    pub out: PathBuf,
    /// Rows in it.
    pub rows: u64,
    /// Embeddings per row.
    pub views: u32,
    /// Numbers per embedding.
    pub width: u32,
    /// Where the rows came from, in words.
    pub source: String,
    /// Rows that cannot be used and were left out.
    pub skipped: u64,
    /// How long it took.
    pub seconds: f64,
    /// Rows over that time.
    pub rows_per_s: f64,
}

/// What `shards verify` has found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verified {
    /// There are no problems.
    pub ok: bool,
    /// Rows of all files.
    pub rows: u64,
    /// Those of them that are left out.
    pub skipped_rows: u64,
    /// Which they are, in words.
    pub skipped: Option<String>,
    /// Files.
    pub files: usize,
    /// Row groups that have rows.
    pub row_groups: usize,
    /// Numbers per embedding.
    pub width: usize,
    /// Embeddings per row.
    pub views: u32,
    /// Is there a manifest, and with it a checksum for every read?
    pub manifest: bool,
    /// Stands for the data, sixteen digits.
    pub fingerprint: String,
    /// All that is wrong.
    pub problems: Vec<Problem>,
    /// What the replay has proved, where it was asked for and there are no problems.
    pub plan: Option<ReplayReport>,
}

/// Something that is wrong with shards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// File, place, got and wanted.
    pub message: String,
    /// The exit code that it asks for.
    pub exit_code: u8,
}

/// What the replay has proved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplayReport {
    /// Rows of one epoch: each came once.
    pub rows: u64,
    /// Rows that are left out of every epoch: none came.
    pub skipped_rows: u64,
    /// Blocks with rows.
    pub blocks: u64,
    /// Views per row.
    pub views: u32,
    /// Whether every row was seen to show each of its views once in every `views` epochs; false: too few epochs.
    pub views_proved: bool,
    /// Epochs replayed.
    pub epochs: u32,
    /// Rows of one step.
    pub global_batch: u32,
    /// Steps of one epoch, for every worker.
    pub steps_per_epoch: u64,
    /// What becomes of the rows that do not fill the last batch.
    pub tail: Tail,
    /// Rows that each epoch leaves out for that reason.
    pub dropped_rows: u64,
    /// Rows that each epoch shows a second time for that reason.
    pub padded_rows: u64,
    /// The same order, for each number of workers.
    pub world_sizes: Vec<ReplayedSize>,
}

/// The replay for one number of workers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplayedSize {
    /// How many.
    pub workers: u32,
    /// Rows of the smallest slice of a batch.
    pub slice_rows_min: u64,
    /// Rows of the largest slice of a batch.
    pub slice_rows_max: u64,
    /// Stands for the global order of all epochs: equal for every number of workers.
    pub order: String,
}

/// What maps photos to the space of the embeddings, for retrieval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ImageHead {
    /// GeoCLIP's own image head fits.
    Geoclip,
    /// Simulated: the transposed projection gives GeoCLIP's space back.
    Linear,
    /// Not known.
    None,
}

/// Mean and standard deviation per dimension of the embeddings of view 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// Rows behind the numbers.
    pub rows: u64,
    /// Mean of every dimension.
    pub mean: Vec<f64>,
    /// Standard deviation of every dimension, of the rows as a whole population.
    pub standard_deviation: Vec<f64>,
}

/// What is in a data set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Inspection {
    /// Rows of all files.
    pub rows: u64,
    /// Those of them that are left out.
    pub skipped_rows: u64,
    /// Which they are, in words.
    pub skipped: Option<String>,
    /// Files.
    pub files: usize,
    /// Row groups that have rows.
    pub row_groups: usize,
    /// Fewest and most rows of a row group.
    pub row_group_rows: (u32, u32),
    /// Numbers per embedding.
    pub width: usize,
    /// Embeddings per row.
    pub views: u32,
    /// Is there a manifest, and with it a checksum for every read?
    pub manifest: bool,
    /// What the data is, sixteen digits.
    pub fingerprint: String,
    /// The manifest's word on where the rows came from.
    pub source: Option<String>,
    /// What maps photos to the space of the embeddings.
    pub image_head: Option<ImageHead>,
    /// Least and greatest latitude, degrees.
    #[serde(deserialize_with = "range_or_none")]
    pub latitudes: (f64, f64),
    /// Least and greatest longitude, degrees.
    #[serde(deserialize_with = "range_or_none")]
    pub longitudes: (f64, f64),
    /// Least and greatest mean of a dimension.
    #[serde(deserialize_with = "range_or_none")]
    pub means: (f64, f64),
    /// Least and greatest standard deviation of a dimension.
    #[serde(deserialize_with = "range_or_none")]
    pub standard_deviations: (f64, f64),
    /// Mean and standard deviation of every dimension, of view 0.
    pub statistics: Statistics,
    /// The world from 90 degrees north, 180 degrees west, darker where there are more rows.
    pub map: Vec<String>,
}

/// JSON has no infinity: the range of no rows travels as two nulls.
fn range_or_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(f64, f64), D::Error> {
    #[derive(Deserialize)]
    struct Bound(#[serde(deserialize_with = "number_or_none")] f64);
    let (low, high) = <(Bound, Bound)>::deserialize(deserializer)?;
    Ok((low.0, high.0))
}

/// What `geoclip import` has made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GeoclipImported {
    /// The folder.
    pub out: PathBuf,
    /// Where it came from.
    pub source: String,
    /// Its files by name.
    pub files: BTreeMap<String, Written>,
    /// How long it took.
    pub seconds: f64,
}

/// How fast one core reads embeddings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardsBenched {
    /// pyarrow's version; none where no Python has it.
    pub peer: Option<String>,
    /// One row per case.
    pub rows: Vec<ReadingSpeed>,
}

/// One case of `bench shards`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReadingSpeed {
    /// What was read, and how.
    pub case: String,
    /// Bytes of embeddings as the file stores them, over the median time.
    pub gb_per_s: f64,
    /// The same for pyarrow.
    pub pyarrow_gb_per_s: Option<f64>,
    /// Ours over pyarrow's.
    pub ratio: Option<f64>,
    /// The same bytes over the median time on a core, which other work on the machine stretches less.
    pub gb_per_core_s: f64,
    /// The same for pyarrow.
    pub pyarrow_gb_per_core_s: Option<f64>,
}
