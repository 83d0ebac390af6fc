//! The inputs of a step, in the memory where the device reads them.
//!
//! All small inputs are packed into one block of bytes, so that one copy brings them to the device. The copies from
//! main memory run on a stream of their own, into one of two staging buffers, while the device still computes the
//! previous step. A fast copy on the device then moves the inputs to the addresses that a recorded step
//! reads.
// Letters in tensor names: b rows of this rank's slice, e width of an embedding.

use locdiff_core::geo::places;
use locdiff_core::random::Philox;
use tch::{Device, Kind, Tensor};

use super::rows::SortedRows;
use crate::native::NativeError;
use crate::native::cuda::{CudaEvent, CudaStream, Priority, with_stream};
use crate::native::host::{copy_async, pinned};
use crate::shards::Batch;
use crate::shdd::ShddError;
use crate::train::error::TrainError;
use crate::train::work::feed::{Form, StepNumbers};

// The layout of the block of bytes: one i64, six f64, one f32 and padding, then the arrays.
const SUMS_AT: i64 = 8;
const RATE_AT: i64 = 56;
const ARRAYS_AT: i64 = 64;

/// The inputs of a step.
#[derive(Debug)]
pub(super) struct StepInputs {
    device: Device,
    philox: Philox,
    timesteps: u32,
    micro_batch: u64,
    copies: CudaStream,
    stages: [Stage; 2],
    /// Whether the next step uses the second stage.
    is_second: bool,
    bytes: Tensor,
    pub(super) form: Form,
    /// The number of the step, i64.
    pub(super) step: Tensor,
    /// Five zeros, then this rank's encoded requests, f64.
    pub(super) first_sums: Tensor,
    /// One f32.
    pub(super) learning_rate: Tensor,
    /// Latitudes of all rows, then their longitudes, in degrees, f64.
    pub(super) coordinates: Tensor,
    /// The fields of [`SortedRows`], i32.
    pub(super) order: Tensor,
    pub(super) row_timesteps: Tensor,
    pub(super) segments: Tensor,
    /// Embeddings of the rows, in float16.
    pub(super) image_be: Tensor,
}

/// A staging buffer on the device.
#[derive(Debug)]
struct Stage {
    bytes: Tensor,
    image_be: Tensor,
    /// The copies into the buffer are done.
    filled: CudaEvent,
    /// The buffer was read and can be filled again.
    emptied: CudaEvent,
}

impl Stage {
    fn new() -> Result<Self, NativeError> {
        let (filled, emptied) = (CudaEvent::new()?, CudaEvent::new()?);
        Ok(Self { bytes: Tensor::new(), image_be: Tensor::new(), filled, emptied })
    }
}

impl StepInputs {
    pub(super) fn new(device: Device, philox: Philox, timesteps: u32, micro_batch: u32) -> Result<Self, TrainError> {
        let none = || Tensor::new();
        Ok(Self {
            device,
            philox,
            timesteps,
            micro_batch: micro_batch.into(),
            copies: CudaStream::from_pool(Priority::High)?,
            stages: [Stage::new()?, Stage::new()?],
            is_second: false,
            bytes: none(),
            form: Form::default(),
            step: none(),
            first_sums: none(),
            learning_rate: none(),
            coordinates: none(),
            order: none(),
            row_timesteps: none(),
            segments: none(),
            image_be: none(),
        })
    }

    /// Rows of a micro-batch. The last micro-batch of a step may have fewer.
    pub(super) fn micro_rows(&self) -> u64 {
        let rows = self.form.slice.end - self.form.slice.start;
        if self.micro_batch == 0 { rows } else { self.micro_batch.min(rows) }
    }

    /// Sets the inputs of step `step`, counted from 0. The host does not wait for the device.
    pub(super) fn take(&mut self, step: u64, batch: &Batch, numbers: &StepNumbers) -> Result<(), TrainError> {
        self.form = Form { allocations: self.form.allocations, ..Form::of(batch) };
        // Allocate new memory only if the size has changed, because a recorded step reads from fixed addresses.
        if self.image_be.size() != batch.embeddings.size() {
            self.allocate(&batch.embeddings.size())?;
        }
        // Report invalid coordinates here, because the device cannot.
        places(&batch.latitudes, &batch.longitudes).map_err(ShddError::from)?;
        let rows = SortedRows::draw(self.philox, step, &self.form.slice, self.micro_rows(), self.timesteps)?;
        let packed = pack(step, batch, numbers, &rows);
        let mut pinned = pinned(packed.len() as i64, Kind::Uint8)?;
        pinned.f_copy_(&Tensor::f_from_slice(&packed)?)?;
        let compute = CudaStream::current()?;
        let stage = &mut self.stages[usize::from(self.is_second)];
        self.is_second = !self.is_second;
        stage.emptied.block(&self.copies)?;
        with_stream(self.copies, || {
            copy_async(&mut stage.bytes, &pinned)?;
            if !batch.embeddings.device().is_cuda() {
                copy_async(&mut stage.image_be, &batch.embeddings)?;
            }
            Ok::<_, NativeError>(())
        })??;
        stage.filled.record(&self.copies)?;
        stage.filled.block(&compute)?;
        copy_async(&mut self.bytes, &stage.bytes)?;
        let on_device = batch.embeddings.device().is_cuda();
        copy_async(&mut self.image_be, if on_device { &batch.embeddings } else { &stage.image_be })?;
        Ok(stage.emptied.record(&compute)?)
    }

    /// Allocates the memory for batches of the current form.
    fn allocate(&mut self, embeddings: &[i64]) -> Result<(), TrainError> {
        let rows = embeddings[0];
        let micro_batches = (rows as u64).div_ceil(self.micro_rows().max(1)) as i64;
        let segments = micro_batches * (i64::from(self.timesteps) + 1);
        let order_at = ARRAYS_AT + 16 * rows;
        let size = order_at + 4 * (2 * rows + segments);
        let block = || Tensor::f_zeros([size], (Kind::Uint8, self.device));
        let images = || Tensor::f_zeros(embeddings, (Kind::Half, self.device));
        (self.bytes, self.image_be) = (block()?, images()?);
        let compute = CudaStream::current()?;
        for stage in &mut self.stages {
            (stage.bytes, stage.image_be) = (block()?, images()?);
            // Copies into the stage must wait for the compute stream up to here: its earlier work may still use the
            // memory, and it sets the memory to zero.
            stage.emptied.record(&compute)?;
        }
        self.form.allocations += 1;
        let part = |at: i64, bytes: i64, kind: Kind| self.bytes.f_narrow(0, at, bytes)?.f_view_dtype(kind);
        self.step = part(0, 8, Kind::Int64)?;
        self.first_sums = part(SUMS_AT, 48, Kind::Double)?;
        self.learning_rate = part(RATE_AT, 4, Kind::Float)?;
        self.coordinates = part(ARRAYS_AT, 16 * rows, Kind::Double)?;
        self.order = part(order_at, 4 * rows, Kind::Int)?;
        self.row_timesteps = part(order_at + 4 * rows, 4 * rows, Kind::Int)?;
        self.segments = part(order_at + 8 * rows, 4 * segments, Kind::Int)?;
        Ok(())
    }
}

/// The small inputs of a step as one block of bytes.
fn pack(step: u64, batch: &Batch, numbers: &StepNumbers, rows: &SortedRows) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(ARRAYS_AT as usize + 24 * batch.latitudes.len() + 4 * rows.segments.len());
    bytes.extend(step.to_ne_bytes());
    bytes.extend([0; 40]);
    bytes.extend(numbers.requests.encode().to_ne_bytes());
    bytes.extend((numbers.learning_rate as f32).to_ne_bytes());
    bytes.extend([0; 4]);
    for degrees in batch.latitudes.iter().chain(&batch.longitudes) {
        bytes.extend_from_slice(&degrees.to_ne_bytes());
    }
    for integer in rows.order.iter().chain(&rows.timesteps).chain(&rows.segments) {
        bytes.extend_from_slice(&integer.to_ne_bytes());
    }
    bytes
}
