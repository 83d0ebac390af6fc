//! The network of a checkpoint, with its averaged weights.
//!
//! Its sizes, schedule and filter are those of the checkpoint's own `state.json`: no configuration that is given today can
//! make another network of it.

use std::path::{Path, PathBuf};

use locdiff_core::config::{EvalConfig, RunConfig};
use locdiff_core::random::Philox;
use tch::Device;

use super::error::InferError;
use super::saved::Saved;
use crate::checkpoint::{EMA, piece_name};
use crate::diffusion::NoiseSchedule;
use crate::model::{Architecture, CsUnet, Placement};
use crate::shdd::Filter;

/// A network, whatever its weights, and what its codes are.
#[derive(Debug)]
pub struct Denoiser {
    /// The network, whole on one device.
    pub network: CsUnet,
    /// Degree of the codes.
    pub degree: u32,
    /// Dimensions of the codes that are kept; none: all.
    pub filter: Option<Filter>,
    /// How codes were noised.
    pub schedule: NoiseSchedule,
}

impl Denoiser {
    /// As a run with this configuration trains it; its weights are yet to come.
    pub fn new(
        config: &RunConfig,
        embedding_width: u32,
        filter: Option<Filter>,
        device: Device,
    ) -> Result<Self, InferError> {
        let architecture = Architecture::new(&config.model, embedding_width, config.diffusion.timesteps);
        let placement = Placement::on(device, config.train.precision);
        Ok(Self {
            network: CsUnet::new(architecture, placement, Philox::new(0))?,
            degree: config.model.degree,
            filter,
            schedule: NoiseSchedule::new(&config.diffusion, &config.model),
        })
    }

    /// That it takes embeddings of the width that those at `location` have. Messages call it `name`.
    pub fn check_width(&self, name: &str, location: &str, got: usize) -> Result<(), InferError> {
        let want = self.network.architecture().embedding_width as usize;
        if got == want {
            return Ok(());
        }
        Err(InferError::BadData(format!(
            "{location}: embeddings have {got} numbers, {name} was trained on {want}; take embeddings of the same encoder"
        )))
    }
}

/// A network that has learnt something.
#[derive(Debug)]
pub struct Trained {
    /// Folder of the checkpoint.
    pub folder: PathBuf,
    /// The network, with averaged weights.
    pub denoiser: Denoiser,
    /// Steps made.
    pub step: u64,
    /// The embeddings are dropped now and then in training, so that guidance has something to compare with.
    pub knows_no_image: bool,
}

impl Trained {
    /// Reads a checkpoint onto a device.
    pub fn open(folder: &Path, device: Device) -> Result<Self, InferError> {
        let saved = Saved::open(folder)?;
        let config = saved.config()?;
        let mut denoiser = Denoiser::new(&config, saved.state.embedding_width, saved.state.filter()?, device)?;
        let weights = saved.find_weights(EMA, &denoiser.network)?.ok_or_else(|| {
            let (checkpoint, file) = (folder.display(), piece_name(EMA, 0, 1));
            InferError::BadData(format!(
                "{checkpoint} has no averaged weights (its manifest lists no {file}), which evaluation uses; take a checkpoint \
                 that `locdiff-launch train` wrote"
            ))
        })?;
        weights.load_into(&mut denoiser.network).map_err(|error| {
            let checkpoint = folder.display();
            InferError::BadData(format!(
                "{checkpoint}: its averaged weights are not those of its own configuration: {error}"
            ))
        })?;
        let knows_no_image = config.diffusion.condition_drop > 0.0;
        Ok(Self { folder: folder.to_owned(), denoiser, step: saved.state.step, knows_no_image })
    }

    /// That it can be sampled from as the configuration asks.
    pub fn check(&self, config: &EvalConfig) -> Result<(), InferError> {
        let (checkpoint, want) = (self.folder.display(), self.denoiser.schedule.timesteps());
        if config.guidance > 0.0 && !self.knows_no_image {
            return Err(InferError::Config(format!(
                "eval.guidance is {}, but {checkpoint} was trained with diffusion.condition_drop = 0 and knows nothing without \
                 an image; set eval.guidance = 0, or train with a condition_drop above 0",
                config.guidance
            )));
        }
        if config.sampler_steps as usize > want {
            return Err(InferError::Config(format!(
                "eval.sampler_steps is {}, but {checkpoint} was trained with diffusion.timesteps = {want}; wanted at most as many",
                config.sampler_steps
            )));
        }
        Ok(())
    }
}
