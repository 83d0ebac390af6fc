//! The inputs of a step, in the memory where the device reads them.
//!
//! On CUDA, all steps whose batches have the same form use the same memory for their inputs, so that a replayed graph
//! reads the new values.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::shards::Batch;
use crate::train::error::TrainError;

/// The properties of a batch that a recorded step depends on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::train) struct Form {
    /// The rows that this rank takes, as positions in the global batch.
    pub(super) slice: Range<u64>,
    /// Number of rows of the global batch.
    pub(super) global_batch: u32,
    /// How often the memory of the inputs was allocated anew. A step that was recorded before an allocation must not be
    /// replayed, because it would read the old memory.
    pub(super) allocations: u64,
}

impl Form {
    pub(super) fn of(batch: &Batch) -> Self {
        Self { slice: batch.slice.clone(), global_batch: batch.position.global_batch, allocations: 0 }
    }
}

/// Numbers that change from step to step and do not come from the batch.
#[derive(Debug, Clone, Copy)]
pub(in crate::train) struct StepNumbers {
    pub(in crate::train) learning_rate: f64,
    /// Weight of the new parameters in the moving average. The explicit engine computes it on the device instead.
    pub(in crate::train) average_weight: f64,
    /// The requests of this rank.
    pub(in crate::train) requests: Requests,
}

/// Requests that the ranks share in each step, such as a request to stop. Each rank encodes its requests as one number,
/// which is summed over all ranks together with the losses. So all ranks act on the same sum after the same step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::train) struct Requests {
    /// Number of ranks that were asked to stop.
    pub(in crate::train) stop: u32,
    /// Number of ranks that are still writing a checkpoint.
    pub(in crate::train) busy: u32,
    /// Whether a rank has no rows, because it was asked to stop while it waited for data. The step then changes nothing
    /// and does not count.
    pub(in crate::train) is_void: bool,
}

impl Requests {
    /// The number of ranks must be below this limit. Then the sums of `stop` and of `busy` over all ranks are below the
    /// limit too, and one f64 holds both sums exactly: `stop + RANKS_MAX * busy`.
    const RANKS_MAX: u32 = 4096;

    /// Encodes the requests of this rank as one number. NaN stands for a void step, so that the sum over all ranks is
    /// NaN if any rank has a void step.
    pub(super) fn encode(self) -> f64 {
        if self.is_void { f64::NAN } else { f64::from(self.stop + Self::RANKS_MAX * self.busy) }
    }

    /// Decodes the sum of the encoded requests of all ranks.
    pub(in crate::train) fn decode(sum: f64) -> Self {
        if sum.is_nan() {
            return Self { stop: 1, busy: 0, is_void: true };
        }
        let sum = sum as u32;
        Self { stop: sum % Self::RANKS_MAX, busy: sum / Self::RANKS_MAX, is_void: false }
    }
}

/// The inputs of a step that do not depend on the method.
#[derive(Debug)]
pub(super) struct Feed {
    /// Learning rate, as one f32.
    pub(super) learning_rate: Tensor,
    /// Weight of the new parameters in the moving average, as one f32.
    pub(super) average_weight: Tensor,
    /// The initial values of this rank's sums, which are later added up over ranks: five zeros for the losses, then
    /// this rank's encoded [`Requests`].
    pub(super) first_sums: Tensor,
    /// The properties of the current batch that a recorded step depends on.
    pub(super) form: Form,
}

impl Feed {
    /// An empty feed.
    pub(super) fn new(device: Device) -> Result<Self, TrainError> {
        let number = || Tensor::f_zeros([], (Kind::Float, device));
        Ok(Self {
            learning_rate: number()?,
            average_weight: number()?,
            first_sums: Tensor::f_zeros([6], (Kind::Double, device))?,
            form: Form::default(),
        })
    }

    /// Sets the inputs of a step: the form of `batch`, and `numbers`.
    pub(super) fn take(&mut self, batch: &Batch, numbers: &StepNumbers) -> Result<(), TrainError> {
        self.form = Form::of(batch);
        let _ = self.learning_rate.f_fill_(numbers.learning_rate)?;
        let _ = self.average_weight.f_fill_(numbers.average_weight)?;
        let _ = self.first_sums.f_narrow(0, 5, 1)?.f_fill_(numbers.requests.encode())?;
        Ok(())
    }
}
