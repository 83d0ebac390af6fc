//! The interface of a method that can be trained.

use locdiff_core::config::RunConfig;
use tch::Tensor;

use super::error::MethodError;
use crate::infer::{Engine, ImageBlock, InferError, Weights};
use crate::loss::Losses;
use crate::model::{Parameters, Placement, Standardisation};
use crate::retrieval::ImageSamples;
use crate::shards::Batch;
use crate::shdd::Codes;

/// A method that can be trained.
///
/// A step calls [`TrainableMethod::take`] with its rows, then [`TrainableMethod::begin`], and then
/// [`TrainableMethod::losses`] for each micro-batch. All ranks call these functions in the same order, so the functions
/// may communicate.
pub trait TrainableMethod: std::fmt::Debug {
    /// The weights.
    fn parameters(&self) -> &Parameters;

    /// The weights, for [`Parameters::load`].
    fn parameters_mut(&mut self) -> &mut Parameters;

    /// The standardisation of embeddings. It is saved with the weights.
    fn standardisation(&self) -> &Standardisation;

    /// The standardisation of embeddings, for changes.
    fn standardisation_mut(&mut self) -> &mut Standardisation;

    /// The device and the precision of the network.
    fn placement(&self) -> &Placement;

    /// Number of operations of a step of one replica on `rows` rows.
    fn step_flops(&self, rows: u64) -> f64;

    /// The TensorBoard tags of the terms in [`Losses`]: KL, L2, L1 and cosine. `None` for a term that is not computed.
    fn loss_tags(&self) -> [Option<&'static str>; 4];

    /// Whether a step on a GPU can be recorded as a CUDA graph.
    fn can_be_recorded(&self) -> bool;

    /// Sets the rows of step `step`, counted from 0.
    fn take(&mut self, step: u64, batch: &Batch) -> Result<(), MethodError>;

    /// Drops the reference to the batch on the CPU, so that the memory of the batch can be reused.
    fn release(&mut self);

    /// Computes the values that all micro-batches of the step share.
    fn begin(&mut self) -> Result<(), MethodError>;

    /// The mean losses of `count` rows of this rank, starting at row `first` of its slice.
    fn losses(&self, first: u64, count: u64) -> Result<Losses, MethodError>;

    /// Makes a locator for the quick evaluation. Its weights are loaded later.
    fn locator(&self, config: &RunConfig) -> Result<Box<dyn Locator>, MethodError>;

    /// The encoder of codes; `None` if the method has no codes.
    fn codes(&self) -> Option<&Codes> {
        None
    }
}

/// Called at every sampler step with the timestep, the noised codes and the predictions.
pub type Watch<'a> = &'a mut dyn FnMut(usize, &Tensor, &Tensor) -> Result<(), InferError>;

/// Locates photos with weights that change from evaluation to evaluation.
pub trait Locator: std::fmt::Debug {
    /// Replaces the weights.
    fn load(&mut self, weights: &Weights) -> Result<(), InferError>;

    /// Locates the photos of a block. A method without a sampler never calls `watch`.
    fn locate(&self, block: &ImageBlock, watch: Watch<'_>) -> Result<Vec<ImageSamples>, InferError>;
}

impl Locator for Engine {
    fn load(&mut self, weights: &Weights) -> Result<(), InferError> {
        Self::load(self, weights)
    }

    fn locate(&self, block: &ImageBlock, watch: Watch<'_>) -> Result<Vec<ImageSamples>, InferError> {
        Self::locate(self, block, &block.embeddings(self.device())?, watch)
    }
}
