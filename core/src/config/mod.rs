//! Configuration: TOML presets, files, `--set` and flags into one validated [`RunConfig`].
//!
//! A section has a file of its own with its fields, their units, defaults and limits. [`load`] puts the layers
//! on top of each other and remembers where each value came from; [`show`] prints that.
//! Nothing is spawned before the whole has been checked, and all that is wrong is said at once.

mod auto;
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
pub use errors::{ConfigError, ConfigErrors};
pub use load::{Layer, Origin, Resolved, load};
pub use log::log_filter;
pub use presets::{PRESETS, Preset, preset};
#[cfg(feature = "schema")]
pub use schema::{markdown, schema};
pub use sections::*;
pub use show::show;

use errors::Checker;

/// Everything that a run depends on. Saved with the run as `config.toml`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// The network.
    pub model: ModelConfig,
    /// The diffusion process.
    pub diffusion: DiffusionConfig,
    /// What training minimises.
    pub loss: LossConfig,
    /// Optimisation.
    pub train: TrainConfig,
    /// Where embeddings come from.
    pub shards: ShardsConfig,
    /// Where runs are kept.
    pub checkpoint: CheckpointConfig,
    /// Sampling and scoring.
    pub eval: EvalConfig,
    /// The retrieval phase of LocDiff-H.
    pub retrieval: RetrievalConfig,
    /// How many processes, on what, and how the model is split over them.
    pub parallel: ParallelConfig,
    /// How long to wait for workers, and how often to start them again.
    pub supervise: SuperviseConfig,
    /// Which network the workers talk over.
    pub network: NetworkConfig,
}

impl RunConfig {
    /// Checks every value and every pair of values that must fit each other.
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
                    "is {}, but diffusion.condition_drop is 0: without an image the network has learnt nothing, wanted 0 or \
                     a condition_drop above 0",
                    self.eval.guidance
                ),
            );
        }
    }
}
