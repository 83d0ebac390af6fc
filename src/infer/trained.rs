//! The network of a checkpoint or an exported file, with its averaged weights.
//!
//! The sizes of the network, the noise schedule and the low-pass filter come from the configuration that the network
//! was trained with, never from the current configuration.

use std::path::PathBuf;

use locdiff_core::config::{EvalConfig, RunConfig, TrainMethod};
use locdiff_core::random::Philox;
use tch::Device;

use super::error::InferError;
use super::saved::SavedModel;
use crate::diffusion::NoiseSchedule;
use crate::model::{Architecture, CsUnet, Placement};
use crate::shdd::Filter;

/// A network, together with the degree, the filter and the noise schedule of its codes. The weights of the
/// network may still be untrained.
#[derive(Debug)]
pub struct Denoiser {
    /// The whole network, on one device.
    pub network: CsUnet,
    /// Degree of the codes.
    pub degree: u32,
    /// The low-pass filter of the codes; `None` if all dimensions are kept.
    pub filter: Option<Filter>,
    /// The noise schedule that the network is trained with.
    pub schedule: NoiseSchedule,
}

impl Denoiser {
    /// Creates the network that a run with this configuration trains. The caller loads the weights later.
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

    /// Checks that `got`, the width of the embeddings at `location`, is the width that the network takes. `name` is
    /// the name of the network in the error message.
    pub fn check_width(&self, name: &str, location: &str, got: usize) -> Result<(), InferError> {
        let want = self.network.architecture().embedding_width as usize;
        if got == want {
            return Ok(());
        }
        Err(InferError::BadData(format!(
            "{location}: embeddings have {got} numbers, but {name} needs {want}; use the encoder of the training data"
        )))
    }
}

/// A trained network.
#[derive(Debug)]
pub struct Trained {
    /// Folder of the checkpoint, or the exported file.
    pub path: PathBuf,
    /// The network, with averaged weights.
    pub denoiser: Denoiser,
    /// Whether training dropped the embeddings of some rows. Only then can the network predict without an image, as
    /// guidance requires.
    pub supports_guidance: bool,
}

impl Trained {
    /// Loads the network of a model, with averaged weights, onto a device.
    pub fn open(saved: &SavedModel, device: Device) -> Result<Self, InferError> {
        let (config, path) = (&saved.state.config, &saved.path);
        if config.train.method != TrainMethod::Locdiff {
            let model = path.display();
            return Err(InferError::Config(format!(
                "{model} has no LocDiff network, because train.method was \"geoclip\""
            )));
        }
        let mut denoiser = Denoiser::new(config, saved.state.embedding_width, saved.filter()?, device)?;
        saved.averages()?.load_into(&mut denoiser.network).map_err(|error| {
            let model = path.display();
            InferError::BadData(format!(
                "{model}: the averaged weights do not match the configuration of their training: {error}"
            ))
        })?;
        let supports_guidance = config.diffusion.condition_drop > 0.0;
        Ok(Self { path: path.clone(), denoiser, supports_guidance })
    }

    /// Checks that the network supports the configured guidance and sampler steps.
    pub fn check(&self, config: &EvalConfig) -> Result<(), InferError> {
        let (checkpoint, want) = (self.path.display(), self.denoiser.schedule.timesteps());
        if config.guidance > 0.0 && !self.supports_guidance {
            return Err(InferError::Config(format!(
                "eval.guidance is {}, but {checkpoint} was trained with diffusion.condition_drop = 0, so the network \
                 cannot predict without an image; set eval.guidance = 0, or train with a condition_drop above 0",
                config.guidance
            )));
        }
        if config.sampler_steps as usize > want {
            return Err(InferError::Config(format!(
                "eval.sampler_steps is {}, but {checkpoint} was trained with diffusion.timesteps = {want}; wanted at \
                 most {want}",
                config.sampler_steps
            )));
        }
        Ok(())
    }
}
