//! A step on CUDA without autograd: forward and backward pass are written out, and fused kernels do the work between
//! the matrix products.
//!
//! The weights, their average, the moments and the gradient are flat buffers ([`flat`]). The matrix products read
//! weights that are rounded to bf16, and write their gradients as bf16 into the flat gradient. If a step has several
//! micro-batches, their gradients are summed in f32. One kernel clips the gradient, updates the weights, the moments
//! and the average, and rounds the new weights. All inputs of this kernel are on the device, so the host can launch the
//! next step without waiting for the previous one.
//!
//! Every row's loss is divided by the number of rows of the global batch. The sum over ranks is therefore the mean over
//! the global batch.
// Letters in tensor names: b rows of a micro-batch, d dimensions of the code, a anchors, e width of an embedding, t
// timesteps, n points.

mod flat;
mod inputs;
mod kernels;
mod pass;
mod rows;
mod sides;

use std::rc::Rc;

use locdiff_core::config::RunConfig;
use locdiff_core::random::{Philox, Stream, mask_threshold};
use tch::{Device, Kind, Tensor};

use self::flat::{FlatLayout, Layers};
use self::inputs::StepInputs;
use self::kernels::{Kernels, square_sums};
use self::sides::{Side, Sides};
use super::feed::{Form, StepNumbers};
use super::report::{LocalLosses, Report};
use crate::comm::{Group, Pending, ReduceOp};
use crate::diffusion::Forward;
use crate::loss::Loss;
use crate::methods::Locdiff;
use crate::model::ModuleShape;
use crate::native::nvrtc::Arg;
use crate::native::optim::Moments;
use crate::shards::Batch;
use crate::shdd::{Codes, Points};
use crate::train::error::TrainError;

/// Number of f32 in the struct `Control` of step.cu.
const CONTROL: i64 = 6;

/// The state of training, and the inputs, buffers and kernels of a step.
#[derive(Debug)]
pub(super) struct Explicit {
    kernels: Kernels,
    layout: FlatLayout,
    modules: Vec<ModuleShape>,
    device: Device,
    sides: Sides,
    /// Type of activations and rounded weights.
    kind: Kind,
    state: FlatState,
    /// The rounded weights.
    layers: Layers,
    /// The gradient of the last micro-batch.
    gradient: Tensor,
    gradients: Layers,
    /// The sum of the gradients of all micro-batches, f32. `None` if a step has only one micro-batch.
    total: Option<Tensor>,
    control: Tensor,
    time_embedding: Tensor,
    codes: Rc<Codes>,
    mean_e: Tensor,
    deviation_e: Tensor,
    signal_t: Tensor,
    noise_t: Tensor,
    inputs: StepInputs,
    loss: Loss,
    philox: Philox,
    kept_threshold: u64,
    dropout_threshold: u64,
    dropout_factor: f32,
    data: Group,
    /// The reductions that have started in this step.
    pending: Vec<Pending>,
    config: RunConfig,
}

/// The flat state of training.
#[derive(Debug)]
struct FlatState {
    weights: Tensor,
    average: Tensor,
    first_moments: Tensor,
    second_moments: Tensor,
    rounded: Tensor,
    /// Number of updates, as one f32.
    updates: Tensor,
}

/// A micro-batch: its number of rows, and its part of the [`StepInputs`].
#[derive(Debug)]
struct Micro {
    rows: i64,
    order: Tensor,
    timesteps: Tensor,
    segments: Tensor,
}

impl Explicit {
    /// Moves the weights of LocDiff's network into a flat buffer. Also returns views of the moments and of the moving
    /// average, which begins as a copy of the weights. `kind` is the type of matrix products.
    pub(super) fn new(
        config: &RunConfig,
        locdiff: &mut Locdiff,
        data: &Group,
        kind: Kind,
    ) -> Result<(Self, Moments, Vec<Tensor>), TrainError> {
        let (network, loss, codes) = (&mut locdiff.network, locdiff.loss.clone(), Rc::clone(&locdiff.codes));
        let (device, architecture) = (network.placement().device, network.architecture().clone());
        let modules = architecture.modules().to_vec();
        let layout = FlatLayout::new(modules.clone(), network.parameters());
        let zeros = |kind: Kind| Tensor::f_zeros([layout.elements], (kind, device));
        let weights = zeros(Kind::Float)?;
        network.parameters_mut().move_into(layout.parameters(&weights)?)?;
        let mut average = weights.f_empty_like()?;
        average.f_copy_(&weights)?;
        let rounded = if kind == Kind::Float { weights.shallow_clone() } else { weights.f_to_kind(kind)? };
        let (first_moments, second_moments, gradient) = (zeros(Kind::Float)?, zeros(Kind::Float)?, zeros(kind)?);
        let updates = Tensor::f_zeros([], (Kind::Float, device))?;
        let moments = Moments {
            exp_avgs: layout.parameters(&first_moments)?,
            exp_avg_sqs: layout.parameters(&second_moments)?,
            step: updates.shallow_clone(),
        };
        let averages = layout.parameters(&average)?;
        let has_micro_batches = config.train.micro_batch > 0 && config.train.micro_batch < config.train.global_batch;
        let widths = modules.iter().flat_map(|module| [module.input, module.hidden, module.output]);
        let widths = widths.chain([architecture.dims, architecture.embedding_width]);
        let forward = Forward::new(&locdiff.schedule, Kind::Float, device)?;
        let [mean_e, deviation_e] = [0, 1].map(|index| network.standardisation().named()[index].1.shallow_clone());
        let philox = Philox::new(config.train.seed);
        let explicit = Self {
            kernels: Kernels::compile(kind, widths)?,
            layers: layout.layers(&rounded)?,
            gradients: layout.layers(&gradient)?,
            total: has_micro_batches.then(|| zeros(Kind::Float)).transpose()?,
            control: Tensor::f_zeros([CONTROL], (Kind::Float, device))?,
            time_embedding: network.time_embedding().f_to_kind(kind)?,
            signal_t: forward.signal().f_contiguous()?,
            noise_t: forward.noise().f_contiguous()?,
            inputs: StepInputs::new(device, philox, config.diffusion.timesteps, config.train.micro_batch)?,
            kept_threshold: mask_threshold(1.0 - config.diffusion.condition_drop)?,
            dropout_threshold: mask_threshold(1.0 - config.model.dropout)?,
            dropout_factor: (1.0 / (1.0 - config.model.dropout)) as f32,
            data: data.clone(),
            pending: Vec::new(),
            config: config.clone(),
            state: FlatState { weights, average, first_moments, second_moments, rounded, updates },
            sides: Sides::new()?,
            layout,
            modules,
            device,
            kind,
            gradient,
            codes,
            mean_e,
            deviation_e,
            loss,
            philox,
        };
        Ok((explicit, moments, averages))
    }

    pub(super) fn form(&self) -> &Form {
        &self.inputs.form
    }

    pub(super) fn take(&mut self, step: u64, batch: &Batch, numbers: &StepNumbers) -> Result<(), TrainError> {
        self.inputs.take(step, batch, numbers)
    }

    /// Rounds the weights anew, after something other than a step has changed them.
    pub(super) fn weights_changed(&mut self) -> Result<(), TrainError> {
        let FlatState { weights, rounded, .. } = &mut self.state;
        Ok(rounded.f_copy_(weights)?)
    }

    /// The gradient: of the last micro-batch, or the sum over all micro-batches.
    pub(super) fn gradient(&self) -> &Tensor {
        self.total.as_ref().unwrap_or(&self.gradient)
    }

    /// Views of the gradient of each parameter.
    #[cfg(test)]
    pub(super) fn gradients_of_parameters(&self) -> Vec<Tensor> {
        self.layout.parameters(self.gradient()).expect("the gradient has the layout of the parameters")
    }

    /// Computes the gradients of the rows in the inputs. If `reduces` is true, each part of the gradient is reduced
    /// over ranks as soon as the last micro-batch has computed this part. Otherwise, each rank keeps its own gradients
    /// until [`Explicit::conclude`].
    pub(super) fn compute_gradients(&mut self, reduces: bool) -> Result<LocalLosses, TrainError> {
        let _without_gradients = tch::no_grad_guard();
        let rows = (self.inputs.form.slice.end - self.inputs.form.slice.start) as i64;
        if rows == 0 {
            return Err(TrainError::Config("this rank has no rows in the batch".to_owned()));
        }
        self.pending.clear();
        let micro_rows = self.inputs.micro_rows() as usize;
        let time = self.sides.run(Side::Time, || self.time_tables())?;
        let basis_ad = self.sides.run(Side::Time, || self.basis())?;
        let points_n3 = self.row_points(rows)?;
        let sums = Tensor::f_empty([6], (Kind::Double, self.device))?;
        let numbers = Tensor::f_zeros([Report::NUMBERS], (Kind::Double, self.device))?;
        let last = numbers.f_narrow(0, 7, 6)?;
        let mut pending = Vec::new();
        for (index, first) in (0..rows).step_by(micro_rows).enumerate() {
            let micro = self.micro(index, first, (rows - first).min(micro_rows as i64))?;
            let truth_bd = self.codes.encode(&Points::Device(points_n3.f_narrow(0, first, micro.rows)?))?;
            let is_last = first + micro.rows == rows;
            let mut arrived = |part: usize| {
                self.accumulate(part, index == 0)?;
                if reduces && is_last {
                    self.start_reductions(part, &mut pending)?;
                }
                Ok(())
            };
            let statistics = self.pass(&micro, &truth_bd, &basis_ad, &time, &mut arrived)?;
            let before = if index == 0 { &self.inputs.first_sums } else { &sums };
            let weights = [self.loss.kl_weight, self.loss.l2_weight, self.loss.l1_weight, self.loss.cosine_weight];
            let mut arguments =
                vec![Arg::Tensor(&sums), Arg::Tensor(&last), Arg::Tensor(before), Arg::Tensor(&statistics)];
            arguments.extend(weights.map(|weight| Arg::F32(weight as f32)));
            arguments.extend([Arg::U32(self.inputs.form.global_batch), Arg::U32(micro.rows as u32)]);
            self.kernels.per_row("add_losses", 1, &arguments)?;
        }
        self.pending = pending;
        Ok(LocalLosses { sums, last: numbers })
    }

    /// Finishes the reduction of the gradients, and updates the weights.
    pub(super) fn conclude(&mut self, losses: LocalLosses) -> Result<Report, TrainError> {
        let _without_gradients = tch::no_grad_guard();
        let LocalLosses { mut sums, last } = losses;
        let mut pending = std::mem::take(&mut self.pending);
        if pending.is_empty() {
            for part in 0..self.layout.arrivals.len() {
                self.start_reductions(part, &mut pending)?;
            }
        }
        if self.data.size() > 1 {
            pending.push(self.data.start_all_reduce(&mut sums, ReduceOp::Sum)?);
        }
        // Wait for every reduction, even after an error. An unfinished reduction would write into the gradient of the
        // next step.
        let mut result = Ok(());
        for work in pending {
            let outcome = work.wait_stream();
            result = result.and(outcome);
        }
        result?;
        self.update(&sums, &last)?;
        Ok(Report { numbers: last })
    }

    /// Clips the gradient, then updates the weights and their average. If the gradient is not finite or a rank has no
    /// rows, nothing changes. In any case, fills in the missing values of the [`Report`], in `numbers`.
    fn update(&self, sums: &Tensor, numbers: &Tensor) -> Result<(), TrainError> {
        let (train, elements) = (&self.config.train, self.layout.elements);
        let blocks = square_sums(elements);
        let squares = Tensor::f_empty([blocks], (Kind::Float, self.device))?;
        let names = if self.total.is_some() { ["squares_of_sums", "update_from_sums"] } else { ["squares", "update"] };
        let size = Arg::U64(elements.cast_unsigned());
        self.kernels.per_row(names[0], blocks, &[Arg::Tensor(&squares), Arg::Tensor(self.gradient()), size])?;
        let arguments = [
            Arg::Tensor(&self.control),
            Arg::Tensor(numbers),
            Arg::Tensor(&self.state.updates),
            Arg::Tensor(&squares),
            Arg::U32(blocks as u32),
            Arg::Tensor(sums),
            Arg::Tensor(&self.inputs.learning_rate),
            Arg::F32(train.clip_norm as f32),
            Arg::F32(train.beta1 as f32),
            Arg::F32(train.beta2 as f32),
            Arg::F32(train.weight_decay as f32),
            Arg::F32((1.0 - train.ema_decay) as f32),
        ];
        self.kernels.per_row("prepare_update", 1, &arguments)?;
        let state = &self.state;
        let arguments = [
            Arg::Tensor(&state.weights),
            Arg::Tensor(&state.first_moments),
            Arg::Tensor(&state.second_moments),
            Arg::Tensor(&state.average),
            if self.kind == Kind::Float { Arg::Null } else { Arg::Tensor(&state.rounded) },
            Arg::Tensor(self.gradient()),
            Arg::Tensor(&self.control),
            Arg::F32(train.beta1 as f32),
            Arg::F32(train.beta2 as f32),
            Arg::F32(train.epsilon as f32),
            size,
        ];
        Ok(self.kernels.per_item(names[1], elements / 4, &arguments)?)
    }

    /// Adds one part of the gradient to the sum over micro-batches, if there is such a sum.
    fn accumulate(&self, part: usize, is_first: bool) -> Result<(), TrainError> {
        let Some(total) = &self.total else { return Ok(()) };
        for range in &self.layout.arrivals[part] {
            let count = range.end - range.start;
            let narrow = |tensor: &Tensor| tensor.f_narrow(0, range.start, count);
            let (total, gradient) = (narrow(total)?, narrow(&self.gradient)?);
            let arguments = [
                Arg::Tensor(&total),
                Arg::Tensor(&gradient),
                Arg::I32(is_first.into()),
                Arg::U64(count.cast_unsigned()),
            ];
            self.kernels.per_item("accumulate", count / 4, &arguments)?;
        }
        Ok(())
    }

    /// Starts to sum one part of the gradient over ranks.
    fn start_reductions(&self, part: usize, pending: &mut Vec<Pending>) -> Result<(), TrainError> {
        if self.data.size() == 1 {
            return Ok(());
        }
        for range in &self.layout.arrivals[part] {
            let mut gradient = self.gradient().f_narrow(0, range.start, range.end - range.start)?;
            pending.push(self.data.start_all_reduce(&mut gradient, ReduceOp::Sum)?);
        }
        Ok(())
    }

    fn micro(&self, index: usize, first: i64, rows: i64) -> Result<Micro, TrainError> {
        let entries = i64::from(self.config.diffusion.timesteps) + 1;
        Ok(Micro {
            rows,
            order: self.inputs.order.f_narrow(0, first, rows)?,
            timesteps: self.inputs.row_timesteps.f_narrow(0, first, rows)?,
            segments: self.inputs.segments.f_narrow(0, index as i64 * entries, entries)?,
        })
    }

    /// The rounded harmonics of the anchors, `[a, d]`. `None` if the loss has no KL divergence.
    fn basis(&self) -> Result<Option<Tensor>, TrainError> {
        if self.loss.kl_weight == 0.0 {
            return Ok(None);
        }
        let anchors = i64::from(self.config.loss.anchors);
        let points_n3 = Tensor::f_empty([anchors, 3], (Kind::Double, self.device))?;
        let arguments = [
            Arg::Tensor(&points_n3),
            Arg::U64(self.philox.seed),
            Arg::U32(Stream::Anchors.id()?),
            Arg::Tensor(&self.inputs.step),
            Arg::U32(anchors as u32),
        ];
        self.kernels.per_item("uniform_points", anchors, &arguments)?;
        Ok(Some(self.codes.encode(&Points::Device(points_n3))?.f_to_kind(self.kind)?))
    }

    /// The unit vectors of the sorted rows, `[n, 3]`.
    fn row_points(&self, rows: i64) -> Result<Tensor, TrainError> {
        let points_n3 = Tensor::f_empty([rows, 3], (Kind::Double, self.device))?;
        let arguments = [
            Arg::Tensor(&points_n3),
            Arg::Tensor(&self.inputs.coordinates),
            Arg::Tensor(&self.inputs.order),
            Arg::U32(rows as u32),
        ];
        self.kernels.per_item("unit_vectors", rows, &arguments)?;
        Ok(points_n3)
    }
}
