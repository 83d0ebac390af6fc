//! Reads the contents of a checkpoint, for training and for evaluation: the state of the run, and the weights by name.

use std::path::{Path, PathBuf};

use locdiff_core::config::RunConfig;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::Tensor;

use crate::checkpoint::{Checkpoint, CheckpointError, STATE};
use crate::model::{CsUnet, ModelError, Standardisation};
use crate::shards::Bookmark;
use crate::shdd::{Filter, ShddError};

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
        let dims = (self.degree as usize + 1).pow(2);
        self.kept_dimensions.as_ref().map(|kept| Filter::from_indices(kept, dims)).transpose()
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
        let checkpoint = Checkpoint::open(folder)?;
        let state = parse_state(folder, checkpoint.json(STATE)?)?;
        Ok(Self { folder: folder.to_owned(), checkpoint, state })
    }

    /// Parses the configuration in `state.json`. Fails if the checkpoint comes from a version of the program
    /// that has different configuration fields.
    pub fn config(&self) -> Result<RunConfig, CheckpointError> {
        parse_state(&self.folder, self.state.config.clone())
    }

    /// The weights of a part of the checkpoint, such as `ema`.
    pub fn weights(&self, part: &str) -> Result<Weights, CheckpointError> {
        self.split(self.checkpoint.tensors(part)?)
    }

    /// Like [`Self::weights`], but returns `None` if the checkpoint does not have the part.
    pub fn find_weights(&self, part: &str) -> Result<Option<Weights>, CheckpointError> {
        self.checkpoint.find_tensors(part)?.map(|tensors| self.split(tensors)).transpose()
    }

    fn split(&self, mut parameters: Vec<(String, Tensor)>) -> Result<Weights, CheckpointError> {
        let missing = |name| {
            let reason = format!("the checkpoint has no tensor {name}");
            CheckpointError::Bad { path: self.folder.clone(), reason }
        };
        let standardisation = Standardisation::take_from(&mut parameters).map_err(missing)?;
        Ok(Weights { parameters, standardisation })
    }
}

fn parse_state<Found: DeserializeOwned>(folder: &Path, value: Value) -> Result<Found, CheckpointError> {
    let bad = |error: serde_json::Error| CheckpointError::Bad { path: folder.join(STATE), reason: error.to_string() };
    serde_json::from_value(value).map_err(bad)
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
    /// Copies the weights into a network.
    pub fn load_into(&self, network: &mut CsUnet) -> Result<(), ModelError> {
        let [mean_e, deviation_e] = &self.standardisation;
        network.parameters_mut().load(&self.parameters)?;
        network.standardisation_mut().set(mean_e, deviation_e)
    }
}
