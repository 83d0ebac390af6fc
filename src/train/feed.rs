//! What changes from step to step, where the device reads it.
//!
//! On CUDA it lies in the same memory in every step of one form, so that a recorded step reads new values when it is replayed.
// b rows of this rank's slice · e embedding

use std::ops::Range;

use locdiff_core::geo::{UnitVector, places};
use tch::{Device, Kind, Tensor};

use super::codes::Points;
use super::error::TrainError;
use crate::native::random::DeviceCounter;
use crate::shards::Batch;
use crate::shdd::ShddError;

/// What a recorded step holds fast.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Form {
    /// This rank's rows of the global batch.
    pub(super) slice: Range<u64>,
    /// Rows of the global batch.
    pub(super) global_batch: u32,
}

/// The inputs of a step.
#[derive(Debug)]
pub(super) struct Feed {
    device: Device,
    /// Names the random numbers.
    pub(super) counter: DeviceCounter,
    /// One f32.
    pub(super) learning_rate: Tensor,
    /// How far the averaged weights move; one f32.
    pub(super) average_weight: Tensor,
    /// Embeddings of the rows, float16.
    pub(super) image_be: Tensor,
    /// Where the rows are.
    pub(super) rows: Points,
    /// Where the anchors are.
    pub(super) anchors: Points,
    /// Of the batch that it holds.
    pub(super) form: Form,
}

impl Feed {
    /// Empty.
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

    /// Lets go of what is not its own: the batch's memory can be used again.
    pub(super) fn release(&mut self) {
        if !self.device.is_cuda() {
            self.image_be = Tensor::new();
        }
    }

    /// Takes in the batch of a step, counted from 0, and this rank's anchors.
    pub(super) fn take(&mut self, step: u64, batch: &Batch, anchors: Vec<UnitVector>) -> Result<(), TrainError> {
        self.form = Form { slice: batch.slice.clone(), global_batch: batch.position.global_batch };
        self.counter.set(step)?;
        let places = places(&batch.latitudes, &batch.longitudes).map_err(ShddError::from)?;
        self.rows.put(places.into_iter().map(UnitVector::from).collect(), self.device)?;
        self.anchors.put(anchors, self.device)?;
        if !self.device.is_cuda() {
            self.image_be = batch.embeddings.shallow_clone();
        } else {
            // A copy of its own: the batch's memory is used again.
            if self.image_be.size() != batch.embeddings.size() {
                self.image_be = Tensor::f_empty(batch.embeddings.size(), (batch.embeddings.kind(), self.device))?;
            }
            self.image_be.f_copy_(&batch.embeddings)?;
        }
        Ok(())
    }
}
