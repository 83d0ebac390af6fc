//! One optimiser step: encode, noise, predict, loss, backward with the reductions beside it, clip, AdamW, moving average.
//!
//! Every rank takes its slice of the global batch. Its loss is weighed by its share of the rows, times the number of ranks, so
//! that the mean over ranks which the buckets make is the mean over rows, whatever the slices are. Random numbers are named by
//! (step, row of the global batch): neither the number of ranks nor the size of a micro-batch changes them.
//!
//! Gradients that are not finite are agreed on by construction: after the reduction every rank has the same gradient, and with
//! it the same norm.
// b rows of a micro-batch · d dimensions of the code · a anchors · e embedding

use std::ops::Range;

use locdiff_launch::config::{RunConfig, TrainConfig};
use tch::{Device, Kind, Tensor};

use super::codes::Codes;
use super::error::TrainError;
use super::schedule::{ema_decay, learning_rate};
use crate::comm::{Buckets, Group, ReduceOp};
use crate::diffusion::{Forward, NoiseSchedule, TrainingDraws};
use crate::geo::{UnitVector, places};
use crate::loss::{Inputs, Loss, Losses};
use crate::model::{Architecture, CsUnet, DropoutDraws, Placement, Timesteps};
use crate::native::optim::{AdamW, Control, Moments, clip_divisor, ema_update, not_finite, squared_norm};
use crate::native::philox::Philox;
use crate::native::random::Step;
use crate::shards::Batch;
use crate::shdd::{Filter, uniform_points};

/// Bytes of a bucket of gradients: large enough for bandwidth, small enough that reductions begin early in backward.
const BUCKET_BYTES: usize = 25 << 20;

/// Means over the global batch; none: the part has no weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossParts {
    /// The weighted sum.
    pub total: f64,
    /// Anchor KL.
    pub kl: Option<f64>,
    /// Mean squared error.
    pub l2: Option<f64>,
    /// Mean absolute error.
    pub l1: Option<f64>,
    /// One minus cosine similarity.
    pub cosine: Option<f64>,
}

/// What a step did.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutcome {
    /// Steps made, this one included.
    pub step: u64,
    /// Losses over the global batch.
    pub loss: LossParts,
    /// Norm of the whole gradient before clipping.
    pub gradient_norm: f64,
    /// Learning rate of the step.
    pub learning_rate: f64,
    /// The gradient was not finite: nothing was updated. What is known of it.
    pub skipped: Option<String>,
}

/// A replica of the model with all that training changes.
#[derive(Debug)]
pub struct Trainer {
    pub(super) network: CsUnet,
    pub(super) moments: Moments,
    pub(super) ema: Vec<Tensor>,
    pub(super) updates: u64,
    parameters: Vec<Tensor>,
    buckets: Buckets,
    group: Group,
    codes: Codes,
    schedule: NoiseSchedule,
    forward: Forward,
    loss: Loss,
    optimiser: AdamW,
    rate: Tensor,
    philox: Philox,
    settings: Settings,
}

/// What a step needs of the configuration.
#[derive(Debug, Clone)]
struct Settings {
    train: TrainConfig,
    anchors: usize,
    condition_drop: f64,
    dropout: bool,
    rank: u32,
}

/// Rows of a micro-batch, on the device.
struct Rows<'a> {
    image_be: Tensor,
    points: &'a [UnitVector],
    /// Their places in the global batch.
    places: Range<u64>,
}

impl Trainer {
    /// A replica with first weights. `group` are the ranks that average their gradients.
    pub fn new(
        config: &RunConfig,
        embedding_width: u32,
        filter: Option<Filter>,
        group: &Group,
    ) -> Result<Self, TrainError> {
        let (device, precision) = (group.device(), config.train.precision);
        let philox = Philox::new(config.train.seed);
        let architecture = Architecture::new(&config.model, embedding_width, config.diffusion.timesteps);
        let network = CsUnet::new(architecture, Placement::on(device, precision), philox)?;
        let parameters = network.parameters().tensors();
        let schedule = NoiseSchedule::new(&config.diffusion);
        let loss = match &filter {
            Some(filter) => Loss::filtered(&config.loss, filter, precision),
            None => Loss::new(&config.loss, config.model.degree, precision),
        };
        let train = config.train.clone();
        let optimiser =
            AdamW { beta1: train.beta1, beta2: train.beta2, eps: train.epsilon, weight_decay: train.weight_decay };
        Ok(Self {
            moments: Moments::zeros(&parameters),
            ema: parameters.iter().map(duplicate).collect::<Result<_, _>>()?,
            updates: 0,
            buckets: Buckets::new(group, &parameters, BUCKET_BYTES)?,
            group: group.clone(),
            codes: Codes::new(config.model.degree, filter, device, train.threads as usize)?,
            forward: Forward::new(&schedule, Kind::Float, device)?,
            rate: Tensor::f_zeros([], (Kind::Float, device))?,
            settings: Settings {
                anchors: config.loss.anchors as usize,
                condition_drop: config.diffusion.condition_drop,
                dropout: config.model.dropout > 0.0,
                rank: group.rank(),
                train,
            },
            network,
            parameters,
            schedule,
            loss,
            optimiser,
            philox,
        })
    }

    /// The network with the weights of the last step.
    pub fn network(&self) -> &CsUnet {
        &self.network
    }

    /// Names and values of the averaged weights.
    pub fn averaged(&self) -> Vec<(String, Tensor)> {
        let names = self.network.parameters().iter().map(|parameter| parameter.name.clone());
        names.zip(self.ema.iter().map(Tensor::shallow_clone)).collect()
    }

    /// Codes as the network sees them.
    pub fn codes(&self) -> &Codes {
        &self.codes
    }

    /// The noise schedule.
    pub fn schedule(&self) -> &NoiseSchedule {
        &self.schedule
    }

    /// Makes the step with this number, from 0, on this rank's slice of its global batch.
    pub fn step(&mut self, step: u64, batch: &Batch) -> Result<StepOutcome, TrainError> {
        let _span = tracing::debug_span!("step", rank = self.settings.rank, step).entered();
        let points: Vec<UnitVector> = places(&batch.latitudes, &batch.longitudes)
            .map_err(crate::shdd::ShddError::from)?
            .into_iter()
            .map(UnitVector::from)
            .collect();
        let rows = batch.slice.end - batch.slice.start;
        let micro = u64::from(self.settings.train.micro_batch).min(rows);
        let micro = if micro == 0 { rows } else { micro };
        let anchors_ad = self.codes.of(&uniform_points(self.settings.train.seed, step, 0, self.settings.anchors)?)?;
        self.buckets.zero()?;
        let mut sums = Tensor::f_zeros([5], (Kind::Double, self.group.device()))?;
        let mut last = None;
        for first in (0..rows).step_by(micro as usize) {
            let end = (first + micro).min(rows);
            let rows_here = Rows {
                image_be: batch.embeddings.f_narrow(0, first as i64, (end - first) as i64)?,
                points: &points[first as usize..end as usize],
                places: batch.slice.start + first..batch.slice.start + end,
            };
            let losses = self.losses(step, rows_here, &anchors_ad)?;
            let share = (end - first) as f64 / f64::from(batch.position.global_batch);
            sums = sums.f_add(&stacked(&losses)?.f_mul_scalar(share)?)?;
            let weighed = losses.total.f_mul_scalar(share * f64::from(self.group.size()))?;
            if end == rows {
                weighed.f_backward()?;
            } else {
                self.buckets.accumulate(|| weighed.f_backward())?;
            }
            last = Some(losses);
        }
        self.buckets.finish()?;
        self.group.all_reduce(&mut sums, ReduceOp::Sum)?;
        self.update(step, &sums, last)
    }

    /// The losses of a micro-batch: means over its rows.
    fn losses(&self, step: u64, rows: Rows<'_>, anchors_ad: &Tensor) -> Result<Losses, TrainError> {
        let device = self.group.device();
        let (at, first_sample) = (Step::At(step), rows.places.start);
        let draws = TrainingDraws { philox: self.philox, step: at, first_sample, samples: rows.points.len(), device };
        let truth_bd = self.codes.of(rows.points)?;
        let t_b = draws.timesteps(&self.schedule)?;
        let noised_bd = self.forward.noised(&truth_bd, &t_b, &draws.noise(truth_bd.size()[1] as usize)?)?;
        let kept_b1 = match self.settings.condition_drop {
            drop if drop > 0.0 => Some(draws.kept_conditions(drop)?),
            _ => None,
        };
        let image = self.network.prepare(&rows.image_be.f_to_device(device)?, kept_b1.as_ref())?;
        let dropout = self.settings.dropout.then_some(DropoutDraws { philox: self.philox, step: at, first_sample });
        let time = self.network.time_table()?;
        let predicted_bd = self.network.forward(&noised_bd, Timesteps::Each(&t_b), &time, &image, dropout)?;
        let inputs =
            Inputs { predicted_bd: &predicted_bd, truth_bd: &truth_bd, basis_ad: anchors_ad, anchors_split: None };
        Ok(self.loss.compute(inputs)?)
    }

    /// Clips, updates and averages; or, where the gradient is not finite, does nothing.
    fn update(&mut self, step: u64, sums: &Tensor, last: Option<Losses>) -> Result<StepOutcome, TrainError> {
        let train = &self.settings.train;
        let squared = squared_norm(&self.buckets.flats())?;
        let found_inf = not_finite(&squared)?;
        // The one place where the host waits for the device.
        let numbers = Tensor::f_cat(&[sums.shallow_clone(), squared.f_to_kind(Kind::Double)?.f_view([1])?], 0)?;
        let numbers = Vec::<f64>::try_from(numbers.f_to_device(Device::Cpu)?)?;
        let learning_rate = learning_rate(train, step);
        let part = |index: usize, there: bool| there.then_some(numbers[index]);
        let has = |pick: fn(&Losses) -> bool| last.as_ref().is_some_and(pick);
        let loss = LossParts {
            total: numbers[0],
            kl: part(1, has(|losses| losses.kl.is_some())),
            l2: part(2, has(|losses| losses.l2.is_some())),
            l1: part(3, has(|losses| losses.l1.is_some())),
            cosine: part(4, has(|losses| losses.cosine.is_some())),
        };
        let gradient_norm = numbers[5].sqrt();
        let skipped = (!gradient_norm.is_finite()).then(|| why_not_finite(step, self.settings.rank, last.as_ref()));
        if skipped.is_none() {
            let _ = self.rate.f_fill_(learning_rate)?;
            let divisor = if train.clip_norm > 0.0 { Some(clip_divisor(&squared, train.clip_norm)?) } else { None };
            let gradients: Vec<Tensor> = self.parameters.iter().map(Tensor::grad).collect();
            let control =
                Control { learning_rate: &self.rate, grad_divisor: divisor.as_ref(), found_inf: Some(&found_inf) };
            self.optimiser.update(&self.parameters, &gradients, &mut self.moments, control)?;
            ema_update(&self.ema, &self.parameters, ema_decay(train, self.updates))?;
            self.updates += 1;
        }
        Ok(StepOutcome { step: step + 1, loss, gradient_norm, learning_rate, skipped })
    }
}

/// A copy that shares nothing, without a gradient.
pub(super) fn duplicate(tensor: &Tensor) -> Result<Tensor, tch::TchError> {
    let _without_gradients = tch::no_grad_guard();
    let tensor = tensor.f_detach()?;
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(&tensor)?;
    Ok(copy)
}

/// Total and parts as one f64 vector; parts without weight are zeros.
fn stacked(losses: &Losses) -> Result<Tensor, TrainError> {
    let zero = losses.total.f_detach()?.f_zeros_like()?;
    let or_zero = |part: &Option<Tensor>| part.as_ref().unwrap_or(&zero).shallow_clone();
    let parts = [
        losses.total.f_detach()?,
        or_zero(&losses.kl),
        or_zero(&losses.l2),
        or_zero(&losses.l1),
        or_zero(&losses.cosine),
    ];
    Ok(Tensor::f_stack(&parts, 0)?.f_to_kind(Kind::Double)?)
}

/// This rank's view of a gradient that is not finite.
fn why_not_finite(step: u64, rank: u32, last: Option<&Losses>) -> String {
    match last.map(|losses| losses.check(step + 1, rank)) {
        Some(Err(error)) => error.to_string(),
        _ => format!("step {}, rank {rank}: the loss here is finite, the gradient is not", step + 1),
    }
}
