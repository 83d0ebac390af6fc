//! The inputs of a step, in the memory where the device reads them.
//!
//! On CUDA, all steps whose batches have the same form use the same memory for their inputs, so that a replayed graph
//! reads the new values.
// Letters in tensor names: b rows of this rank's slice, e width of an embedding.

use std::ops::Range;

use locdiff_core::geo::{UnitVector, places};
use tch::{Device, Kind, Tensor};

use super::codes::Points;
use super::error::TrainError;
use crate::native::random::DeviceCounter;
use crate::shards::Batch;
use crate::shdd::ShddError;

/// The properties of a batch that a recorded step depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Form {
    /// The range of rows of the global batch that this rank takes.
    pub(super) slice: Range<u64>,
    /// Number of rows of the global batch.
    pub(super) global_batch: u32,
}

/// The inputs of a step.
#[derive(Debug)]
pub(super) struct Feed {
    device: Device,
    /// The number of the step. It selects the random numbers.
    pub(super) counter: DeviceCounter,
    /// Learning rate, as one f32.
    pub(super) learning_rate: Tensor,
    /// Weight of the new parameters in the moving average, as one f32.
    pub(super) average_weight: Tensor,
    /// Embeddings of the rows in float16.
    pub(super) image_be: Tensor,
    /// Places of the rows.
    pub(super) rows: Points,
    /// Places of the anchors.
    pub(super) anchors: Points,
    /// Form of the current batch.
    pub(super) form: Form,
}

impl Feed {
    /// An empty feed.
    pub(super) fn new(device: Device) -> Result<Self, TrainError> {
        let number = || Tensor::f_zeros([], (Kind::Float, device));
        Ok(Self {
            device,
            counter: DeviceCounter::new(device, 0)?,
            learning_rate: number()?,
            average_weight: number()?,
            image_be: Tensor::f_zeros([0, 0], (Kind::Half, device))?,
            rows: Points::Host(Vec::new()),
            anchors: Points::Host(Vec::new()),
            form: Form { slice: 0..0, global_batch: 0 },
        })
    }

    /// On the CPU, drops the reference to the batch, so that the memory of the batch can be reused. Does nothing on
    /// CUDA.
    pub(super) fn release(&mut self) {
        if !self.device.is_cuda() {
            self.image_be = Tensor::new();
        }
    }

    /// Sets the inputs of step `step`, counted from 0: the batch and this rank's anchors.
    pub(super) fn take(&mut self, step: u64, batch: &Batch, anchors: Vec<UnitVector>) -> Result<(), TrainError> {
        self.form = Form { slice: batch.slice.clone(), global_batch: batch.position.global_batch };
        self.counter.set(step)?;
        let places = places(&batch.latitudes, &batch.longitudes).map_err(ShddError::from)?;
        self.rows.put(places.into_iter().map(UnitVector::from).collect(), self.device)?;
        self.anchors.put(anchors, self.device)?;
        if !self.device.is_cuda() {
            self.image_be = batch.embeddings.shallow_clone();
        } else {
            // Copy the embeddings, because the memory of the batch will be reused.
            if self.image_be.size() != batch.embeddings.size() {
                self.image_be = Tensor::f_empty(batch.embeddings.size(), (batch.embeddings.kind(), self.device))?;
            }
            self.image_be.f_copy_(&batch.embeddings)?;
        }
        Ok(())
    }
}
