//! Jobs on shards and their results, for `shards ...`, `bench shards`, `geoclip import` and `eval --predictions`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize};

use super::train::null_as_nan;
use crate::config::{RunConfig, ShardsConfig, Tail};
use crate::files::Written;
use crate::tables::PlacesPresent;

/// A job on shards. It runs on a single worker, except for a simulation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ShardsJob {
    /// Simulate embeddings of photos at real locations.
    Simulate {
        /// The rule by which the photos are simulated.
        world: SimulatedWorld,
        /// Number of photos; `None`: one photo per location.
        rows: Option<u64>,
        /// Seed of all random numbers.
        seed: u64,
        /// Folder to create.
        out: PathBuf,
        /// Views per photo.
        views: u32,
        /// File with the locations of the photos; `None`: the locations of GeoCLIP's gallery.
        coordinates: Option<PathBuf>,
        /// The part of the places to use; `None`: all places.
        cells: Option<CellSplit>,
        /// Folder with GeoCLIP's weights and gallery.
        geoclip: PathBuf,
        /// Whether to replace `out` if it exists.
        overwrite: bool,
        /// Number of rows per file; `None`: files of about 512 MiB.
        rows_per_file: Option<u64>,
        /// What this job does of the simulation.
        step: SimulationStep,
    },
    /// Build shards from files of embeddings, and from a table of ids and coordinates if there is one.
    Build {
        /// CSV or Parquet with ids and coordinates; `None`: row numbers are the ids, and no row has coordinates.
        table: Option<PathBuf>,
        /// Which rows have coordinates.
        places: PlacesPresent,
        /// One file of embeddings per view.
        embeddings: Vec<PathBuf>,
        /// Folder to create.
        out: PathBuf,
        /// Whether to replace `out` if it exists.
        overwrite: bool,
        /// Configuration that contains the column names of the table.
        config: ShardsConfig,
    },
    /// Verify checksums, schema and values. If `epochs` is above 0, also replay the order in which training reads the
    /// rows.
    Verify {
        /// Folder, file, glob or URL.
        location: String,
        /// Number of epochs to replay; 0: none.
        epochs: u32,
        /// Numbers of workers to replay with. Each number gets its own replay.
        world_sizes: Vec<u32>,
        /// Global batch size of the replay.
        global_batch: u32,
        /// Seed of the replay.
        seed: u64,
        /// How to read the shards.
        config: ShardsConfig,
    },
    /// Report row counts, value ranges, statistics and a map.
    Inspect {
        /// Folder, file, glob or URL.
        location: String,
        /// How to read the shards.
        config: ShardsConfig,
    },
    /// Measure how fast shards are read, and compare the speed with pyarrow's.
    Bench {
        /// Python interpreter with pyarrow; `None`: no comparison.
        python: Option<PathBuf>,
    },
    /// Extract GeoCLIP's weights and gallery from its Python package.
    GeoclipImport {
        /// Wheel file of the package.
        wheel: PathBuf,
        /// Folder to create.
        out: PathBuf,
        /// Whether to replace `out` if it exists.
        overwrite: bool,
    },
    /// Write the ids and true locations of the usable test rows to a file. The launcher scores predictions against this
    /// file, or counts gallery points near its locations.
    Truth {
        /// Parquet file to write.
        out: PathBuf,
        /// Which shards to read, and how.
        config: Box<RunConfig>,
    },
}

impl ShardsJob {
    /// Name of the job in error messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Simulate { .. } => "shards simulate",
            Self::Build { .. } => "shards build",
            Self::Verify { .. } => "shards verify",
            Self::Inspect { .. } => "shards inspect",
            Self::Bench { .. } => "bench shards",
            Self::GeoclipImport { .. } => "geoclip import",
            Self::Truth { .. } => "eval (true places)",
        }
    }
}

/// What a job does of a simulation. Several workers first simulate pieces, and one of them then joins the pieces.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SimulationStep {
    /// Simulates all photos.
    All,
    /// Simulates this worker's share of the pieces.
    Pieces(PieceFolders),
    /// Joins all pieces.
    Join(PieceFolders),
}

/// The folders of the pieces of a simulation. Each piece is a folder of shards with one file, which becomes a file of
/// the output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PieceFolders {
    /// The pieces that earlier attempts have completed, with their folders.
    pub earlier: BTreeMap<u64, PathBuf>,
    /// Where to put the folders of the other pieces.
    pub others: PathBuf,
}

impl PieceFolders {
    /// The folder of a piece.
    pub fn piece(&self, number: u64) -> PathBuf {
        self.earlier.get(&number).cloned().unwrap_or_else(|| self.others.join(format!("piece-{number:05}")))
    }

    /// The number of the piece whose folder has this name.
    pub fn number(name: &str) -> Option<u64> {
        name.strip_prefix("piece-")?.parse().ok()
    }
}

/// The rule by which photos are simulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SimulatedWorld {
    /// World 1: a photo looks like its own place and four others; the embeddings are a linear projection.
    One,
    /// World 2: a photo looks like places around its own, but not like its exact place; only a trained head can use the
    /// embeddings.
    Two,
}

impl std::fmt::Display for SimulatedWorld {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::One => "1",
            Self::Two => "2",
        })
    }
}

impl std::str::FromStr for SimulatedWorld {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "1" => Ok(Self::One),
            "2" => Ok(Self::Two),
            _ => Err("wanted 1 or 2"),
        }
    }
}

/// How places are divided into training and test places by cells, and which part to use.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CellSplit {
    /// Side of a cell, in degrees.
    pub degrees: f64,
    /// Share of the cells that are held out.
    pub held_out: f64,
    /// The part to use.
    pub part: CellPart,
}

/// A part of the places that are divided by cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CellPart {
    /// All places in cells that are not held out, except for the test places.
    Train,
    /// Test places: one place in each cell that is not held out.
    Thinned,
    /// Test places: one place in each cell that is held out.
    HeldOut,
}

impl std::fmt::Display for CellPart {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Train => "train",
            Self::Thinned => "thinned",
            Self::HeldOut => "held-out",
        })
    }
}

impl std::str::FromStr for CellPart {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "train" => Ok(Self::Train),
            "thinned" => Ok(Self::Thinned),
            "held-out" => Ok(Self::HeldOut),
            _ => Err("wanted train, thinned or held-out"),
        }
    }
}

/// Result of `shards simulate` and `shards build`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardsMade {
    /// The new folder.
    pub out: PathBuf,
    /// Number of rows.
    pub rows: u64,
    /// Embeddings per row.
    pub views: u32,
    /// Width of an embedding.
    pub width: u32,
    /// Description of where the rows came from.
    pub source: String,
    /// Number of unusable rows, which were left out.
    pub skipped: u64,
    /// Duration.
    pub seconds: f64,
    /// Rows per second.
    pub rows_per_s: f64,
}

/// Result of [`SimulationStep::Pieces`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PiecesSimulated {
    /// Number of photos that this worker has simulated.
    pub rows: u64,
}

/// Result of `shards verify`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verified {
    /// `true` if no problems were found.
    pub ok: bool,
    /// Number of rows in all files.
    pub rows: u64,
    /// Number of rows that have coordinates, according to the manifest; all rows without a manifest.
    pub rows_with_coordinates: u64,
    /// Number of rows that are left out because they are unusable.
    pub skipped_rows: u64,
    /// Description of the rows that are left out; `None` if no rows are left out.
    pub skipped: Option<String>,
    /// Number of files.
    pub files: usize,
    /// Number of row groups that are not empty.
    pub row_groups: usize,
    /// Width of an embedding.
    pub width: usize,
    /// Embeddings per row.
    pub views: u32,
    /// Whether the data has a manifest. If so, every read is compared with the checksums in the manifest.
    pub manifest: bool,
    /// Fingerprint of the data, sixteen hexadecimal digits.
    pub fingerprint: String,
    /// All problems found.
    pub problems: Vec<Problem>,
    /// Report of the replay; `None` if the replay was not requested or problems were found.
    pub plan: Option<ReplayReport>,
}

/// A problem with shards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// Text that names the place of the problem, the value found and the value expected.
    pub message: String,
    /// Exit code for this problem.
    pub exit_code: u8,
}

/// Properties of the row order that the replay has verified.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplayReport {
    /// Number of usable rows. Each of them occurred exactly as often as its quota in each epoch, apart from
    /// `dropped_rows` and `padded_rows`. The quota is 1 if `shards.density_alpha` is 0.
    pub rows: u64,
    /// The largest quota of a row in one of the epochs. `None` if `shards.density_alpha` is 0.
    pub quota_max: Option<u32>,
    /// Number of unusable rows. None of them occurred in the replay.
    pub skipped_rows: u64,
    /// Number of blocks that are not empty.
    pub blocks: u64,
    /// Views per row. A mean of several stored views counts as one view.
    pub views: u32,
    /// Whether the replay proved that in each round of `views` epochs, every row is used once with each view.
    /// False if fewer than `views` epochs were replayed, if epochs drop rows, or if rows have quotas.
    pub views_proved: bool,
    /// Number of epochs replayed.
    pub epochs: u32,
    /// Rows per step.
    pub global_batch: u32,
    /// Steps per epoch, the same for every worker.
    pub steps_per_epoch: u64,
    /// What happens to the last rows of an epoch if they do not fill a batch.
    pub tail: Tail,
    /// Number of rows that each epoch drops because they do not fill a batch.
    pub dropped_rows: u64,
    /// Number of rows that each epoch repeats to fill the last batch.
    pub padded_rows: u64,
    /// One result per number of workers that the replay tried.
    pub world_sizes: Vec<ReplayedSize>,
}

/// The result of a replay with a given number of workers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplayedSize {
    /// Number of workers.
    pub workers: u32,
    /// Smallest number of rows that a worker gets from a batch.
    pub slice_rows_min: u64,
    /// Largest number of rows that a worker gets from a batch.
    pub slice_rows_max: u64,
    /// Hash of the global order of the rows in all epochs. It is the same for every number of workers.
    pub order: String,
}

/// The retrieval head that can use the embeddings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ImageHead {
    /// GeoCLIP's image head.
    Geoclip,
    /// The linear head for simulated embeddings of world 1. It maps them back to GeoCLIP's space with the transpose of
    /// the projection that made them.
    Linear,
    /// Only a head that was trained on such embeddings: they are simulated embeddings of world 2.
    Trained,
    /// Unknown.
    None,
}

impl ImageHead {
    /// Whether this head is only for simulated embeddings.
    pub fn is_of_simulated(self) -> bool {
        matches!(self, Self::Linear | Self::Trained)
    }
}

/// Mean and standard deviation of every dimension of the embeddings, computed from view 0 of each row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// Number of rows.
    pub rows: u64,
    /// Mean of every dimension of the embeddings.
    pub mean: Vec<f64>,
    /// Population standard deviation of every dimension of the embeddings.
    pub standard_deviation: Vec<f64>,
}

/// Result of `shards inspect`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Inspection {
    /// Number of rows in all files.
    pub rows: u64,
    /// Number of rows that have coordinates, according to the manifest; all rows without a manifest.
    pub rows_with_coordinates: u64,
    /// Number of rows that are left out because they are unusable.
    pub skipped_rows: u64,
    /// Description of the rows that are left out; `None` if no rows are left out.
    pub skipped: Option<String>,
    /// Number of files.
    pub files: usize,
    /// Number of row groups that are not empty.
    pub row_groups: usize,
    /// Smallest and largest number of rows in a row group.
    pub row_group_rows: (u32, u32),
    /// Names that the columns have in the first file. The keys are `embedding`, `latitude`, `longitude` and, if there
    /// is an id column, `id`.
    pub columns: BTreeMap<String, String>,
    /// Width of an embedding.
    pub width: usize,
    /// Embeddings per row.
    pub views: u32,
    /// Whether the data has a manifest. If so, every read is compared with the checksums in the manifest.
    pub manifest: bool,
    /// Fingerprint of the data, sixteen hexadecimal digits.
    pub fingerprint: String,
    /// Origin of the rows, from the manifest.
    pub source: Option<String>,
    /// The retrieval head that can use the embeddings, from the manifest.
    pub image_head: Option<ImageHead>,
    /// Smallest and largest latitude, degrees.
    #[serde(deserialize_with = "null_range_as_nan")]
    pub latitudes: (f64, f64),
    /// Smallest and largest longitude, degrees.
    #[serde(deserialize_with = "null_range_as_nan")]
    pub longitudes: (f64, f64),
    /// Smallest and largest mean among the dimensions of the embeddings.
    #[serde(deserialize_with = "null_range_as_nan")]
    pub means: (f64, f64),
    /// Smallest and largest standard deviation among the dimensions of the embeddings.
    #[serde(deserialize_with = "null_range_as_nan")]
    pub standard_deviations: (f64, f64),
    /// Mean and standard deviation of every dimension of the embeddings.
    pub statistics: Statistics,
    /// World map of the rows as lines of text. The first character is at 90° north and 180° west. Denser characters
    /// mean more rows.
    pub map: Vec<String>,
}

/// Reads the two bounds of a range. If there are no rows, the bounds are infinite, and serde_json writes infinity as
/// null. This function reads null as NaN.
fn null_range_as_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(f64, f64), D::Error> {
    #[derive(Deserialize)]
    struct Bound(#[serde(deserialize_with = "null_as_nan")] f64);
    let (low, high) = <(Bound, Bound)>::deserialize(deserializer)?;
    Ok((low.0, high.0))
}

/// Result of `geoclip import`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GeoclipImported {
    /// The folder.
    pub out: PathBuf,
    /// Description of where the files came from.
    pub source: String,
    /// Files in the folder, by name.
    pub files: BTreeMap<String, Written>,
    /// Whether the folder was written; false if it already had these weights.
    pub written: bool,
    /// Duration.
    pub seconds: f64,
}

/// Result of `bench shards`: how fast one core reads embeddings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardsBenched {
    /// Version of pyarrow; `None` if pyarrow was not measured.
    pub peer: Option<String>,
    /// One entry per case.
    pub rows: Vec<ReadingSpeed>,
}

/// One case of `bench shards`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReadingSpeed {
    /// Name of the case.
    pub case: String,
    /// Speed of our reader: size of the stored embeddings divided by the median wall-clock time, in GB/s.
    pub gb_per_s: f64,
    /// Speed of pyarrow, computed like `gb_per_s`; `None` if pyarrow was not measured.
    pub pyarrow_gb_per_s: Option<f64>,
    /// `gb_per_s` divided by `pyarrow_gb_per_s`.
    pub ratio: Option<f64>,
    /// Speed of our reader per core: size of the stored embeddings divided by the median CPU time, in GB/s. Other work
    /// on the machine affects CPU time less than wall-clock time.
    pub gb_per_core_s: f64,
    /// Speed of pyarrow, computed like `gb_per_core_s`; `None` if pyarrow was not measured.
    pub pyarrow_gb_per_core_s: Option<f64>,
}
