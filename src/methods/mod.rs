//! The methods that can be trained (`train.method`). A method has parameters, a loss, and a way to locate photos with
//! its weights. Everything else that training needs is the same for every method: the order of rows, the reduction of
//! gradients, the optimiser, checkpoints and logs.
//!
//! - [`TrainableMethod`]: the interface of a method.
//! - [`Locdiff`]: the diffusion model of the paper.
//! - [`ContrastiveHead`]: GeoCLIP's image head, trained on the shards. GeoCLIP's location encoder stays frozen.

mod error;
mod geoclip;
mod locdiff;
mod method;

pub use error::MethodError;
pub use geoclip::ContrastiveHead;
pub use locdiff::Locdiff;
pub use method::{Locator, TrainableMethod, Watch};

use locdiff_core::config::{RunConfig, TrainMethod};

use crate::comm::Communicator;
use crate::shdd::Filter;

/// The method that `train.method` names, with its initial weights.
pub fn new_method(
    config: &RunConfig,
    embedding_width: u32,
    filter: Option<Filter>,
    ranks: &Communicator,
) -> Result<Box<dyn TrainableMethod>, MethodError> {
    Ok(match config.train.method {
        TrainMethod::Locdiff => Box::new(Locdiff::new(config, embedding_width, filter, ranks)?),
        TrainMethod::Geoclip => Box::new(ContrastiveHead::new(config, embedding_width, ranks)?),
    })
}
