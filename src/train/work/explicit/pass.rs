//! Forward and backward pass of one micro-batch, derived by hand.
//!
//! For each module, with input x, timestep t, standardised embedding e and output y:
//! ```text
//! u = W_x x + b_x        h = (1 + scale_t) ⊙ u + shift_t + W_I e + b_I        z = W_o h + b_o        y = sin z
//! ```
//! With g = dL/dy, the backward pass is (biases follow by summing over rows):
//! ```text
//! dz = g ⊙ cos z          dW_o = dzᵀ h          dh = dz W_o          dW_I = dhᵀ e          dshift_t = Σ dh
//! dscale_t = Σ dh ⊙ u     du = (1 + scale_t) ⊙ dh                    dW_x = duᵀ x          dx = du W_x
//! ```
//! The sums run over the rows of timestep t. Because du is linear in dh, the gradient of b_x is Σ_t (1 + scale_t) ⊙
//! dshift_t. If two later layers use an output, its gradient is a sum of two products: the second product is added to
//! the first.
//!
//! Other streams ([`Side`]) compute the time layers and the gradients of most weights. No later kernel of the pass
//! needs these gradients.
// Letters in tensor names: b rows of the micro-batch, d dimensions of a code, a anchors, e width of an embedding, h
// hidden width, t timesteps.

use locdiff_core::config::KlDirection;
use locdiff_core::random::Stream;
use tch::{Kind, Tensor};

use super::kernels::{row_groups, stride};
use super::sides::{Aside, Side};
use super::{Explicit, Micro};
use crate::native::gemm::{mm_f32, mm_f32_out};
use crate::native::nvrtc::Arg;
use crate::shdd::CODE_SCALE;
use crate::train::error::TrainError;

/// Number of values that the kernels keep for each row, and their order in step.cu: KL, L2, L1, cosine, largest.
const STATISTICS: i64 = 5;

/// The time layers of all modules at every timestep.
#[derive(Debug)]
pub(super) struct TimeTables {
    /// The input of the SiLU, for all modules together: `[t, Σh]`.
    before: Tensor,
    /// The output of the SiLU.
    hidden: Tensor,
    /// Scales and shifts of each module: `[t, 2h]`.
    tables: Vec<Tensor>,
}

/// The values of a forward pass that the backward pass needs.
#[derive(Debug)]
struct Activations {
    noised_bd: Tensor,
    image_be: Tensor,
    /// For each module: u, h, and z without its bias, in f32.
    u: Vec<Tensor>,
    hidden: Vec<Tensor>,
    z: Vec<Tensor>,
    skips: Skips,
    predicted_bd: Tensor,
}

/// The outputs of the modules, in pairs. Each level has one matrix: its left half is the output of the module on the
/// way up, and its right half is the output of the module on the way down. The gradients of the outputs have the same
/// form.
#[derive(Debug)]
struct Skips([Tensor; 3]);

impl Skips {
    fn new(explicit: &Explicit, rows: i64) -> Result<Self, TrainError> {
        let level = |index: usize| explicit.activations(rows, 2 * explicit.modules[index].output);
        Ok(Self([level(0)?, level(1)?, level(2)?]))
    }

    fn half(&self, level: usize, is_down: bool) -> Result<Tensor, TrainError> {
        let width = self.0[level].size()[1] / 2;
        Ok(self.0[level].f_narrow(1, if is_down { width } else { 0 }, width)?)
    }

    /// The output of module `index`.
    fn output(&self, index: usize) -> Result<Tensor, TrainError> {
        if index < 3 { self.half(index, true) } else { self.half(5 - index, false) }
    }

    /// The input of module `index`, which is not 0.
    fn input(&self, index: usize) -> Result<Tensor, TrainError> {
        if index < 4 { self.half(index - 1, true) } else { Ok(self.0[6 - index].shallow_clone()) }
    }
}

impl Explicit {
    /// Computes scale and shift of all modules at every timestep.
    pub(super) fn time_tables(&self) -> Result<TimeTables, TrainError> {
        let (layers, timesteps) = (&self.layers, self.time_embedding.size()[0]);
        let before = layers.time_in.bias.f_addmm(&self.time_embedding, &layers.time_in.weight.f_tr()?)?;
        let hidden = before.f_empty_like()?;
        let size = [timesteps, before.size()[1]];
        self.kernels.per_quad("silu", size, vec![Arg::Tensor(&hidden), Arg::Tensor(&before)])?;
        let table = |index: usize| {
            let time_out = &layers.modules[index].time_out;
            Ok::<_, TrainError>(time_out.bias.f_addmm(&self.hidden_part(&hidden, index)?, &time_out.weight.f_tr()?)?)
        };
        let tables = (0..self.modules.len()).map(table).collect::<Result<_, _>>()?;
        Ok(TimeTables { before, hidden, tables })
    }

    /// The columns of module `index` in a matrix that holds the hidden values of all modules.
    fn hidden_part(&self, all: &Tensor, index: usize) -> Result<Tensor, TrainError> {
        let first = self.modules[..index].iter().map(|module| module.hidden).sum();
        Ok(all.f_narrow(1, first, self.modules[index].hidden)?)
    }

    fn activations(&self, rows: i64, width: i64) -> Result<Tensor, TrainError> {
        Ok(Tensor::f_empty([rows, width], (self.kind, self.device))?)
    }

    fn floats(&self, rows: i64, width: i64) -> Result<Tensor, TrainError> {
        Ok(Tensor::f_empty([rows, width], (Kind::Float, self.device))?)
    }

    /// Computes the gradient of a micro-batch. Calls `arrived` with the index of each part of the gradient
    /// ([`FlatLayout::arrivals`](super::flat::FlatLayout)) when the kernels of this part have been launched. Returns
    /// each row's losses.
    pub(super) fn pass(
        &self,
        micro: &Micro,
        truth_bd: &Tensor,
        basis_ad: &Aside<Option<Tensor>>,
        time: &Aside<TimeTables>,
        arrived: &mut dyn FnMut(usize) -> Result<(), TrainError>,
    ) -> Result<Tensor, TrainError> {
        let rounded_bd = self.activations(micro.rows, truth_bd.size()[1])?;
        let kept = self.forward(micro, truth_bd, &rounded_bd, time)?;
        let statistics = self.floats(STATISTICS, micro.rows)?;
        let gradient_bd = self.losses(micro, &kept.predicted_bd, truth_bd, &rounded_bd, basis_ad, &statistics)?;
        self.backward(micro, &kept, gradient_bd, &time.result, arrived)?;
        Ok(statistics)
    }

    fn forward(
        &self,
        micro: &Micro,
        truth_bd: &Tensor,
        rounded_bd: &Tensor,
        time: &Aside<TimeTables>,
    ) -> Result<Activations, TrainError> {
        let (rows, layers, inputs) = (micro.rows, &self.layers, &self.inputs);
        let noised_bd = rounded_bd.f_empty_like()?;
        let arguments = vec![
            Arg::Tensor(&noised_bd),
            Arg::Tensor(rounded_bd),
            Arg::Tensor(truth_bd),
            Arg::Tensor(&micro.timesteps),
            Arg::Tensor(&micro.order),
            Arg::Tensor(&self.signal_t),
            Arg::Tensor(&self.noise_t),
            Arg::U64(self.philox.seed),
            Arg::U32(Stream::Noise.id()?),
            Arg::Tensor(&inputs.step),
            Arg::U64(inputs.form.slice.start),
        ];
        self.kernels.per_quad("noised", [rows, truth_bd.size()[1]], arguments)?;
        let width = inputs.image_be.size()[1];
        let image_be = self.activations(rows, width)?;
        let arguments = vec![
            Arg::Tensor(&image_be),
            Arg::Tensor(&inputs.image_be),
            Arg::Tensor(&self.mean_e),
            Arg::Tensor(&self.deviation_e),
            Arg::Tensor(&micro.order),
            Arg::U64(self.kept_threshold),
            Arg::U64(self.philox.seed),
            Arg::U32(Stream::Guidance.id()?),
            Arg::Tensor(&inputs.step),
            Arg::U64(inputs.form.slice.start),
        ];
        let hidden_sum = layers.image.bias.size()[0];
        let terms = self.activations(rows, hidden_sum)?;
        let image = self.sides.run(Side::Weights, || {
            self.kernels.per_quad("standardise", [rows, width], arguments)?;
            let _ = layers.image.bias.f_addmm_out(&terms, &image_be, &layers.image.weight.f_tr()?)?;
            Ok(())
        })?;
        let skips = Skips::new(self, rows)?;
        let (mut all_u, mut all_hidden, mut all_z) = (Vec::new(), Vec::new(), Vec::new());
        for (index, module) in self.modules.iter().enumerate() {
            let own = &layers.modules[index];
            let input = if index == 0 { noised_bd.shallow_clone() } else { skips.input(index)? };
            let u = own.x.bias.f_addmm(&input, &own.x.weight.f_tr()?)?;
            if index == 0 {
                image.wait()?;
                time.wait()?;
            }
            let hidden = u.f_empty_like()?;
            let term = self.hidden_part(&terms, index)?;
            let arguments = vec![
                Arg::Tensor(&hidden),
                Arg::Tensor(&u),
                Arg::Strided(&term),
                stride(&term),
                Arg::Tensor(&time.result.tables[index]),
                Arg::Tensor(&micro.timesteps),
            ];
            self.kernels.per_quad("modulate", [rows, module.hidden], arguments)?;
            let z = mm_f32(&hidden, &own.out.weight.f_tr()?)?;
            let output = skips.output(index)?;
            let mut arguments =
                vec![Arg::Strided(&output), stride(&output), Arg::Tensor(&z), Arg::Tensor(&own.out.bias)];
            arguments.extend(self.dropout(index, micro)?);
            self.kernels.per_quad("sine", [rows, module.output], arguments)?;
            all_u.push(u);
            all_hidden.push(hidden);
            all_z.push(z);
        }
        let predicted_bd = layers.head.bias.f_addmm(&skips.0[0], &layers.head.weight.f_tr()?)?;
        Ok(Activations { noised_bd, image_be, u: all_u, hidden: all_hidden, z: all_z, skips, predicted_bd })
    }

    /// The arguments that select the random numbers of dropout for module `index`.
    fn dropout<'a>(&'a self, index: usize, micro: &'a Micro) -> Result<[Arg<'a>; 7], TrainError> {
        Ok([
            Arg::U64(self.dropout_threshold),
            Arg::F32(self.dropout_factor),
            Arg::U64(self.philox.seed),
            Arg::U32(Stream::Dropout(index as u16).id()?),
            Arg::Tensor(&self.inputs.step),
            Arg::U64(self.inputs.form.slice.start),
            Arg::Tensor(&micro.order),
        ])
    }

    /// Computes the losses of each row, and returns the gradient of their weighted sum with respect to the prediction.
    /// The weighted sum is divided by the number of rows of the global batch.
    fn losses(
        &self,
        micro: &Micro,
        predicted_bd: &Tensor,
        truth_bd: &Tensor,
        rounded_bd: &Tensor,
        basis_ad: &Aside<Option<Tensor>>,
        statistics: &Tensor,
    ) -> Result<Tensor, TrainError> {
        let (rows, dims) = (micro.rows, truth_bd.size()[1]);
        let share = |weight: f64| Arg::F32((weight / f64::from(self.inputs.form.global_batch)) as f32);
        let gradient_bd = predicted_bd.f_empty_like()?;
        let arguments = [
            Arg::Tensor(&gradient_bd),
            Arg::Tensor(statistics),
            Arg::Tensor(predicted_bd),
            Arg::Tensor(truth_bd),
            Arg::F32(CODE_SCALE as f32),
            share(self.loss.l2_weight),
            share(self.loss.l1_weight),
            share(self.loss.cosine_weight),
            Arg::U32(rows as u32),
            Arg::U32(dims as u32),
        ];
        self.kernels.per_row("distances", rows, &arguments)?;
        basis_ad.wait()?;
        let Some(basis_ad) = &basis_ad.result else { return Ok(gradient_bd) };
        let logits_ba = mm_f32(predicted_bd, &basis_ad.f_tr()?)?;
        let truth_ba = mm_f32(rounded_bd, &basis_ad.f_tr()?)?;
        let anchors = basis_ad.size()[0];
        let slope_ba = self.activations(rows, anchors)?;
        let arguments = [
            Arg::Tensor(&slope_ba),
            Arg::Tensor(statistics),
            Arg::Tensor(&logits_ba),
            Arg::Tensor(&truth_ba),
            Arg::F32((1.0 / CODE_SCALE) as f32),
            share(self.loss.kl_weight),
            Arg::I32((self.loss.direction == KlDirection::Forward).into()),
            Arg::U32(rows as u32),
            Arg::U32(anchors as u32),
        ];
        self.kernels.per_row("divergence", rows, &arguments)?;
        add_product(&gradient_bd, &slope_ba, basis_ad)?;
        Ok(gradient_bd)
    }

    fn backward(
        &self,
        micro: &Micro,
        kept: &Activations,
        gradient_bd: Tensor,
        time: &TimeTables,
        arrived: &mut dyn FnMut(usize) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let (rows, layers, gradients) = (micro.rows, &self.layers, &self.gradients);
        let (count, groups) = (self.modules.len(), row_groups(rows));
        let outputs: i64 = self.modules.iter().map(|module| module.output).sum();
        let dims = gradient_bd.size()[1];
        let head_sums = self.floats(groups.into(), dims)?;
        self.sides.run(Side::Weights, || {
            product(&gradients.head.weight, &gradient_bd.f_tr()?, &kept.skips.0[0])?;
            let arguments =
                [Arg::Tensor(&head_sums), Arg::Tensor(&gradient_bd), Arg::U32(rows as u32), Arg::U32(dims as u32)];
            self.kernels.per_column("row_group_sums", dims, groups, &arguments)?;
            arrived(0)
        })?;
        let skips = Skips::new(self, rows)?;
        product(&skips.0[0], &gradient_bd, &layers.head.weight)?;
        let out_sums = self.floats(groups.into(), outputs)?;
        let hidden_sum = time.hidden.size()[1];
        let dhidden = self.activations(rows, hidden_sum)?;
        let (dtime, dtime_wide) = (time.hidden.f_empty_like()?, self.floats(time.hidden.size()[0], hidden_sum)?);
        // Other streams read these tensors, so they must live until the current stream has waited for those streams.
        let mut held = Vec::new();
        for (index, module) in self.modules.iter().enumerate().rev() {
            let (own, target) = (&layers.modules[index], &gradients.modules[index]);
            let dout = skips.output(index)?;
            let dz = self.activations(rows, module.output)?;
            let first = self.modules[..index].iter().map(|module| module.output).sum();
            let sums = out_sums.f_narrow(1, first, module.output)?;
            let mut arguments =
                vec![Arg::Tensor(&dz), Arg::Strided(&sums), stride(&sums), Arg::Strided(&dout), stride(&dout)];
            arguments.extend([Arg::Tensor(&kept.z[index]), Arg::Tensor(&own.out.bias)]);
            arguments.extend(self.dropout(index, micro)?);
            arguments.extend([Arg::U32(rows as u32), Arg::U32(module.output as u32)]);
            self.kernels.per_column("cosine", module.output, groups, &arguments)?;
            let dh = self.hidden_part(&dhidden, index)?;
            product(&dh, &dz, &own.out.weight)?;
            let (du, table) = (kept.u[index].f_empty_like()?, &time.tables[index]);
            let (dtable, dtable_wide) = (table.f_empty_like()?, self.floats(table.size()[0], table.size()[1])?);
            let timesteps = table.size()[0];
            let arguments = [
                Arg::Tensor(&du),
                Arg::Tensor(&dtable),
                Arg::Tensor(&dtable_wide),
                Arg::Strided(&dh),
                stride(&dh),
                Arg::Tensor(&kept.u[index]),
                Arg::Tensor(table),
                Arg::Tensor(&micro.segments),
                Arg::U32(module.hidden as u32),
            ];
            self.kernels.per_column("modulate_backward", module.hidden, timesteps as u32, &arguments)?;
            let time_layers = self.sides.run(Side::Time, || {
                product(&target.time_out.weight, &dtable.f_tr()?, &self.hidden_part(&time.hidden, index)?)?;
                mm_f32_out(&self.hidden_part(&dtime_wide, index)?, &dtable, &own.time_out.weight)?;
                let arguments = [
                    Arg::Tensor(&target.time_out.bias),
                    Arg::Tensor(&target.image_bias),
                    Arg::Tensor(&target.x.bias),
                    Arg::Tensor(&dtable_wide),
                    Arg::Tensor(table),
                    Arg::U32(timesteps as u32),
                    Arg::U32(module.hidden as u32),
                ];
                Ok(self.kernels.per_column("table_biases", module.hidden, 1, &arguments)?)
            })?;
            self.sides.run(Side::Weights, || {
                product(&target.out.weight, &dz.f_tr()?, &kept.hidden[index])?;
                let input = if index == 0 { kept.noised_bd.shallow_clone() } else { kept.skips.input(index)? };
                product(&target.x.weight, &du.f_tr()?, &input)?;
                time_layers.wait()?;
                arrived(count - index)
            })?;
            match index {
                0 => {}
                // The inputs of these modules have a gradient already, from a later layer.
                1..4 => {
                    let dinput = skips.input(index)?;
                    add_product(&dinput, &du, &own.x.weight)?;
                }
                _ => product(&skips.input(index)?, &du, &own.x.weight)?,
            }
            held.extend([dz, du, dtable, dtable_wide]);
        }
        let biases = self.sides.run(Side::Weights, || {
            for (bias, sums) in [(&gradients.out_biases, &out_sums), (&gradients.head.bias, &head_sums)] {
                let width = bias.size()[0];
                let arguments = [Arg::Tensor(bias), Arg::Tensor(sums), Arg::U32(groups), Arg::U32(width as u32)];
                self.kernels.per_column("column_sums", width, 1, &arguments)?;
            }
            Ok(())
        })?;
        let time_layers = self.sides.run(Side::Time, || {
            let arguments = [
                Arg::Tensor(&dtime),
                Arg::Tensor(&gradients.time_in.bias),
                Arg::Tensor(&dtime_wide),
                Arg::Tensor(&time.before),
                Arg::U32(dtime.size()[0] as u32),
                Arg::U32(hidden_sum as u32),
            ];
            self.kernels.per_column("silu_backward", hidden_sum, 1, &arguments)?;
            product(&gradients.time_in.weight, &dtime.f_tr()?, &self.time_embedding)
        })?;
        product(&gradients.image.weight, &dhidden.f_tr()?, &kept.image_be)?;
        biases.wait()?;
        time_layers.wait()?;
        drop(held);
        arrived(count + 1)
    }
}

/// out ← a b.
fn product(out: &Tensor, a: &Tensor, b: &Tensor) -> Result<(), TrainError> {
    let _ = a.f_mm_out(out, b)?;
    Ok(())
}

/// out ← out + a b.
fn add_product(out: &Tensor, a: &Tensor, b: &Tensor) -> Result<(), TrainError> {
    let _ = out.f_addmm_out(out, a, b)?;
    Ok(())
}
