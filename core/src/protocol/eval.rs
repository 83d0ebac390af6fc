//! What launcher and workers say about evaluation.
//!
//! The workers share the rows of a data set and tell where each is, block by block; the launcher puts them in order, writes
//! them to files, and lets one worker score these.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::{RetrievalHead, RunConfig};

/// Where is every row of a data set, by the averaged weights of a checkpoint?
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalJob {
    /// The resolved configuration. Network and schedule are the checkpoint's own.
    pub config: RunConfig,
    /// A whole checkpoint.
    pub checkpoint: PathBuf,
    /// The shards: a folder, a file, a glob or a URL.
    pub data: String,
    /// Whether retrieval and LocDiff-H are wanted.
    pub hybrid: HybridWish,
    /// How far off is each of the settings of LocDiff-H that tuning chooses from?
    pub tune: bool,
}

/// Whether retrieval and LocDiff-H are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HybridWish {
    /// No.
    No,
    /// Yes; a head that does not fit the data is an error.
    Wanted,
    /// Where the head fits the data; where it does not, the reason is said.
    IfItFits,
}

/// A way of locating a photo.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Retrieval alone.
    Retrieval,
    /// LocDiff alone.
    Locdiff,
    /// LocDiff-H: retrieval where LocDiff points.
    LocdiffH,
}

impl Method {
    /// Its name in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Retrieval => "retrieval",
            Self::Locdiff => "locdiff",
            Self::LocdiffH => "locdiff-h",
        }
    }
}

/// Rows that a rank has located.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Located {
    /// Rows of the whole data set.
    pub of_rows: u64,
    /// These.
    pub rows: Vec<LocatedRow>,
}

/// Where one row is. Places are latitude and longitude, degrees.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LocatedRow {
    /// Its place among the rows of the data that can be used, from 0.
    pub index: u64,
    /// Its identifier.
    pub id: String,
    /// Where it really is.
    pub truth: [f64; 2],
    /// The answer of each method.
    pub answers: Vec<(Method, [f64; 2])>,
    /// The first sample, for density and coverage.
    pub sample: [f64; 2],
    /// No gallery point was in range, so that LocDiff-H's answer is LocDiff's.
    pub out_of_range: bool,
    /// What settings are chosen by, where they are tuned.
    pub tuning: Option<TuningErrors>,
}

/// How far off the answers for one row are, km.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TuningErrors {
    /// LocDiff's.
    pub own: f32,
    /// That of retrieval alone.
    pub retrieval: f32,
    /// LocDiff-H's under each setting.
    pub settings: Vec<f32>,
}

/// What each rank says of the data at the end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalSummary {
    /// Steps of the checkpoint.
    pub step: u64,
    /// Degree of its codes.
    pub degree: u32,
    /// Rows of the whole data set that were to be located.
    pub rows: u64,
    /// Rows that cannot be used and were left out.
    pub skipped_rows: u64,
    /// Views of each row.
    pub views: u32,
    /// Where the rows came from, as the manifest says; none without one.
    pub source: Option<String>,
    /// They were simulated.
    pub is_simulated: bool,
    /// Stands for the data.
    pub fingerprint: String,
    /// Points that codes are decoded among.
    pub anchors: u64,
    /// What made queries of embeddings, where there was retrieval.
    pub head: Option<RetrievalHead>,
    /// Points to retrieve from, where there was retrieval.
    pub gallery_points: Option<u64>,
}

/// How good are the answers in these files?
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScoreJob {
    /// CSV with id, lat and lon of the truth.
    pub truth: PathBuf,
    /// The same rows in the same order for each method.
    pub methods: Vec<ScoreMethod>,
    /// Distances within which answers are counted, km.
    pub thresholds_km: Vec<f64>,
    /// Seed of the bootstrap.
    pub seed: u64,
    /// What was located, in words.
    pub data: String,
    /// Folder of event files and step at which the numbers go there.
    pub board: Option<(PathBuf, u64)>,
}

/// Answers of one method.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScoreMethod {
    /// Which.
    pub method: Method,
    /// CSV with id, lat and lon of its answers.
    pub answers: PathBuf,
    /// CSV with one sample per row, for density and coverage; none: the answers are the samples.
    pub samples: Option<PathBuf>,
}

/// Which settings of LocDiff-H are best?
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChooseJob {
    /// The rows that were located, one JSON object of [`LocatedRow`] on each line, in the order of the data.
    pub rows: PathBuf,
    /// Distances within which answers are counted, km.
    pub thresholds_km: Vec<f64>,
}

/// How good are anybody's predictions?
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PredictionsJob {
    /// CSV or Parquet with identifiers and coordinates.
    pub file: PathBuf,
    /// Where the truth is: `eval.truth`, or `shards.test`.
    pub config: RunConfig,
}
