//! What launcher and workers say about training and checkpoints.
//!
//! Every rank writes its parts of a checkpoint into [`partial_name`] and says so; the launcher, once all have, commits it.
//! A partial folder carries the attempt in its name: what a worker of an older attempt writes is never committed.

use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize};

use crate::config::RunConfig;

/// Version of the layout of a checkpoint folder.
pub const CHECKPOINT_FORMAT: u32 = 1;

/// Name of the file that makes a folder a checkpoint: written last, it lists all others.
pub const CHECKPOINT_MANIFEST: &str = "manifest.json";

/// Folder of a committed checkpoint within its run.
pub fn step_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// Folder that the parts of a checkpoint are written into before the commit.
pub fn partial_name(step: u64, attempt: u32) -> String {
    format!(".{}.attempt-{attempt}.partial", step_name(step))
}

/// Training, from the first step or from a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainJob {
    /// The resolved configuration of the run.
    pub config: RunConfig,
    /// Folder of the run; it exists.
    pub run_dir: PathBuf,
    /// The checkpoint to go on from, verified by the launcher; none: the first step.
    pub resume: Option<PathBuf>,
    /// The checkpoint whose averaged weights a new run starts from, verified by the launcher; none: random weights.
    pub init_from: Option<PathBuf>,
    /// Highest validation score of the checkpoints that exist.
    pub best_score: Option<f64>,
    /// How often the workers of this run have been started before.
    pub restarts: u32,
    /// What to break on purpose.
    pub faults: Vec<Fault>,
}

/// Something to break on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// A rank sends itself SIGKILL when it is about to begin a step (counted from 1).
    Kill {
        /// Which rank.
        rank: u32,
        /// Which step.
        step: u64,
    },
}

/// How training is going; from rank 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps made.
    pub step: u64,
    /// Steps wanted.
    pub steps: u64,
    /// Loss of the last step, over the global batch; may be no number.
    #[serde(deserialize_with = "number_or_none")]
    pub loss: f64,
    /// Norm of the whole gradient before clipping; may be no number.
    #[serde(deserialize_with = "number_or_none")]
    pub gradient_norm: f64,
    /// Learning rate of the last step.
    pub learning_rate: f64,
    /// Rows per second over all workers since the last report.
    pub samples_per_s: f64,
    /// Share of the time since the last report that rank 0 waited for data, 0 to 1.
    pub data_wait: f64,
    /// The longest step from the one of the last report to the one before this, checkpoints included, evaluation not:
    /// milliseconds.
    pub slowest_step_ms: f64,
    /// Steps skipped so far because their gradient was not finite.
    pub skipped_steps: u64,
}

/// JSON has no NaN: it travels as null.
pub(super) fn number_or_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// A quick evaluation while training; from rank 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QuickEvaluation {
    /// Steps made.
    pub step: u64,
    /// Validation rows that were located.
    pub rows: u64,
    /// What the best checkpoint is chosen by: the mean GeoScore, 0 to 5000.
    #[serde(deserialize_with = "number_or_none")]
    pub score: f64,
    /// Percent of rows within 1, 25, 200, 750 and 2500 km.
    pub within_percent: [f64; 5],
}

/// What training came to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainSummary {
    /// Steps made in all.
    pub step: u64,
    /// Step that this attempt began at.
    pub from_step: u64,
    /// Loss of the last step; none where there was nothing left to do, or where it is not finite.
    pub loss: Option<f64>,
    /// Steps skipped because their gradient was not finite.
    pub skipped_steps: u64,
    /// The last quick evaluation of this attempt.
    pub evaluation: Option<QuickEvaluation>,
}

/// One file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointFile {
    /// Its name within the folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// xxh3 of its bytes, sixteen hexadecimal digits.
    pub xxh3: String,
}

/// A rank has written its parts of a checkpoint, and they are on the disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartsWritten {
    /// Steps made.
    pub step: u64,
    /// The attempt that this worker belongs to.
    pub attempt: u32,
    /// What it wrote; may be nothing.
    pub files: Vec<CheckpointFile>,
    /// Validation score at this step, where it was measured; the same from every rank.
    pub score: Option<f64>,
}

/// `manifest.json` of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointManifest {
    /// [`CHECKPOINT_FORMAT`].
    pub format: u32,
    /// Steps made.
    pub step: u64,
    /// The attempt that wrote it.
    pub attempt: u32,
    /// Version of the code that wrote it.
    pub version: String,
    /// Git revision of that code.
    pub revision: String,
    /// When it was committed, seconds since 1970.
    pub committed_unix_s: u64,
    /// Validation score, where it was measured at this step.
    pub score: Option<f64>,
    /// Every other file of the folder, by name.
    pub files: Vec<CheckpointFile>,
}
