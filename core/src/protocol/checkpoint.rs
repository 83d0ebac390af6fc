//! Messages about the export of a checkpoint.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::RunConfig;

/// Exports the averaged weights of a checkpoint to one file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExportJob {
    /// Folder of the checkpoint, verified by the launcher.
    pub checkpoint: PathBuf,
    /// Configuration of the run, for a checkpoint that does not contain its own.
    pub config: RunConfig,
    /// File to write.
    pub out: PathBuf,
    /// Replace the file if it exists.
    pub overwrite: bool,
}

/// Result of an export.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Exported {
    /// The exported file.
    pub out: PathBuf,
    /// Folder of the checkpoint.
    pub checkpoint: PathBuf,
    /// Training steps of the checkpoint.
    pub step: u64,
    /// Validation score of the checkpoint, if measured.
    pub score: Option<f64>,
    /// Degree of the model.
    pub degree: u32,
    /// Number of tensors in the file.
    pub tensors: usize,
    /// Number of elements in all tensors.
    pub numbers: usize,
    /// Length of the file.
    pub bytes: u64,
    /// xxh3 checksum of the file.
    pub xxh3: String,
}
