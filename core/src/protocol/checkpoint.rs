//! Messages about the export of a checkpoint.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Exports the averaged weights of a checkpoint to one file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExportJob {
    /// Folder of the checkpoint. The launcher has verified its files.
    pub checkpoint: PathBuf,
    /// What to export from the folder of the run.
    pub run: RunParts,
    /// File to write.
    pub out: PathBuf,
    /// Whether to replace `out` if it exists.
    pub overwrite: bool,
}

/// What an export takes from the folder of a run, as the texts of the files there. It is empty if the checkpoint is not
/// in the folder of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunParts {
    /// The configuration of the run, as TOML.
    pub config: Option<String>,
    /// Settings of LocDiff-H that were tuned with `eval.prior = "training"`, as TOML.
    pub tuned: Option<String>,
    /// Settings of LocDiff-H that were tuned with `eval.prior = "even"`, as TOML.
    pub tuned_even: Option<String>,
    /// The calibration of LocDiff, as JSON.
    pub calibration: Option<String>,
    /// The calibration of LocDiff-H, as JSON.
    pub calibration_hybrid: Option<String>,
    /// For each run of an image head that the configuration or the tuned settings name (`retrieval.run`), the checksum
    /// of the manifest of its checkpoint.
    pub heads: BTreeMap<String, String>,
}

/// Result of an export.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Exported {
    /// The exported file.
    pub out: PathBuf,
    /// Folder of the checkpoint.
    pub checkpoint: PathBuf,
    /// Number of training steps completed at the checkpoint.
    pub step: u64,
    /// Validation score of the checkpoint; `None` if it was not measured.
    pub score: Option<f64>,
    /// Degree of the model.
    pub degree: u32,
    /// Number of tensors in the file.
    pub tensors: usize,
    /// Number of elements in all tensors.
    pub numbers: usize,
    /// Length of the file, in bytes.
    pub bytes: u64,
    /// The xxh3 checksum in the metadata of the file.
    pub xxh3: String,
}
