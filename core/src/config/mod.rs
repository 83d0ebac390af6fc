//! Configuration: merges TOML presets, files, `--set` and flags into one validated [`RunConfig`].
//!
//! Each section is defined in a separate source file, with the units, defaults and limits of its fields. [`load`]
//! merges the layers and records where each value came from; [`show`] prints the result. No process is spawned before
//! the configuration has been checked, and all errors are reported together. Out-of-range values in sections that a
//! command does not use are not errors (see [`load_for`]).

mod auto;
mod credentials;
mod errors;
mod load;
mod log;
mod presets;
#[cfg(feature = "schema")]
mod schema;
mod sections;
mod show;

use serde::{Deserialize, Serialize};

pub use auto::AutoOr;
pub use credentials::{NO_CREDENTIALS, has_credentials};
pub use errors::{ConfigError, ConfigErrors};
pub use load::{Layer, Resolved, ValueOrigin, load, load_for};
pub use log::log_filter;
pub use presets::{PRESETS, Preset, preset};
#[cfg(feature = "schema")]
pub use schema::{markdown, schema};
pub use sections::*;
pub use show::show;

use errors::Checker;

/// All settings of a run. Saved in the run folder as `config.toml`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// The denoising network (CS-UNet) and the encoding of locations.
    pub model: ModelConfig,
    /// The diffusion process: timesteps and noise schedule.
    pub diffusion: DiffusionConfig,
    /// The training loss: a weighted sum of its terms.
    pub loss: LossConfig,
    /// Optimisation with AdamW.
    pub train: TrainConfig,
    /// Where embeddings are read from, and how.
    pub shards: ShardsConfig,
    /// Where runs are stored, and how many checkpoints are kept.
    pub checkpoint: CheckpointConfig,
    /// Sampling, decoding and scoring.
    pub eval: EvalConfig,
    /// The retrieval step of LocDiff-H.
    pub retrieval: RetrievalConfig,
    /// Number of worker processes, their devices, and how the model is split over them.
    pub parallel: ParallelConfig,
    /// Timeouts for workers, and how many times failed workers are restarted.
    pub supervise: SuperviseConfig,
    /// The network that the workers communicate over.
    pub network: NetworkConfig,
}

impl RunConfig {
    /// Checks each section, then the values that depend on values of another section.
    fn check(&self, checker: &mut Checker) {
        self.model.check(checker);
        self.diffusion.check(checker);
        self.loss.check(checker);
        self.train.check(checker);
        self.shards.check(checker);
        self.checkpoint.check(checker);
        self.eval.check(self.model.degree, checker);
        self.retrieval.check(checker);
        self.parallel.check(checker);
        self.supervise.check(checker);
        self.network.check(checker);
        if self.eval.sampler_steps > self.diffusion.timesteps {
            checker.push(
                "eval.sampler_steps",
                format!("is {}, more than diffusion.timesteps = {}", self.eval.sampler_steps, self.diffusion.timesteps),
            );
        }
        if self.eval.guidance > 0.0 && self.diffusion.condition_drop == 0.0 {
            checker.push(
                "eval.guidance",
                format!(
                    "is {}, but diffusion.condition_drop is 0: the network never learns to predict without an image; \
                     wanted 0, or a condition_drop above 0",
                    self.eval.guidance
                ),
            );
        }
    }
}
