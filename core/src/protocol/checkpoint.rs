//! Messages about the export of a checkpoint.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::RunConfig;

/// Exports the averaged weights of a checkpoint to one file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExportJob {
    /// Folder of the checkpoint. The launcher has verified its files.
    pub checkpoint: PathBuf,
    /// Configuration of the run. It is used only if the checkpoint contains no configuration.
    pub config: RunConfig,
    /// File to write.
    pub out: PathBuf,
    /// Whether to replace `out` if it exists.
    pub overwrite: bool,
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
    /// xxh3 checksum of the file.
    pub xxh3: String,
}
