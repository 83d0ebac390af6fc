//! The network of a checkpoint, with its averaged weights.
//!
//! Its sizes, schedule and filter are those of the checkpoint's own `state.json`: no configuration that is given today can
//! make another network of it.

use std::path::{Path, PathBuf};

use locdiff_core::config::RunConfig;
use locdiff_core::random::Philox;
use serde::Deserialize;
use tch::Device;

use super::error::EvalError;
use crate::checkpoint::{Checkpoint, CheckpointError, EMA, STATE, piece_name};
use crate::diffusion::NoiseSchedule;
use crate::model::{Architecture, CsUnet, Placement};
use crate::shdd::Filter;

/// What of `state.json` is needed.
#[derive(Debug, Deserialize)]
struct State {
    step: u64,
    embedding_width: u32,
    kept_dimensions: Option<Vec<u32>>,
    config: RunConfig,
}

/// A network that has learnt something.
#[derive(Debug)]
pub struct Trained {
    /// Folder of the checkpoint.
    pub folder: PathBuf,
    /// The network, with averaged weights.
    pub network: CsUnet,
    /// Steps made.
    pub step: u64,
    /// Degree of the codes.
    pub degree: u32,
    /// Dimensions of the codes that are kept; none: all.
    pub filter: Option<Filter>,
    /// How codes were noised.
    pub schedule: NoiseSchedule,
    /// The embeddings are dropped now and then in training, so that guidance has something to compare with.
    pub knows_no_image: bool,
}

impl Trained {
    /// Reads a checkpoint onto a device.
    pub fn open(folder: &Path, device: Device) -> Result<Self, EvalError> {
        let checkpoint = Checkpoint::open(folder)?;
        let none = || EvalError::NoAverage { checkpoint: folder.to_owned(), file: piece_name(EMA, 0, 1) };
        let tensors = checkpoint.find_tensors(EMA)?.ok_or_else(none)?;
        let state = read_state(&checkpoint, folder)?;
        let config = &state.config;
        let architecture = Architecture::new(&config.model, state.embedding_width, config.diffusion.timesteps);
        let placement = Placement::on(device, config.train.precision);
        let mut network = CsUnet::new(architecture, placement, Philox::new(0))?;
        let names: Vec<String> = network.buffers().into_iter().map(|(name, _)| name).collect();
        let (buffers, weights): (Vec<_>, Vec<_>) = tensors.into_iter().partition(|(name, _)| names.contains(name));
        let misfit = |source| EvalError::Network { checkpoint: folder.to_owned(), source };
        network.parameters_mut().load(&weights).map_err(misfit)?;
        let buffer = |name: &String| {
            let found = buffers.iter().find(|(known, _)| known == name).map(|(_, tensor)| tensor);
            let reason = || format!("it has no tensor {name}");
            found.ok_or_else(|| CheckpointError::Bad { path: folder.to_owned(), reason: reason() })
        };
        network.standardise(buffer(&names[0])?, buffer(&names[1])?).map_err(misfit)?;
        let dims = config.model.dims() as usize;
        Ok(Self {
            folder: folder.to_owned(),
            network,
            step: state.step,
            degree: config.model.degree,
            filter: state.kept_dimensions.as_ref().map(|kept| Filter::from_indices(kept, dims)).transpose()?,
            schedule: NoiseSchedule::new(&config.diffusion, &config.model),
            knows_no_image: config.diffusion.condition_drop > 0.0,
        })
    }
}

fn read_state(checkpoint: &Checkpoint, folder: &Path) -> Result<State, EvalError> {
    let bad = |error: serde_json::Error| CheckpointError::Bad { path: folder.join(STATE), reason: error.to_string() };
    Ok(serde_json::from_value(checkpoint.json(STATE)?).map_err(bad)?)
}
