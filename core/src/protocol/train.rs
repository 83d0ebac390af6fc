//! Messages about training and checkpoints.
//!
//! Each rank writes its parts of a checkpoint into the folder [`partial_name`] and reports them to the launcher. When
//! all ranks have reported, the launcher commits the checkpoint. The name of the partial folder contains the number of
//! the attempt, so that files written by a worker of an earlier attempt are never committed.

use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize};

use super::fault::InjectedFault;
use super::goodput::Goodput;
use crate::config::RunConfig;
use crate::metrics::Overlaps;

/// Version of the layout of a checkpoint folder.
pub const CHECKPOINT_FORMAT: u32 = 1;

/// Name of the file that completes a checkpoint. It is written last and lists all other files.
pub const CHECKPOINT_MANIFEST: &str = "manifest.json";

/// The file of a checkpoint that describes the state of the training.
pub const CHECKPOINT_STATE: &str = "state.json";

/// Name of the folder of a committed checkpoint, inside the run folder.
pub fn step_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// Name of the folder that holds the parts of a checkpoint before the commit, inside the run folder.
pub fn partial_name(step: u64, attempt: u32) -> String {
    format!(".{}.attempt-{attempt}.partial", step_name(step))
}

/// Training, from the first step or from a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainJob {
    /// The resolved configuration of the run.
    pub config: RunConfig,
    /// Folder of the run. The launcher has created it.
    pub run_dir: PathBuf,
    /// Checkpoint to resume from, which the launcher has verified; `None`: start at the first step.
    pub resume: Option<PathBuf>,
    /// Checkpoint that holds the initial weights of a new run; `None`: random weights. The launcher has verified the
    /// checkpoint.
    pub init_from: Option<PathBuf>,
    /// Highest validation score of the existing checkpoints; `None` if no checkpoint has a score.
    pub best_score: Option<f64>,
    /// Number of earlier attempts of this run.
    pub restarts: u32,
    /// Number of nodes that take part.
    pub nodes: u32,
    /// How the run spent its time before this attempt.
    pub time_before: TimeBefore,
    /// Faults to inject.
    pub faults: Vec<InjectedFault>,
}

/// How a run spent its time before an attempt. For TensorBoard, rank 0 adds the times that it measures during the
/// attempt.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct TimeBefore {
    /// Time that the run has spent on each kind of work before the attempt.
    pub spent: Goodput,
    /// When the attempt began, seconds since 1970.
    pub began_unix_s: f64,
    /// Whether the same launcher has made an earlier attempt.
    pub is_restart: bool,
}

/// Progress of training, from rank 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Number of steps completed.
    pub step: u64,
    /// Total number of steps.
    pub steps: u64,
    /// Loss of the last step over the global batch; may be NaN.
    #[serde(deserialize_with = "null_as_nan")]
    pub loss: f64,
    /// Global norm of the gradient before clipping; may be NaN.
    #[serde(deserialize_with = "null_as_nan")]
    pub gradient_norm: f64,
    /// Learning rate of the last step.
    pub learning_rate: f64,
    /// Rows per second over all workers since the last report.
    pub samples_per_s: f64,
    /// Fraction of the time since the last report that rank 0 spent waiting for data, 0 to 1.
    pub data_wait: f64,
    /// Time of the slowest step since the last report, milliseconds. The time of a step includes its checkpoint, but
    /// not its evaluation and histograms. The step at which this report is sent is not included; the next report
    /// includes it.
    pub slowest_step_ms: f64,
    /// Steps skipped so far because the gradient was not finite.
    pub skipped_steps: u64,
}

/// Reads null as NaN. JSON has no NaN, so serde_json writes NaN as null.
pub(super) fn null_as_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// Result of a quick evaluation during training, from rank 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QuickEvaluation {
    /// Number of steps completed.
    pub step: u64,
    /// Number of validation rows.
    pub rows: u64,
    /// Mean GeoScore, 0 to 5000. The best checkpoint is the one with the highest score.
    #[serde(deserialize_with = "null_as_nan")]
    pub score: f64,
    /// Percent of rows within 1, 25, 200, 750 and 2500 km.
    pub within_percent: [f64; 5],
}

/// Result of training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainSummary {
    /// Total number of steps completed.
    pub step: u64,
    /// Number of steps that were completed before this attempt.
    pub from_step: u64,
    /// Loss of the last step; `None` if no steps were left to do or the loss is not finite.
    pub loss: Option<f64>,
    /// Steps skipped because the gradient was not finite.
    pub skipped_steps: u64,
    /// The last quick evaluation of this attempt.
    pub evaluation: Option<QuickEvaluation>,
    /// Whether training ended early because the launcher asked for it.
    pub stopped: bool,
    /// How many test places lie near training places and gallery points; `None` without test rows, or if training ended
    /// before they were counted.
    pub overlap: Option<Overlaps>,
}

/// One file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointFile {
    /// File name within the checkpoint folder.
    pub name: String,
    /// Length of the file.
    pub bytes: u64,
    /// xxh3 checksum, sixteen hexadecimal digits.
    pub xxh3: String,
}

/// A rank has written its parts of a checkpoint and synced them to disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartsWritten {
    /// Number of steps completed.
    pub step: u64,
    /// Number of the attempt that the worker belongs to.
    pub attempt: u32,
    /// Files that the rank wrote; may be empty.
    pub files: Vec<CheckpointFile>,
    /// Validation score at this step, the same on every rank; `None` if it was not measured.
    pub score: Option<f64>,
}

/// `manifest.json` of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointManifest {
    /// Layout version, [`CHECKPOINT_FORMAT`].
    pub format: u32,
    /// Number of steps completed.
    pub step: u64,
    /// Number of the attempt that wrote the checkpoint.
    pub attempt: u32,
    /// Version of the code that wrote the checkpoint.
    pub version: String,
    /// Git revision of the code that wrote the checkpoint.
    pub revision: String,
    /// Time of the commit, seconds since 1970.
    pub committed_unix_s: u64,
    /// Validation score at this step; `None` if it was not measured.
    pub score: Option<f64>,
    /// All files of the checkpoint except the manifest, sorted by name.
    pub files: Vec<CheckpointFile>,
}
