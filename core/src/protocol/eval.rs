//! What launcher and workers say about evaluation.
//!
//! The workers share the rows of a data set and tell where each is, block by block; the launcher puts them in order, writes
//! them to files, and scores these.

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

/// How far off the answers for one row are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TuningErrors {
    /// LocDiff's error.
    pub own_km: f32,
    /// The error of retrieval alone.
    pub retrieval_km: f32,
    /// LocDiff-H's error under each of [`crate::tuning::settings`].
    pub settings_km: Vec<f32>,
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

/// The gallery's embeddings lie on the disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GalleryEmbedded {
    /// How many there are; none where the head does not fit the data.
    pub points: Option<usize>,
}

/// A Parquet file with id, lat and lon of every usable row of the test shards.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TruthWritten {
    /// The rows were simulated.
    pub is_simulated: bool,
}
