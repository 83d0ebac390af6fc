//! The network at fixed timesteps, with each C-Siren collapsed to one matrix product and one sine.
//!
//! Before its sine, a C-Siren is linear in its input x. All chains of a sampler step have the same timestep, so the two
//! products with W_x and W_o become one:
//!
//! ```text
//! W_o ((1 + scale_t) ⊙ (W_x x + b_x) + shift_t + W_I e + b_I) + b_o  =  A_t x + c_t + g(e)
//! A_t = W_o diag(1 + scale_t) W_x,    c_t = W_o ((1 + scale_t) ⊙ b_x + shift_t) + b_o,    g(e) = W_o (W_I e + b_I)
//! ```
//!
//! A_t and c_t depend only on the timestep, and g(e) only on the image. c_t and g(e) stay in f32. On CUDA, a kernel
//! adds them to the product A_t x, computes the sine, and writes the result directly into one half of the tensor that a
//! skip connection concatenates.
//!
//! If the network multiplies bf16 numbers, the collapsed network multiplies f16 numbers, because the mantissa of f16
//! has three more bits than that of bf16. But if a product A_t x could exceed the largest f16 number, the collapsed
//! network multiplies bf16 numbers, like the network.
//!
//! The matrices A_t of all timesteps are kept in memory, or formed again whenever they are used. Both give the same
//! bits.
// Letters in tensor names: n chains, r images (rows), i input, h hidden, o output, t timesteps of the sampler.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::architecture::Architecture;
use super::cs_unet::{Conditioned, CsUnet};
use super::error::ModelError;
use crate::native::gemm::mm_f32;
use crate::native::nvrtc::{Arg, Kernel};
use crate::native::random::sampler_kernel;

/// Number of modules.
const MODULES: usize = 6;
/// Number of timesteps whose factors of A_t are scaled together, to launch fewer kernels.
const FORMED_AT_ONCE: usize = 8;
/// The collapsed network uses f16 only if no product can exceed this number, half of the largest f16 number.
const F16_SAFE: f64 = 32_752.0;
/// Must equal ROWS of sampler.cu.
const ROWS_PER_THREAD: u32 = 4;

/// The network at the timesteps of a sampler.
#[derive(Debug)]
pub struct Collapsed {
    modules: Vec<CollapsedModule>,
    /// For each module, the matrices A_t of all timesteps, `[t, o, i]`. `None` if each use computes its matrix.
    kept: Option<Vec<Tensor>>,
    /// The transposed weight of the head.
    head_od: Tensor,
    head_bias_d: Tensor,
    architecture: Architecture,
    kind: Kind,
    device: Device,
    /// The kernel that adds the terms and takes the sine. `None` on the CPU.
    kernel: Option<Kernel>,
}

/// The factors of one module.
#[derive(Debug)]
struct CollapsedModule {
    /// W_o in f32.
    out_oh: Tensor,
    /// W_x in the type of the matrix products.
    x_hi: Tensor,
    /// 1 + scale of each timestep, f32.
    scales_th: Tensor,
    /// c_t of each timestep, f32.
    shifts: Vec<Tensor>,
}

/// The terms g(e) of some images: for each module, one f32 tensor with one row per image.
#[derive(Debug)]
pub struct ImageTerms(Vec<Tensor>);

impl ImageTerms {
    /// Copies the terms of the same number of other images into this memory.
    pub fn copy_from(&self, other: &Self) -> Result<(), ModelError> {
        self.0.iter().zip(&other.0).try_for_each(|(own, other)| Ok(own.shallow_clone().f_copy_(other)?))
    }
}

/// Memory for the values of one step, for a fixed number of chains.
#[derive(Debug)]
pub struct Workspace {
    /// The input of the head: the outermost concatenation of a skip connection.
    outer: Tensor,
    /// The inputs of all modules but the first. `inputs`, `outer` and `outputs` share memory: the left half of each
    /// concatenation is the output of a module on the way up, and the right half is the output of a module on the way
    /// down.
    inputs: [Tensor; MODULES - 1],
    outputs: [Tensor; MODULES],
    /// The product of each module.
    products: Vec<Tensor>,
    /// The product of the head, without its bias.
    predicted_nd: Tensor,
}

impl Workspace {
    /// The prediction of the last step, without the bias of the head.
    pub fn predicted(&self) -> &Tensor {
        &self.predicted_nd
    }
}

impl Collapsed {
    /// Whether the collapsed network needs fewer multiplications per step than the network itself. This is not the case
    /// with a narrow bottleneck.
    pub fn is_smaller(architecture: &Architecture) -> bool {
        architecture.sampler_step_flops(true) < architecture.sampler_step_flops(false)
    }

    /// Bytes of the matrices A_t of `timesteps` timesteps.
    pub fn kept_bytes(network: &CsUnet, timesteps: usize) -> u64 {
        let numbers: i64 = network.architecture().modules().iter().map(|module| module.input * module.output).sum();
        let bytes = product_kind(network).elt_size_in_bytes() * timesteps;
        numbers.cast_unsigned() * bytes as u64
    }

    /// Collapses an unsplit network at `timesteps`. If `keeps` is true, forms the matrices A_t now and keeps them. If
    /// the network is on a GPU, this GPU must be the current device.
    pub fn new(network: &CsUnet, timesteps: &[usize], keeps: bool) -> Result<Self, ModelError> {
        let _without_gradients = tch::no_grad_guard();
        let collapsed = Self::with_kind(network, timesteps, keeps, product_kind(network))?;
        if collapsed.kind != Kind::Half {
            return Ok(collapsed);
        }
        let largest = collapsed.largest_product(timesteps.len())?;
        // NaN fails this comparison, so it counts as unsafe.
        if largest <= F16_SAFE {
            return Ok(collapsed);
        }
        tracing::warn!(
            "the products of the collapsed network may reach {largest:.0}, too large for f16, so bf16 is used; the \
             weights may have grown without bound in training"
        );
        drop(collapsed);
        Self::with_kind(network, timesteps, keeps, Kind::BFloat16)
    }

    /// An upper bound of the magnitudes of all products, for inputs x whose root mean square is at most 1: the
    /// length of a row of A_t times the length of x. The outputs of a sine are such inputs, and noised codes almost
    /// always are. The host waits for the device.
    fn largest_product(&self, steps: usize) -> Result<f64, ModelError> {
        let mut products = Vec::new();
        let per_pass = if self.kept.is_some() { steps } else { FORMED_AT_ONCE };
        for (index, shape) in self.architecture.modules().iter().enumerate() {
            for first in (0..steps).step_by(per_pass) {
                let matrices_toi = self.matrices(index, first..steps.min(first + per_pass))?;
                let lengths_to = matrices_toi.f_norm_scalaropt_dim_dtype(2.0, [2].as_slice(), false, Kind::Float)?;
                products.push(lengths_to.f_max()?.f_mul_scalar((shape.input as f64).sqrt())?);
            }
        }
        let head_d = self.head_od.f_norm_scalaropt_dim_dtype(2.0, [0].as_slice(), false, Kind::Float)?;
        products.push(head_d.f_max()?.f_mul_scalar((self.head_od.size()[0] as f64).sqrt())?);
        Ok(Tensor::f_stack(&products, 0)?.f_max()?.f_double_value(&[])?)
    }

    fn with_kind(network: &CsUnet, timesteps: &[usize], keeps: bool, kind: Kind) -> Result<Self, ModelError> {
        let (placement, table) = (network.placement(), network.time_table()?);
        let device = placement.device;
        let rows: Vec<i64> = timesteps.iter().map(|t| *t as i64).collect();
        let rows_t = Tensor::f_from_slice(&rows)?.f_to_device(device)?;
        let mut modules = Vec::new();
        for index in 0..MODULES {
            let weights = network.module_weights(index);
            let table_t2h = table.module(index).f_index_select(0, &rows_t)?.f_to_kind(Kind::Float)?;
            let [scales_th, offsets_th] = <[Tensor; 2]>::try_from(table_t2h.f_chunk(2, 1)?)
                .map_err(|parts| ModelError::Bad(format!("the time table has {} parts, wanted 2", parts.len())))?;
            let [out_oh, out_bias_o, x_bias_h] =
                [weights.out, weights.out_bias, weights.x_bias].map(|tensor| tensor.f_to_kind(Kind::Float));
            let out_oh = out_oh?.f_detach()?;
            let hidden_th = scales_th.f_mul(&x_bias_h?)?.f_add(&offsets_th)?;
            let shifts = hidden_th.f_matmul(&out_oh.f_tr()?)?.f_add(&out_bias_o?)?.f_unbind(0)?;
            let (x_hi, scales_th) = (weights.x.f_to_kind(kind)?.f_detach()?, scales_th.f_contiguous()?);
            modules.push(CollapsedModule { out_oh, x_hi, scales_th, shifts });
        }
        let [weight, bias] = network.head_weights();
        let widths = network.architecture().modules().map(|module| module.output);
        let mut collapsed = Self {
            modules,
            kept: None,
            head_od: weight.f_to_kind(kind)?.f_detach()?.f_tr()?,
            head_bias_d: bias.f_to_kind(Kind::Float)?.f_detach()?,
            architecture: network.architecture().clone(),
            kind,
            device,
            kernel: if device.is_cuda() { Some(sampler_kernel("sine_rows", kind, widths)?) } else { None },
        };
        if keeps {
            let all = |index| collapsed.form(index, 0..timesteps.len());
            collapsed.kept = Some((0..MODULES).map(all).collect::<Result<_, ModelError>>()?);
        }
        Ok(collapsed)
    }

    /// The terms g(e) of images. `image` is the result of [`CsUnet::prepare`] for these images.
    pub fn image_terms(&self, image: &Conditioned) -> Result<ImageTerms, ModelError> {
        let _without_gradients = tch::no_grad_guard();
        let term = |(module, hidden_rh): (&CollapsedModule, &Tensor)| -> Result<Tensor, ModelError> {
            Ok(mm_f32(&hidden_rh.f_to_kind(self.kind)?, &module.out_oh.f_to_kind(self.kind)?.f_tr()?)?)
        };
        Ok(ImageTerms(self.modules.iter().zip(image.terms()).map(term).collect::<Result<_, _>>()?))
    }

    /// Memory for the values of `chains` chains.
    pub fn workspace(&self, chains: usize) -> Result<Workspace, ModelError> {
        let zeros = |width: i64| Tensor::f_zeros([chains as i64, width], (self.kind, self.device));
        let shapes = self.architecture.modules();
        let joined = |level: usize| -> Result<(Tensor, Tensor, Tensor), ModelError> {
            let (whole, width) = (zeros(2 * shapes[level].output)?, shapes[level].output);
            let [up, down] = [0, width].map(|first| whole.f_narrow(1, first, width));
            Ok((whole, up?, down?))
        };
        let [(outer, up1, down1), (middle, up2, down2), (inner, up3, down3)] = [joined(0)?, joined(1)?, joined(2)?];
        let inputs = [&down1, &down2, &down3, &inner, &middle].map(Tensor::shallow_clone);
        Ok(Workspace {
            outer,
            inputs,
            outputs: [down1, down2, down3, up3, up2, up1],
            products: shapes.iter().map(|shape| zeros(shape.output)).collect::<Result<_, _>>()?,
            predicted_nd: zeros(self.architecture.dims)?,
        })
    }

    /// The type of the matrix products.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The bias of the head, f32.
    pub fn head_bias(&self) -> &Tensor {
        &self.head_bias_d
    }

    /// Predicts the scaled clean codes at timestep `step` of the sampler, counted from 0, into `work`. `x_nd` holds the
    /// noised codes in the type of the matrix products, and `images_n` the row of `image` for each chain, i32.
    pub fn predict(
        &self,
        step: usize,
        x_nd: &Tensor,
        image: &ImageTerms,
        images_n: &Tensor,
        work: &Workspace,
    ) -> Result<(), ModelError> {
        for (index, module) in self.modules.iter().enumerate() {
            let (product_no, input) = (&work.products[index], if index == 0 { x_nd } else { &work.inputs[index - 1] });
            let matrix_oi = self.matrices(index, step..step + 1)?.f_select(0, 0)?;
            let _ = input.f_mm_out(product_no, &matrix_oi.f_tr()?)?;
            self.sine(&work.outputs[index], product_no, &module.shifts[step], &image.0[index], images_n)?;
        }
        let _ = work.outer.f_mm_out(&work.predicted_nd, &self.head_od)?;
        Ok(())
    }

    /// The matrices A_t of a module at some timesteps of the sampler, `[t, o, i]`.
    fn matrices(&self, index: usize, steps: Range<usize>) -> Result<Tensor, ModelError> {
        match &self.kept {
            Some(kept) => Ok(kept[index].f_narrow(0, steps.start as i64, steps.len() as i64)?),
            None => self.form(index, steps),
        }
    }

    /// Forms the matrices A_t of a module at some timesteps of the sampler, `[t, o, i]`.
    fn form(&self, index: usize, steps: Range<usize>) -> Result<Tensor, ModelError> {
        let (module, options) = (&self.modules[index], (self.kind, self.device));
        let [out, hidden] = [0, 1].map(|dimension| module.out_oh.size()[dimension]);
        let formed_toi = Tensor::f_empty([steps.len() as i64, out, module.x_hi.size()[1]], options)?;
        for first in (0..steps.len()).step_by(FORMED_AT_ONCE) {
            let count = FORMED_AT_ONCE.min(steps.len() - first);
            let scales_t1h =
                module.scales_th.f_narrow(0, (steps.start + first) as i64, count as i64)?.f_unsqueeze(1)?;
            let scaled_toh = Tensor::f_empty([count as i64, out, hidden], options)?;
            let _ = module.out_oh.f_unsqueeze(0)?.f_mul_out(&scaled_toh, &scales_t1h)?;
            // One product per timestep, so that a matrix has the same bits whether it is formed alone or with others.
            for at in 0..count as i64 {
                let formed_oi = formed_toi.f_select(0, first as i64 + at)?;
                let _ = scaled_toh.f_select(0, at)?.f_mm_out(&formed_oi, &module.x_hi)?;
            }
        }
        Ok(formed_toi)
    }

    /// Writes sin(product + shift + terms of each chain's image) to `out`.
    fn sine(
        &self,
        out_no: &Tensor,
        product_no: &Tensor,
        shift_o: &Tensor,
        terms_ro: &Tensor,
        images_n: &Tensor,
    ) -> Result<(), ModelError> {
        let Some(kernel) = &self.kernel else {
            let angle_no = product_no.f_add(shift_o)?.f_add(&terms_ro.f_index_select(0, images_n)?)?;
            return Ok(out_no.shallow_clone().f_copy_(&angle_no.f_sin()?)?);
        };
        let [rows, width] = [0, 1].map(|dimension| product_no.size()[dimension] as u32);
        let arguments = [
            Arg::Strided(out_no),
            Arg::U64(out_no.stride()[0].cast_unsigned()),
            Arg::Tensor(product_no),
            Arg::Tensor(shift_o),
            Arg::Tensor(terms_ro),
            Arg::Tensor(images_n),
            Arg::U32(rows),
            Arg::U32(width),
        ];
        let threads = u64::from(rows.div_ceil(ROWS_PER_THREAD)) * u64::from(width.div_ceil(4));
        Ok(kernel.launch_threads(threads, &arguments)?)
    }
}

/// The type of the matrix products of a collapsed network.
fn product_kind(network: &CsUnet) -> Kind {
    match network.placement().compute_kind() {
        Kind::BFloat16 => Kind::Half,
        kind => kind,
    }
}
