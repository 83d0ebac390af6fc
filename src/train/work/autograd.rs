//! A step with libtorch's autograd, for every method and on every device. The backward pass overlaps with the reduction
//! of the gradients.
//!
//! Every data-parallel rank takes a slice of the global batch. The gradient buckets average over ranks, but the result
//! must be the mean over the rows of the global batch. Each rank therefore multiplies its loss by its share of the rows
//! times the number of ranks.

use locdiff_core::config::{RunConfig, TrainConfig};
use tch::{Kind, Tensor};

use super::feed::{Feed, Form, StepNumbers};
use super::report::{LocalLosses, Report};
use crate::comm::{Buckets, CollectiveFailure, CommError, Communicator, Group, ReduceOp};
use crate::loss::Losses;
use crate::methods::TrainableMethod;
use crate::model::{Parameters, Split};
use crate::native::optim::{AdamW, Moments, UpdateInputs, clip_divisor, ema_update, not_finite, squared_norm};
use crate::shards::Batch;
use crate::train::error::TrainError;

/// Bytes of a gradient bucket. The size is large enough for good bandwidth, and small enough that reductions start
/// early in the backward pass.
const BUCKET_BYTES: usize = 25 << 20;

/// The objects that a step with autograd uses, besides the state of training.
#[derive(Debug)]
pub(super) struct Autograd {
    feed: Feed,
    parameters: Vec<Tensor>,
    buckets: Buckets,
    data: Group,
    tensor: Option<Group>,
    optimiser: AdamW,
    config: RunConfig,
}

impl Autograd {
    pub(super) fn new(
        config: &RunConfig,
        method: &dyn TrainableMethod,
        ranks: &Communicator,
    ) -> Result<Self, TrainError> {
        let parameters = method.parameters().tensors();
        let TrainConfig { beta1, beta2, epsilon: eps, weight_decay, .. } = config.train;
        Ok(Self {
            feed: Feed::new(ranks.world().device())?,
            buckets: Buckets::new(ranks.data(), &parameters, BUCKET_BYTES)?,
            data: ranks.data().clone(),
            tensor: method.placement().tensor_parallel.clone(),
            optimiser: AdamW { beta1, beta2, eps, weight_decay },
            config: config.clone(),
            parameters,
        })
    }

    /// The form of the current batch.
    pub(super) fn form(&self) -> &Form {
        &self.feed.form
    }

    /// Sets the inputs of step `step`, counted from 0.
    pub(super) fn take(
        &mut self,
        method: &mut dyn TrainableMethod,
        step: u64,
        batch: &Batch,
        numbers: &StepNumbers,
    ) -> Result<(), TrainError> {
        method.take(step, batch)?;
        self.feed.take(batch, numbers)
    }

    /// Computes the gradients of the rows from [`Autograd::take`]. If `reduces` is true, the reduction over ranks
    /// starts while the last backward pass is running. Otherwise, each rank keeps its own gradients until
    /// [`Autograd::conclude`].
    pub(super) fn compute_gradients(
        &mut self,
        method: &mut dyn TrainableMethod,
        reduces: bool,
    ) -> Result<LocalLosses, TrainError> {
        let rows = self.feed.form.slice.end - self.feed.form.slice.start;
        let micro = match u64::from(self.config.train.micro_batch) {
            0 => rows,
            micro => micro.min(rows),
        };
        method.begin()?;
        self.buckets.zero()?;
        let mut sums = self.feed.first_sums.shallow_clone();
        let mut last = None;
        for first in (0..rows).step_by(micro as usize) {
            let count = micro.min(rows - first);
            let losses = method.losses(first, count)?;
            let share = count as f64 / f64::from(self.feed.form.global_batch);
            let means = stacked(&losses)?;
            sums = sums.f_add(&means.f_mul_scalar(share)?)?;
            let weighted = losses.total.f_mul_scalar(share * f64::from(self.data.size()))?;
            let backward = match reduces && first + count == rows {
                true => weighted.f_backward(),
                false => self.buckets.accumulate(|| weighted.f_backward()),
            };
            backward.map_err(|error| self.backward_error(error))?;
            let largest = losses.largest.f_to_kind(Kind::Double)?.f_view([1])?;
            last = Some(Tensor::f_cat(&[means.f_narrow(0, 0, 5)?, largest], 0)?);
        }
        let last = last.ok_or_else(|| TrainError::Config("this rank has no rows in the batch".to_owned()))?;
        Ok(LocalLosses { sums, last })
    }

    /// Finishes the reduction of the gradients, and updates the weights.
    pub(super) fn conclude(
        &mut self,
        parameters: &Parameters,
        moments: &mut Moments,
        averages: &[Tensor],
        losses: LocalLosses,
    ) -> Result<Report, TrainError> {
        self.buckets.finish()?;
        let LocalLosses { mut sums, last } = losses;
        self.data.start_all_reduce(&mut sums, ReduceOp::Sum)?.wait_stream()?;
        let squared = self.update(parameters, moments, averages, &mut sums)?.f_to_kind(Kind::Double)?.f_view([1])?;
        Ok(Report { numbers: Tensor::f_cat(&[sums, squared, last], 0)? })
    }

    /// The gradients in the order of the buckets, as flat tensors.
    pub(super) fn gradients(&self) -> Vec<Tensor> {
        self.buckets.flats()
    }

    /// Converts an error of the backward pass. If the text of the libtorch error names the tensor-parallel group, a
    /// collective of this group failed. The result is then a communication error, because a peer, not this rank,
    /// caused the failure.
    fn backward_error(&self, error: tch::TchError) -> TrainError {
        let error = TrainError::from(error);
        let text = error.to_string();
        match self.tensor.as_ref().filter(|group| text.contains(&format!("of group {}", group.name()))) {
            Some(group) => TrainError::Comm(CommError::Collective {
                operation: "backward",
                group: group.name().to_owned(),
                rank: group.rank(),
                size: group.size(),
                failure: CollectiveFailure::Failed { text },
            }),
            None => error,
        }
    }

    /// Clips the gradient, then updates the weights and their average. If the gradient is not finite, nothing changes.
    /// Returns the squared norm before clipping. The last number in `sums` holds the encoded `Requests` of the ranks.
    /// With tensor parallelism, this function adds up the requests over the ranks of the replica.
    fn update(
        &mut self,
        parameters: &Parameters,
        moments: &mut Moments,
        averages: &[Tensor],
        sums: &mut Tensor,
    ) -> Result<Tensor, TrainError> {
        let gradients: Vec<Tensor> = self.parameters.iter().map(Tensor::grad).collect();
        let squared = self.squared_norm(parameters, &gradients, sums)?;
        // If the step is void (a rank has no rows), the sum of the encoded requests is NaN. Then the norm must be NaN
        // too, so that no weight changes.
        let requests = sums.f_select(0, 5)?.f_mul_scalar(0.0)?.f_to_kind(squared.kind())?;
        let squared = squared.f_add(&requests)?;
        let found_inf = not_finite(&squared)?;
        let clip_norm = self.config.train.clip_norm;
        let divisor = (clip_norm > 0.0).then(|| clip_divisor(&squared, clip_norm)).transpose()?;
        let control = UpdateInputs {
            learning_rate: &self.feed.learning_rate,
            grad_divisor: divisor.as_ref(),
            found_inf: Some(&found_inf),
        };
        self.optimiser.update(&self.parameters, &gradients, moments, control)?;
        let moved = found_inf.f_neg()?.f_add_scalar(1.0)?.f_mul(&self.feed.average_weight)?;
        ema_update(averages, &self.parameters, &moved)?;
        Ok(squared)
    }

    /// The squared norm of the whole gradient. With tensor parallelism, the pieces of split parameters are summed over
    /// the ranks of the replica, and replicated parameters count once.
    fn squared_norm(
        &self,
        parameters: &Parameters,
        gradients: &[Tensor],
        sums: &mut Tensor,
    ) -> Result<Tensor, TrainError> {
        let Some(tensor) = &self.tensor else { return Ok(squared_norm(&self.buckets.flats())?) };
        let gradient_of = |replicated: bool| {
            let all = parameters.iter().zip(gradients);
            let some = all.filter(move |(parameter, _)| (parameter.split == Split::Replicated) == replicated);
            some.map(|(_, gradient)| gradient.shallow_clone()).collect::<Vec<_>>()
        };
        let pieces = squared_norm(&gradient_of(false))?;
        // Reduce the requests (to stop, for example) together with the squared norm, because a separate reduction would
        // cost time in every step.
        let mut requests = sums.f_narrow(0, 5, 1)?;
        let mut both = Tensor::f_cat(&[pieces.f_view([1])?, requests.f_to_kind(pieces.kind())?], 0)?;
        tensor.start_all_reduce(&mut both, ReduceOp::Sum)?.wait_stream()?;
        requests.f_copy_(&both.f_narrow(0, 1, 1)?)?;
        Ok(both.f_select(0, 0)?.f_view(&pieces.size()[..])?.f_add(&squared_norm(&gradient_of(true))?)?)
    }
}

/// The total loss and its parts as one f64 vector; parts of weight 0 are zero. The last number of the vector is zero:
/// it is the place for the encoded `Requests`.
fn stacked(losses: &Losses) -> Result<Tensor, TrainError> {
    let zero = losses.total.f_detach()?.f_zeros_like()?;
    let or_zero = |part: &Option<Tensor>| part.as_ref().unwrap_or(&zero).shallow_clone();
    let parts = [
        losses.total.f_detach()?,
        or_zero(&losses.kl),
        or_zero(&losses.l2),
        or_zero(&losses.l1),
        or_zero(&losses.cosine),
        zero.shallow_clone(),
    ];
    Ok(Tensor::f_stack(&parts, 0)?.f_to_kind(Kind::Double)?)
}
