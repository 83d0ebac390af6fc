//! What launcher and worker say about the export of a checkpoint.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::RunConfig;

/// One file of averaged weights, made from a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExportJob {
    /// Folder of the checkpoint; the launcher has found it whole.
    pub checkpoint: PathBuf,
    /// Configuration of the run, for a checkpoint whose state does not have its own.
    pub config: RunConfig,
    /// The file to make.
    pub out: PathBuf,
    /// Replace it if it exists.
    pub overwrite: bool,
}

/// The file that was made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Exported {
    /// Where it is.
    pub out: PathBuf,
    /// Folder of the checkpoint.
    pub checkpoint: PathBuf,
    /// Steps of the checkpoint.
    pub step: u64,
    /// Its validation score, where it was measured.
    pub score: Option<f64>,
    /// Degree of the model.
    pub degree: u32,
    /// Tensors in the file.
    pub tensors: usize,
    /// Numbers in all of them.
    pub numbers: usize,
    /// Length of the file.
    pub bytes: u64,
    /// Checksum of the file.
    pub xxh3: String,
}
