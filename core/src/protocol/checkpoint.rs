//! What the launcher asks of a worker about a checkpoint.

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
