//! Messages about evaluation.
//!
//! The rows of a data set are divided among the workers. Each worker sends its located rows block by block. The
//! launcher sorts the rows of all workers, writes them to files, and computes the scores.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::config::{RetrievalHead, RunConfig};

/// Locates every row of a data set with the averaged weights of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalJob {
    /// The resolved configuration. The job uses the network and the noise schedule of the checkpoint, not those of this
    /// configuration.
    pub config: RunConfig,
    /// The model: the folder of a checkpoint, or an exported file. The launcher has verified it.
    pub checkpoint: PathBuf,
    /// Checksum of the manifest of the checkpoint. The job fails if the model has been replaced meanwhile.
    pub checkpoint_xxh3: String,
    /// The shards whose rows are located: a folder, a file, a glob or a URL.
    pub data: String,
    /// Whether to run retrieval and LocDiff-H.
    pub hybrid: HybridRequest,
    /// What to do with the located rows.
    pub task: EvalTask,
    /// The pieces that are located already, ascending. Piece k holds the usable rows from `k * piece_rows(count)` on.
    pub done: Vec<u64>,
}

/// What an evaluation job does with the rows that it locates.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvalTask {
    /// Send the answers of every method, and how near the true places are to known places. With a temperature, also
    /// send the density at each true place.
    Evaluate {
        /// Temperature of the densities. `None` without a calibration: then densities at true places are not wanted,
        /// and those of report photos have the default temperature.
        temperature: Option<f64>,
        /// Number of photos to send as [`ReportPhoto`], at most; they are spread evenly over the rows. A method without
        /// samples sends none.
        report_photos: u32,
    },
    /// Send the distance errors of LocDiff-H with each setting that [`crate::tuning::Trials`] tries if these fields of the
    /// section `retrieval` are fixed.
    Tune(BTreeMap<String, f64>),
    /// Send predictions.
    Predict(Prediction),
}

impl EvalTask {
    /// Whether the true places of the rows must be known.
    pub fn needs_truth(&self) -> bool {
        !matches!(self, Self::Predict(Prediction { with_truth: false, .. }))
    }

    /// The temperatures at which the density at each true place is wanted.
    pub fn truth_temperatures(&self) -> &[f64] {
        match self {
            Self::Evaluate { temperature, .. } => temperature.as_slice(),
            Self::Tune(_) => &[],
            Self::Predict(wanted) => &wanted.truth_temperatures,
        }
    }

    /// The temperature at which whole densities are wanted; `None` if they are not wanted.
    pub fn cells_temperature(&self) -> Option<f64> {
        match self {
            Self::Predict(wanted) => wanted.cells_temperature,
            _ => None,
        }
    }

    /// A GeoJSON file with what is known about the places; `None` if nothing is.
    pub fn prior(&self) -> Option<&Path> {
        match self {
            Self::Predict(wanted) => wanted.prior.as_deref(),
            _ => None,
        }
    }
}

/// Which rows to predict, and what to send for each row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// Whether to send the true places too. Then the rows must have coordinates. Otherwise coordinates are ignored.
    pub with_truth: bool,
    /// Whether to send all samples.
    pub with_samples: bool,
    /// The temperatures at which to send the density at each true place, if `with_truth` is true.
    pub truth_temperatures: Vec<f64>,
    /// The temperature at which to send the density of each row as cells; `None` if no densities are wanted.
    pub cells_temperature: Option<f64>,
    /// A GeoJSON file with what is known about the places; `None` if nothing is. See [`crate::prior_file`].
    pub prior: Option<PathBuf>,
    /// Whether to leave out bad rows, whatever `shards.on_bad_rows` says about other data.
    pub skips_bad_rows: bool,
}

/// Number of rows in a piece of a data set with `count` rows. After a failure, the pieces that were not complete are
/// located again.
pub fn piece_rows(count: u64) -> u64 {
    const PIECES: u64 = 64;
    count.div_ceil(PIECES).next_multiple_of(PIECE_ROWS_MIN).clamp(PIECE_ROWS_MIN, PIECE_ROWS_MAX)
}

/// Fewest rows in a piece: the largest block on a GPU.
const PIECE_ROWS_MIN: u64 = 256;
/// Most rows in a piece. The launcher keeps the unfinished pieces in memory.
const PIECE_ROWS_MAX: u64 = 4096;

/// A photo to locate while a worker serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhotoToLocate {
    /// Number that the launcher gave the photo. The answer has this number as [`PredictedRow::index`].
    pub number: u64,
    /// The embedding: the bits of its float16 numbers.
    pub embedding: Vec<u16>,
    /// Whether the density is wanted too.
    pub with_density: bool,
}

/// A photo that cannot be located, for example because LocDiff-H cannot use an embedding of zeros.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedPhoto {
    /// Number of the photo.
    pub number: u64,
    /// Why the photo cannot be located.
    pub reason: String,
}

/// The model that a worker serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedModel {
    /// Training steps of the checkpoint.
    pub step: u64,
    /// Width of the embeddings that the model takes.
    pub width: u32,
    /// Retrieval head that makes the queries; `None` without retrieval.
    pub head: Option<RetrievalHead>,
    /// Number of gallery points; `None` without retrieval.
    pub gallery_points: Option<u64>,
}

/// Rows that a rank has predicted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PredictedRows {
    /// Number of usable rows in the whole data set; 0 while a worker serves.
    pub of_rows: u64,
    /// Changes if the data changes; empty while a worker serves.
    pub data_version: String,
    /// The predicted rows. Each worker sends its rows in their order. Its first and its last message have no rows.
    pub rows: Vec<PredictedRow>,
}

/// The prediction for one row. Each place is a pair of latitude and longitude, degrees.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PredictedRow {
    /// Index of the row among the usable rows of the data set, from 0; or [`PhotoToLocate::number`].
    pub index: u64,
    /// Identifier of the row.
    pub id: String,
    /// The answer.
    pub answer: [f64; 2],
    /// Mean distance from the samples to the answer, km. With a prior, samples count by weight, also in the shares
    /// below.
    pub spread_km: f64,
    /// Share of the samples that are nearer to the answer than to any alternative.
    pub weight: f64,
    /// Other places where the photo may have been taken, the most likely one first.
    pub alternatives: Vec<Alternative>,
    /// All samples, if [`Prediction::with_samples`] is true.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub samples: Vec<[f64; 2]>,
    /// The true place, if [`Prediction::with_truth`] is true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub truth: Option<[f64; 2]>,
    /// What the samples say about the density.
    #[serde(default, skip_serializing_if = "RowDensity::is_empty")]
    pub density: RowDensity,
}

/// The density of the place of one row, as far as it is wanted. It is empty without samples that have a density.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RowDensity {
    /// Logarithm of the density at the true place, per km², for each of [`EvalTask::truth_temperatures`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub log_at_truth: Vec<f64>,
    /// Cells that together cover the Earth. Each cell has its number in the scheme of [`crate::geo::unique_cell`], and its
    /// probability.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cells: Vec<(u64, f32)>,
}

impl RowDensity {
    /// Whether no density is known.
    pub fn is_empty(&self) -> bool {
        self.log_at_truth.is_empty() && self.cells.is_empty()
    }
}

/// A photo that the report shows by itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReportPhoto {
    /// The answer of the evaluation, with the truth, the alternatives and the samples.
    pub row: PredictedRow,
    /// Densities at some denoising steps, from the first step to the last.
    pub steps: Vec<StepDensity>,
}

/// The density of the clean codes that the network predicts at a denoising step: the mean over the samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepDensity {
    /// The diffusion timestep.
    pub timestep: u64,
    /// Cells that together cover the Earth, as in [`RowDensity::cells`].
    pub cells: Vec<(u64, f32)>,
}

/// A place where a photo may have been taken.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// Latitude and longitude, degrees.
    pub place: [f64; 2],
    /// Share of the samples that are nearer to this place than to the answer or any other alternative.
    pub weight: f64,
}

/// Whether to run retrieval and LocDiff-H.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HybridRequest {
    /// Run neither retrieval nor LocDiff-H.
    No,
    /// Run retrieval and LocDiff-H. The job fails if the retrieval head cannot use the embeddings of the data.
    Wanted,
    /// Run retrieval and LocDiff-H if the retrieval head can use the embeddings of the data and a gallery of training
    /// photos is small enough. Otherwise leave them out and log the reason. A job that tunes LocDiff-H fails instead.
    IfItFits {
        /// Memory that a gallery of training photos may take in each worker, in bytes.
        gallery_bytes_max: u64,
    },
}

/// A way of locating a photo.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Retrieval alone: the gallery point that is most similar to the photo.
    Retrieval,
    /// Retrieval alone, with consensus: a vote among the most similar gallery points.
    RetrievalConsensus,
    /// LocDiff alone.
    Locdiff,
    /// LocDiff-H: retrieval among the gallery points near LocDiff's answer or samples.
    LocdiffH,
}

impl Method {
    /// Name of the method in result files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Retrieval => "retrieval",
            Self::RetrievalConsensus => "retrieval-consensus",
            Self::Locdiff => "locdiff",
            Self::LocdiffH => "locdiff-h",
        }
    }
}

/// Rows that a rank has located.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LocatedRows {
    /// Number of usable rows in the whole data set.
    pub of_rows: u64,
    /// [`EvalSummary::fingerprint`].
    pub fingerprint: String,
    /// The located rows.
    pub rows: Vec<LocatedRow>,
}

/// The answers for one row. Each location is a pair of latitude and longitude, degrees.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LocatedRow {
    /// Index of the row among the usable rows of the data set, from 0.
    pub index: u64,
    /// Identifier of the row.
    pub id: String,
    /// True location.
    pub truth: [f64; 2],
    /// Answer of each method.
    pub answers: Vec<(Method, [f64; 2])>,
    /// LocDiff's first sample, for the density and coverage metrics.
    pub sample: [f64; 2],
    /// Whether no gallery point was within the radius of a sample (mode `any-sample`). In this case LocDiff-H gives the
    /// same answer as LocDiff.
    pub out_of_range: bool,
    /// Mean distance from the samples to the answer of the last method, km.
    pub spread_km: f64,
    /// What the samples say about the density.
    #[serde(default, skip_serializing_if = "RowDensity::is_empty")]
    pub density: RowDensity,
    /// Distance errors of LocDiff-H with each candidate setting; `None` unless the task is [`EvalTask::Tune`].
    pub tuning: Option<TuningErrors>,
}

/// Distances from the true places of some consecutive rows to the nearest known places. Rank 0 sends one or more of
/// these messages, which together cover all rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NearestKnown {
    /// Distance of each row to the nearest training place, km; `None` if the training places cannot be read.
    pub training_km: Option<Vec<f32>>,
    /// Distance of each row to the nearest gallery point, km; `None` if no gallery is used.
    pub gallery_km: Option<Vec<f32>>,
}

/// Errors of the answers for one row, km.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TuningErrors {
    /// Error of LocDiff.
    pub own_km: f32,
    /// Error of retrieval alone.
    pub retrieval_km: f32,
    /// Error of retrieval with consensus, for each of [`crate::tuning::Trials::consensus`].
    pub consensus_km: Vec<f32>,
    /// Error of LocDiff-H with each of [`crate::tuning::Trials::hybrid`].
    pub settings_km: Vec<f32>,
}

/// Result of an evaluation. Every rank sends this message at the end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalSummary {
    /// Training steps of the checkpoint.
    pub step: u64,
    /// Degree of the checkpoint's codes.
    pub degree: u32,
    /// Number of usable rows in the whole data set. All of them are located.
    pub rows: u64,
    /// Number of unusable rows, which were left out.
    pub skipped_rows: u64,
    /// Views per row in the shards.
    pub views: u32,
    /// Number of views that were averaged into one embedding.
    pub mean_views: u32,
    /// Origin of the rows, from the manifest; `None` without a manifest.
    pub source: Option<String>,
    /// Whether the rows are simulated.
    pub is_simulated: bool,
    /// Fingerprint of the data.
    pub fingerprint: String,
    /// Number of anchors: the candidate points that codes are decoded to.
    pub anchors: u64,
    /// Retrieval head that made the queries; `None` without retrieval.
    pub head: Option<RetrievalHead>,
    /// Number of gallery points; `None` without retrieval.
    pub gallery_points: Option<u64>,
}

/// Result of [`Job::Gallery`](super::Job::Gallery): the embeddings of the gallery are stored on disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GalleryEmbedded {
    /// Number of gallery points. `None` if no retrieval was requested, or if the gallery is the training photos. Also
    /// `None` if retrieval was optional and the retrieval head cannot use the embeddings of the data.
    pub points: Option<usize>,
}

/// Result of [`ShardsJob::Truth`](super::ShardsJob::Truth): a Parquet file with the id, latitude and longitude of every
/// usable test row has been written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TruthWritten {
    /// Whether the rows are simulated.
    pub is_simulated: bool,
}
