//! Messages about evaluation.
//!
//! The rows of a data set are divided among the workers, which send the located rows block by block. The launcher sorts
//! the rows, writes them to files, and scores the files.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::{RetrievalHead, RunConfig};

/// Locates every row of a data set with the averaged weights of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalJob {
    /// The resolved configuration. Network and noise schedule are taken from the checkpoint instead.
    pub config: RunConfig,
    /// Folder of an intact checkpoint.
    pub checkpoint: PathBuf,
    /// Shards to locate: a folder, a file, a glob or a URL.
    pub data: String,
    /// Whether to run retrieval and LocDiff-H.
    pub hybrid: HybridRequest,
    /// Whether to compute the errors of all LocDiff-H settings that tuning chooses from.
    pub tune: bool,
}

/// Whether to run retrieval and LocDiff-H.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HybridRequest {
    /// No.
    No,
    /// Yes. A head that does not fit the data is an error.
    Wanted,
    /// Only if the head fits the data. If it does not, the reason is logged.
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
    /// LocDiff-H: retrieval near LocDiff's answer.
    LocdiffH,
}

impl Method {
    /// Name of the method in files.
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
pub struct LocatedRows {
    /// Number of rows in the whole data set.
    pub of_rows: u64,
    /// The located rows.
    pub rows: Vec<LocatedRow>,
}

/// Answers for one row. Locations are latitude and longitude, degrees.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LocatedRow {
    /// Index among the usable rows of the data set, from 0.
    pub index: u64,
    /// Identifier of the row.
    pub id: String,
    /// True location.
    pub truth: [f64; 2],
    /// Answer of each method.
    pub answers: Vec<(Method, [f64; 2])>,
    /// First sample, for the density and coverage metrics.
    pub sample: [f64; 2],
    /// No gallery point was in range, so LocDiff-H's answer is LocDiff's.
    pub out_of_range: bool,
    /// Errors of all settings, if the job tunes them.
    pub tuning: Option<TuningErrors>,
}

/// Errors of the answers for one row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TuningErrors {
    /// Error of LocDiff.
    pub own_km: f32,
    /// Error of retrieval alone.
    pub retrieval_km: f32,
    /// Error of LocDiff-H with each of [`crate::tuning::settings`].
    pub settings_km: Vec<f32>,
}

/// Result of an evaluation, from each rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalSummary {
    /// Training steps of the checkpoint.
    pub step: u64,
    /// Degree of the checkpoint's codes.
    pub degree: u32,
    /// Number of rows in the whole data set that were to be located.
    pub rows: u64,
    /// Unusable rows that were left out.
    pub skipped_rows: u64,
    /// Views per row.
    pub views: u32,
    /// Origin of the rows, from the manifest; `None` without a manifest.
    pub source: Option<String>,
    /// Whether the rows are simulated.
    pub is_simulated: bool,
    /// Fingerprint of the data.
    pub fingerprint: String,
    /// Number of points that codes are decoded to.
    pub anchors: u64,
    /// Head that made the queries; `None` without retrieval.
    pub head: Option<RetrievalHead>,
    /// Number of gallery points; `None` without retrieval.
    pub gallery_points: Option<u64>,
}

/// The embeddings of the gallery are stored on disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GalleryEmbedded {
    /// Number of gallery points; `None` if the head does not fit the data.
    pub points: Option<usize>,
}

/// A Parquet file with the id, lat and lon of every usable test row has been written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TruthWritten {
    /// Whether the rows are simulated.
    pub is_simulated: bool,
}
