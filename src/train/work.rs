//! The part of a step that runs on the device. It encodes the places, adds noise, predicts, and computes the loss. The
//! backward pass overlaps with the reduction of the gradients. Then the gradient is clipped, AdamW updates the weights,
//! and the moving average of the weights is updated.
//!
//! Every data-parallel rank takes a slice of the global batch. The gradient buckets average over ranks, but the result
//! must be the mean over the rows of the global batch. Each rank therefore multiplies its loss by its share of the rows
//! times the number of ranks. Random numbers are a function of the step and the row of the global batch. They do not
//! depend on the number of ranks or the size of a micro-batch.
//!
//! The tensor-parallel ranks of one replica take the same slice. Each of these ranks holds a piece of the wide layers
//! and a share of the anchors, and all of them compute the same loss.
//!
//! Invariant: [`Work::run`] never waits for the device, and everything that changes between steps comes from the
//! [`Feed`]. A step can therefore run eagerly or be recorded as a graph.
//!
//! All ranks agree on whether a gradient is finite, because after the reduction every rank has the same norm. If the
//! gradient is not finite, no rank updates anything.
// Letters in tensor names: b rows of a micro-batch, d dimensions of the code, a anchors, e width of an embedding.

use locdiff_core::config::{RunConfig, TrainConfig};
use locdiff_core::random::Philox;
use tch::{Kind, Tensor};

use super::codes::Codes;
use super::error::TrainError;
use super::feed::Feed;
use crate::comm::{Buckets, CollectiveFailure, CommError, Communicator, Group, ReduceOp};
use crate::diffusion::{Forward, NoiseSchedule, TrainingDraws};
use crate::loss::{Inputs, Loss, Losses};
use crate::model::{Architecture, CsUnet, DropoutDraws, Placement, Split, Timesteps};
use crate::native::optim::{AdamW, Moments, UpdateInputs, clip_divisor, ema_update, not_finite, squared_norm};
use crate::native::random::Step;
use crate::shdd::Filter;

/// Bytes of a gradient bucket. The size is large enough for good bandwidth, and small enough that reductions start
/// early in the backward pass.
const BUCKET_BYTES: usize = 25 << 20;

/// Everything that a training step uses or changes: the network, its optimiser state and averaged weights, the inputs,
/// and the groups of ranks.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) network: CsUnet,
    pub(super) moments: Moments,
    pub(super) ema: Vec<Tensor>,
    pub(super) feed: Feed,
    pub(super) codes: Codes,
    schedule: NoiseSchedule,
    parameters: Vec<Tensor>,
    buckets: Buckets,
    pub(super) data: Group,
    /// The ranks that share one replica; `None` without tensor parallelism.
    pub(super) tensor: Option<Group>,
    forward: Forward,
    loss: Loss,
    optimiser: AdamW,
    philox: Philox,
    pub(super) config: RunConfig,
}

/// The losses of this rank's rows, before the reduction over ranks.
#[derive(Debug)]
pub(super) struct LocalLosses {
    sums: Tensor,
    last: Losses,
}

/// The results of a step, on the device.
#[derive(Debug)]
pub(super) struct Report {
    /// Seven f64 values: five mean losses over the global batch (total, KL, L2, L1, cosine), the sum of the encoded
    /// requests of all ranks ([`Requests`](super::feed::Requests)), and the squared norm of the gradient.
    pub(super) numbers: Tensor,
    /// Losses of this rank's last micro-batch.
    pub(super) last: Losses,
}

impl Work {
    /// The model with its initial weights.
    pub(super) fn new(
        config: &RunConfig,
        embedding_width: u32,
        filter: Option<Filter>,
        ranks: &Communicator,
    ) -> Result<Self, TrainError> {
        let (device, train) = (ranks.world().device(), &config.train);
        let tensor = (ranks.layout().tensor_parallel() > 1).then(|| ranks.tensor().clone());
        let placement = Placement { tensor_parallel: tensor.clone(), ..Placement::on(device, train.precision) };
        let philox = Philox::new(train.seed);
        let architecture = Architecture::new(&config.model, embedding_width, config.diffusion.timesteps);
        let network = CsUnet::new(architecture, placement, philox)?;
        let parameters = network.parameters().tensors();
        let schedule = NoiseSchedule::new(&config.diffusion, &config.model);
        let TrainConfig { beta1, beta2, epsilon: eps, weight_decay, .. } = config.train;
        let optimiser = AdamW { beta1, beta2, eps, weight_decay };
        let loss = match &filter {
            Some(filter) => Loss::filtered(&config.loss, filter, train.precision),
            None => Loss::new(&config.loss, config.model.degree, train.precision),
        };
        Ok(Self {
            moments: Moments::zeros(&parameters),
            ema: parameters.iter().map(duplicate).collect::<Result<_, _>>()?,
            feed: Feed::new(device)?,
            codes: Codes::new(config.model.degree, filter, device, train.threads() as usize)?,
            forward: Forward::new(&schedule, Kind::Float, device)?,
            buckets: Buckets::new(ranks.data(), &parameters, BUCKET_BYTES)?,
            data: ranks.data().clone(),
            optimiser,
            config: config.clone(),
            network,
            schedule,
            parameters,
            tensor,
            loss,
            philox,
        })
    }

    /// Runs the step whose inputs are in the feed.
    pub(super) fn run(&mut self) -> Result<Report, TrainError> {
        let losses = self.compute_gradients(true)?;
        self.conclude(losses)
    }

    /// Computes the gradients of the rows in the feed. If `reduces` is true, the reduction over ranks starts while the
    /// last backward pass is running. Otherwise, each rank keeps its own gradients until [`Work::conclude`].
    pub(super) fn compute_gradients(&mut self, reduces: bool) -> Result<LocalLosses, TrainError> {
        let rows = self.feed.form.slice.end - self.feed.form.slice.start;
        let micro = match u64::from(self.config.train.micro_batch) {
            0 => rows,
            micro => micro.min(rows),
        };
        let anchors_ad = self.codes.encode(&self.feed.anchors)?;
        self.buckets.zero()?;
        let mut sums = self.feed.first_sums.shallow_clone();
        let mut last = None;
        for first in (0..rows).step_by(micro as usize) {
            let count = micro.min(rows - first);
            let losses = self.losses(first, count, &anchors_ad)?;
            let share = count as f64 / f64::from(self.feed.form.global_batch);
            sums = sums.f_add(&stacked(&losses)?.f_mul_scalar(share)?)?;
            let weighted = losses.total.f_mul_scalar(share * f64::from(self.data.size()))?;
            let backward = match reduces && first + count == rows {
                true => weighted.f_backward(),
                false => self.buckets.accumulate(|| weighted.f_backward()),
            };
            backward.map_err(|error| self.backward_error(error))?;
            last = Some(losses);
        }
        let last = last.ok_or_else(|| TrainError::Config("this rank has no rows in the batch".to_owned()))?;
        Ok(LocalLosses { sums, last })
    }

    /// Finishes the reduction of the gradients, and updates the weights.
    pub(super) fn conclude(&mut self, losses: LocalLosses) -> Result<Report, TrainError> {
        self.buckets.finish()?;
        let LocalLosses { mut sums, last } = losses;
        self.data.start_all_reduce(&mut sums, ReduceOp::Sum)?.wait_stream()?;
        let squared = self.update(&mut sums)?.f_to_kind(Kind::Double)?.f_view([1])?;
        Ok(Report { numbers: Tensor::f_cat(&[sums, squared], 0)?, last })
    }

    /// The gradients in the order of the buckets, as flat tensors.
    pub(super) fn gradients(&self) -> Vec<Tensor> {
        self.buckets.flats()
    }

    /// All tensors that must be equal on all replicas.
    pub(super) fn replicated(&self) -> Vec<Tensor> {
        let lists = [&self.parameters, &self.ema, &self.moments.exp_avgs, &self.moments.exp_avg_sqs];
        lists.into_iter().flatten().map(Tensor::shallow_clone).collect()
    }

    /// The parameters that are not split. They must be equal on all ranks of this replica.
    pub(super) fn unsplit(&self) -> Vec<Tensor> {
        let all = self.network.parameters().iter();
        all.filter(|parameter| parameter.split == Split::Replicated).map(|found| found.tensor.shallow_clone()).collect()
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

    /// The mean losses of a micro-batch: `count` rows of this rank's slice, starting at row `first` of the slice.
    fn losses(&self, first: u64, count: u64, anchors_ad: &Tensor) -> Result<Losses, TrainError> {
        let device = self.data.device();
        // Random numbers are indexed by the row's position in the global batch.
        let (step, first_sample) = (Step::Counter(&self.feed.counter), self.feed.form.slice.start + first);
        let draws = TrainingDraws { philox: self.philox, step, first_sample, samples: count as usize, device };
        let image_be = self.feed.image_be.f_narrow(0, first as i64, count as i64)?;
        let truth_bd = self.codes.encode(&self.feed.rows.narrow(first, count)?)?;
        let t_b = draws.timesteps(&self.schedule)?;
        let noised_bd = self.forward.noised(&truth_bd, &t_b, &draws.noise(truth_bd.size()[1] as usize)?)?;
        let drop = self.config.diffusion.condition_drop;
        let kept_b1 = (drop > 0.0).then(|| draws.kept_conditions(drop)).transpose()?;
        let image = self.network.prepare(&image_be, kept_b1.as_ref())?;
        let dropout =
            (self.config.model.dropout > 0.0).then_some(DropoutDraws { philox: self.philox, step, first_sample });
        let time = self.network.time_table()?;
        let predicted_bd = self.network.forward(&noised_bd, Timesteps::Each(&t_b), &time, &image, dropout)?;
        let anchors_split = self.tensor.as_ref();
        let inputs = Inputs { predicted_bd: &predicted_bd, truth_bd: &truth_bd, basis_ad: anchors_ad, anchors_split };
        Ok(self.loss.compute(inputs)?)
    }

    /// Clips the gradient, then updates the weights and their average. If the gradient is not finite, nothing changes.
    /// Returns the squared norm before clipping. The last number in `sums` holds the encoded `Requests` of the ranks.
    /// With tensor parallelism, this function adds up the requests over the ranks of the replica.
    fn update(&mut self, sums: &mut Tensor) -> Result<Tensor, TrainError> {
        let gradients: Vec<Tensor> = self.parameters.iter().map(Tensor::grad).collect();
        let squared = self.squared_norm(&gradients, sums)?;
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
        self.optimiser.update(&self.parameters, &gradients, &mut self.moments, control)?;
        let moved = found_inf.f_neg()?.f_add_scalar(1.0)?.f_mul(&self.feed.average_weight)?;
        ema_update(&self.ema, &self.parameters, &moved)?;
        Ok(squared)
    }

    /// The squared norm of the whole gradient. With tensor parallelism, the pieces of split parameters are summed over
    /// the ranks of the replica, and replicated parameters count once.
    fn squared_norm(&self, gradients: &[Tensor], sums: &mut Tensor) -> Result<Tensor, TrainError> {
        let Some(tensor) = &self.tensor else { return Ok(squared_norm(&self.buckets.flats())?) };
        let gradient_of = |replicated: bool| {
            let all = self.network.parameters().iter().zip(gradients);
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

/// A detached copy in newly allocated memory.
pub(super) fn duplicate(tensor: &Tensor) -> Result<Tensor, tch::TchError> {
    let _without_gradients = tch::no_grad_guard();
    let tensor = tensor.f_detach()?;
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(&tensor)?;
    Ok(copy)
}
