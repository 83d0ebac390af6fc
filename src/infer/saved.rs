//! What a checkpoint says: the state of its run, and weights by name. Training and evaluation read them here only.

use std::path::{Path, PathBuf};

use locdiff_core::config::RunConfig;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::Tensor;

use crate::checkpoint::{Checkpoint, CheckpointError, STATE};
use crate::model::{CsUnet, ModelError};
use crate::shards::Bookmark;
use crate::shdd::{Filter, ShddError};

/// `state.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedState {
    /// Steps made.
    pub step: u64,
    /// Optimiser updates made: steps that were not skipped.
    pub updates: u64,
    /// Steps skipped in all.
    pub skipped_steps: u64,
    /// Steps skipped just before this one.
    pub skipped_in_a_row: u32,
    /// Degree of the codes.
    pub degree: u32,
    /// Width of the embeddings.
    pub embedding_width: u32,
    /// Dimensions of the code that are kept; none: all.
    pub kept_dimensions: Option<Vec<u32>>,
    /// The next batch, and what its rows depend on.
    pub bookmark: Bookmark,
    /// Seed of everything random.
    pub seed: u64,
    /// CPU threads of each worker, on which the last bits depend.
    pub threads: u32,
    /// The configuration at this step.
    pub config: Value,
}

impl SavedState {
    /// The filter that the run began with.
    pub fn filter(&self) -> Result<Option<Filter>, ShddError> {
        let dims = (self.degree as usize + 1).pow(2);
        self.kept_dimensions.as_ref().map(|kept| Filter::from_indices(kept, dims)).transpose()
    }
}

/// A checkpoint and its state.
#[derive(Debug)]
pub struct Saved {
    /// Its folder.
    pub folder: PathBuf,
    /// Its files.
    pub checkpoint: Checkpoint,
    /// Its state.
    pub state: SavedState,
}

impl Saved {
    /// Reads manifest and state; tensors are read when they are needed.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let checkpoint = Checkpoint::open(folder)?;
        let state = understood(folder, checkpoint.json(STATE)?)?;
        Ok(Self { folder: folder.to_owned(), checkpoint, state })
    }

    /// The configuration as a struct, which a checkpoint of another version may not have.
    pub fn config(&self) -> Result<RunConfig, CheckpointError> {
        understood(&self.folder, self.state.config.clone())
    }

    /// The weights of a part, for a network like this one.
    pub fn weights(&self, part: &str, network: &CsUnet) -> Result<Weights, CheckpointError> {
        self.apart(self.checkpoint.tensors(part)?, network)
    }

    /// The same, where the checkpoint has the part.
    pub fn find_weights(&self, part: &str, network: &CsUnet) -> Result<Option<Weights>, CheckpointError> {
        self.checkpoint.find_tensors(part)?.map(|tensors| self.apart(tensors, network)).transpose()
    }

    fn apart(&self, tensors: Vec<(String, Tensor)>, network: &CsUnet) -> Result<Weights, CheckpointError> {
        let names: Vec<String> = network.buffers().into_iter().map(|(name, _)| name).collect();
        let (buffers, parameters): (Vec<_>, Vec<_>) = tensors.into_iter().partition(|(name, _)| names.contains(name));
        let buffer = |name: &String| {
            let found = buffers.iter().find(|(known, _)| known == name).map(|(_, tensor)| tensor.shallow_clone());
            let reason = || format!("it has no tensor {name}");
            found.ok_or_else(|| CheckpointError::Bad { path: self.folder.clone(), reason: reason() })
        };
        Ok(Weights { parameters, standardisation: [buffer(&names[0])?, buffer(&names[1])?] })
    }
}

fn understood<Found: DeserializeOwned>(folder: &Path, value: Value) -> Result<Found, CheckpointError> {
    let bad = |error: serde_json::Error| CheckpointError::Bad { path: folder.join(STATE), reason: error.to_string() };
    serde_json::from_value(value).map_err(bad)
}

/// All numbers of a network: what it learnt, and how it standardises embeddings.
#[derive(Debug)]
pub struct Weights {
    /// Whole parameters by name.
    pub parameters: Vec<(String, Tensor)>,
    /// Mean and standard deviation of the embeddings.
    pub standardisation: [Tensor; 2],
}

impl Weights {
    /// Gives them to a network.
    pub fn load_into(&self, network: &mut CsUnet) -> Result<(), ModelError> {
        let [mean_e, deviation_e] = &self.standardisation;
        network.parameters_mut().load(&self.parameters)?;
        network.standardise(mean_e, deviation_e)
    }
}
