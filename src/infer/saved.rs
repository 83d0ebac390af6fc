//! Reads trained models.
//!
//! - [`SavedModel`]: what locating photos needs, from a checkpoint or from an exported file.
//! - [`Saved`]: the whole contents of a checkpoint, to resume training.

use std::path::{Path, PathBuf};

use locdiff_core::exported::{ExportReader, ModelState};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::Tensor;

use super::error::InferError;
use crate::checkpoint::{Checkpoint, CheckpointError, EMA, NamedTensors, STATE, load_export, piece_name};
use crate::model::{CsUnet, ModelError, Standardisation};
use crate::shards::Bookmark;
use crate::shdd::{Filter, ShddError};

/// A trained model on disk: a checkpoint, or an exported file.
#[derive(Debug)]
pub struct SavedModel {
    /// Folder of the checkpoint, or the exported file.
    pub path: PathBuf,
    /// Training steps done.
    pub step: u64,
    /// Checksum of the manifest of the checkpoint. An exported file has the checksum of the checkpoint that was
    /// exported.
    pub xxh3: String,
    /// The sizes of the network, and the configuration that it was trained with.
    pub state: ModelState,
    /// `None` for an exported file.
    checkpoint: Option<Checkpoint>,
}

impl SavedModel {
    /// Reads everything but the tensors. The metadata of an exported file is verified when the tensors are read.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        if path.is_file() {
            let found = ExportReader::open(path)?.metadata()?;
            let (step, xxh3, state) = (found.step, found.checkpoint, found.model);
            return Ok(Self { path: path.to_owned(), step, xxh3, state, checkpoint: None });
        }
        let checkpoint = Checkpoint::open(path)?;
        Ok(Self {
            path: path.to_owned(),
            step: checkpoint.manifest().step,
            xxh3: checkpoint.xxh3().to_owned(),
            state: checkpoint.model_state()?,
            checkpoint: Some(checkpoint),
        })
    }

    /// Like [`Self::open`], but fails unless the model has the checksum `xxh3`.
    pub fn open_exactly(path: &Path, xxh3: &str) -> Result<Self, InferError> {
        let found = Self::open(path)?;
        if found.xxh3 == xxh3 {
            return Ok(found);
        }
        let path = path.display();
        Err(InferError::BadData(format!("{path} was replaced by another model meanwhile; repeat the command")))
    }

    /// The low-pass filter of the codes; `None` if all dimensions are kept.
    pub fn filter(&self) -> Result<Option<Filter>, ShddError> {
        filter(self.state.kept_dimensions.as_deref(), self.state.degree)
    }

    /// The averaged weights.
    pub fn averages(&self) -> Result<Weights, InferError> {
        let tensors = match &self.checkpoint {
            None => load_export(&self.path)?,
            Some(checkpoint) => checkpoint.find_tensors(EMA)?.ok_or_else(|| {
                let (checkpoint, file) = (self.path.display(), piece_name(EMA, 0, 1));
                InferError::BadData(format!(
                    "{checkpoint} has no averaged weights (its manifest does not list {file}), which evaluation needs; \
                     use a checkpoint written by `locdiff-launch train`"
                ))
            })?,
        };
        Ok(Weights::of(&self.path, tensors)?)
    }
}

fn filter(kept: Option<&[u32]>, degree: u32) -> Result<Option<Filter>, ShddError> {
    let dims = (degree as usize + 1).pow(2);
    kept.map(|kept| Filter::from_indices(kept, dims)).transpose()
}

/// The contents of `state.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedState {
    /// Training steps done.
    pub step: u64,
    /// Optimiser updates done, which is the number of steps that were not skipped.
    pub updates: u64,
    /// Steps skipped in total.
    pub skipped_steps: u64,
    /// Number of steps skipped in a row, up to and including the last step. It is 0 if the last step was not skipped.
    pub skipped_in_a_row: u32,
    /// Degree of the spherical harmonics in the codes.
    pub degree: u32,
    /// Width of the embeddings.
    pub embedding_width: u32,
    /// Dimensions of the code that the low-pass filter keeps; `None` if all dimensions are kept.
    pub kept_dimensions: Option<Vec<u32>>,
    /// Position of the next batch in the data, and all inputs that determine the order of rows.
    pub bookmark: Bookmark,
    /// Seed of all random numbers.
    pub seed: u64,
    /// CPU threads of each worker. The last bits of results depend on this number.
    pub threads: u32,
    /// The configuration at this step.
    pub config: Value,
}

impl SavedState {
    /// The low-pass filter of the run; `None` if all dimensions are kept.
    pub fn filter(&self) -> Result<Option<Filter>, ShddError> {
        filter(self.kept_dimensions.as_deref(), self.degree)
    }
}

/// A checkpoint on disk with its parsed `state.json`.
#[derive(Debug)]
pub struct Saved {
    /// Folder of the checkpoint.
    pub folder: PathBuf,
    /// The manifest and the files of the checkpoint.
    pub checkpoint: Checkpoint,
    /// The contents of `state.json`.
    pub state: SavedState,
}

impl Saved {
    /// Reads the manifest and `state.json`. Tensors are read on demand.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        Self::open_as(folder, true)
    }

    /// Like [`Self::open`]. Tensors are compared with their checksums only if `is_checked`.
    pub fn open_as(folder: &Path, is_checked: bool) -> Result<Self, CheckpointError> {
        let checkpoint = Checkpoint::open(folder)?;
        let checkpoint = if is_checked { checkpoint } else { checkpoint.unchecked() };
        let bad =
            |error: serde_json::Error| CheckpointError::Bad { path: folder.join(STATE), reason: error.to_string() };
        let state = serde_json::from_value(checkpoint.json(STATE)?).map_err(bad)?;
        Ok(Self { folder: folder.to_owned(), checkpoint, state })
    }

    /// The weights of a part of the checkpoint, such as `ema`.
    pub fn weights(&self, part: &str) -> Result<Weights, CheckpointError> {
        Weights::of(&self.folder, self.checkpoint.tensors(part)?)
    }
}

/// The weights of a network: the parameters, and the statistics that standardise embeddings.
#[derive(Debug)]
pub struct Weights {
    /// Parameters by name. A parameter that is split over ranks is stored whole.
    pub parameters: Vec<(String, Tensor)>,
    /// Mean and standard deviation of the embeddings.
    pub standardisation: [Tensor; 2],
}

impl Weights {
    /// Divides the tensors of the model at `path` into parameters and statistics.
    fn of(path: &Path, mut parameters: NamedTensors) -> Result<Self, CheckpointError> {
        let missing =
            |name| CheckpointError::Bad { path: path.to_owned(), reason: format!("the model has no tensor {name}") };
        let standardisation = Standardisation::take_from(&mut parameters).map_err(missing)?;
        Ok(Self { parameters, standardisation })
    }

    /// Copies the weights into a network.
    pub fn load_into(&self, network: &mut CsUnet) -> Result<(), ModelError> {
        let [mean_e, deviation_e] = &self.standardisation;
        network.parameters_mut().load(&self.parameters)?;
        network.standardisation_mut().set(mean_e, deviation_e)
    }
}
