//! Random tensors on CPU and GPU, drawn with [`Philox`].
//!
//! A draw can read its step from a [`DeviceCounter`] on the GPU, so that a captured CUDA graph draws new numbers after
//! the counter has changed. Before a capture, make each kind of draw once: its kernel is compiled at first use, and
//! kernels cannot be compiled during a capture.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use locdiff_core::random::{Draw, Philox, RangeError, STEP_END, Stream, check_below, check_int_bound, mask_threshold};
use tch::kind::Element;
use tch::{Device, Kind, Tensor};

use super::error::NativeError;
use super::nvrtc::{Arg, Kernel};

const SOURCE: &str = include_str!("kernels/philox.cu");
/// Without fused multiply-add, every operation rounds as it does on the CPU.
const OPTIONS: &[&str] = &["--fmad=false", "--std=c++17"];
const THREADS: u64 = 256;
/// The kernels of the sampler. They draw noise with the functions of philox.cu.
const SAMPLER_SOURCE: &str =
    concat!(include_str!("kernels/philox.cu"), include_str!("kernels/quads.cu"), include_str!("kernels/sampler.cu"));

/// An error while drawing random numbers.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RandomError {
    /// A field of the draw is out of range.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The device failed.
    #[error(transparent)]
    Native(#[from] NativeError),
}

super::from_torch!(RandomError);

/// Where the step of a draw comes from.
#[derive(Debug, Clone, Copy)]
pub enum Step<'a> {
    /// The step number, passed by the host.
    At(u64),
    /// A counter that holds the step number. It is read when the random numbers are drawn. If the counter is on the
    /// GPU, the host does not wait for it.
    Counter(&'a DeviceCounter),
}

/// Which numbers to draw. The result is a `[samples, elements]` tensor.
#[derive(Debug, Clone, Copy)]
pub struct RowDraw<'a> {
    /// The purpose of the numbers; each purpose has its own stream.
    pub stream: Stream,
    /// The training step, or another counter that distinguishes the draws of the stream.
    pub step: Step<'a>,
    /// Global index of the first row.
    pub first_sample: u64,
    /// Number of rows.
    pub samples: usize,
    /// Numbers per row.
    pub elements: usize,
}

/// A step counter on a device: one i64 that the kernels read.
#[derive(Debug)]
pub struct DeviceCounter(Tensor);

impl DeviceCounter {
    /// Creates a counter with the value `start`.
    pub fn new(device: Device, start: u64) -> Result<Self, RandomError> {
        let mut counter = Self(Tensor::f_zeros([1], (Kind::Int64, device))?);
        counter.set(start)?;
        Ok(counter)
    }

    /// Sets the counter to `step`. On the GPU, the change takes effect in the order of the current stream.
    pub fn set(&mut self, step: u64) -> Result<(), RandomError> {
        check_below("step", step, STEP_END)?;
        let _ = self.0.f_fill_(step.cast_signed())?;
        Ok(())
    }

    /// Reads the counter. The host waits for the device.
    pub fn get(&self) -> Result<u64, RandomError> {
        Ok(self.0.f_int64_value(&[0])?.cast_unsigned())
    }
}

/// Draws tensors of random numbers.
pub trait RandomTensors {
    /// Uniform in [0, 1), f32.
    fn uniform(&self, device: Device, rows: RowDraw<'_>) -> Result<Tensor, RandomError>;

    /// Standard normals, f32.
    fn normal(&self, device: Device, rows: RowDraw<'_>) -> Result<Tensor, RandomError>;

    /// Integers in `0..bound`, i64.
    fn int(&self, device: Device, bound: u32, rows: RowDraw<'_>) -> Result<Tensor, RandomError>;

    /// Booleans, each true with probability `keep`. For dropout, divide the kept activations by `keep`.
    fn mask(&self, device: Device, keep: f64, rows: RowDraw<'_>) -> Result<Tensor, RandomError>;
}

impl RandomTensors for Philox {
    fn uniform(&self, device: Device, rows: RowDraw<'_>) -> Result<Tensor, RandomError> {
        draw_tensor(*self, device, rows, ("fill_uniform", None), |draw, out: &mut [f32]| self.fill_uniform(draw, out))
    }

    fn normal(&self, device: Device, rows: RowDraw<'_>) -> Result<Tensor, RandomError> {
        draw_tensor(*self, device, rows, ("fill_normal", None), |draw, out: &mut [f32]| self.fill_normal(draw, out))
    }

    fn int(&self, device: Device, bound: u32, rows: RowDraw<'_>) -> Result<Tensor, RandomError> {
        check_int_bound(bound)?;
        let kernel = ("fill_int", Some(Arg::U32(bound)));
        draw_tensor(*self, device, rows, kernel, |draw, out: &mut [i64]| self.fill_int(draw, bound, out))
    }

    fn mask(&self, device: Device, keep: f64, rows: RowDraw<'_>) -> Result<Tensor, RandomError> {
        let kernel = ("fill_mask", Some(Arg::U64(mask_threshold(keep)?)));
        draw_tensor(*self, device, rows, kernel, |draw, out: &mut [bool]| self.fill_mask(draw, keep, out))
    }
}

/// Draws a tensor: on the GPU with the kernel `name`, on the CPU with `fill`. The kernel takes `extra` as its second
/// argument, after the output.
fn draw_tensor<T: Element + Clone + Default>(
    philox: Philox,
    device: Device,
    rows: RowDraw<'_>,
    (name, extra): (&'static str, Option<Arg<'_>>),
    fill: impl FnOnce(Draw, &mut [T]) -> Result<(), RangeError>,
) -> Result<Tensor, RandomError> {
    if device.is_cuda() {
        return draw_on_gpu(philox, device, name, T::KIND, extra, rows);
    }
    let mut values = vec![T::default(); rows.samples * rows.elements];
    fill(rows.draw()?, &mut values)?;
    Ok(Tensor::f_from_slice(&values)?.f_view([rows.samples as i64, rows.elements as i64])?)
}

fn draw_on_gpu(
    philox: Philox,
    device: Device,
    name: &'static str,
    kind: Kind,
    extra: Option<Arg<'_>>,
    rows: RowDraw<'_>,
) -> Result<Tensor, RandomError> {
    let (counter, step) = match rows.step {
        Step::At(step) => (Arg::Null, step),
        Step::Counter(counter) => (Arg::Tensor(&counter.0), 0),
    };
    let draw = Draw { stream: rows.stream, step, first_sample: rows.first_sample, elements: rows.elements };
    let stream = Philox::check(draw, rows.samples as u64)?;
    let shape = [rows.samples as i64, rows.elements as i64];
    let out = Tensor::f_empty(shape, (kind, device))?;
    let blocks = (rows.samples as u64) * (rows.elements as u64).div_ceil(4);
    if blocks == 0 {
        return Ok(out);
    }
    let mut arguments = vec![Arg::Tensor(&out)];
    arguments.extend(extra);
    arguments.extend([Arg::U64(philox.seed), Arg::U32(stream), counter, Arg::U64(step)]);
    arguments.extend([rows.first_sample, rows.samples as u64, rows.elements as u64].map(Arg::U64));
    let grid = blocks.div_ceil(THREADS);
    check_below("thread blocks", grid, 1 << 31)?;
    kernel(name)?.launch([grid as u32, 1, 1], [THREADS as u32, 1, 1], &arguments)?;
    Ok(out)
}

impl RowDraw<'_> {
    /// This draw as a [`Draw`], for the CPU. If the step comes from a counter, the counter is read here.
    fn draw(&self) -> Result<Draw, RandomError> {
        let step = match self.step {
            Step::At(step) => step,
            Step::Counter(counter) => counter.get()?,
        };
        Ok(Draw { stream: self.stream, step, first_sample: self.first_sample, elements: self.elements })
    }
}

/// Compiles the kernel `name` of sampler.cu for the current device. For the arguments, see [`quad_options`].
pub fn sampler_kernel(name: &str, kind: Kind, widths: impl IntoIterator<Item = i64>) -> Result<Kernel, NativeError> {
    Kernel::compile(name, SAMPLER_SOURCE, &quad_options(kind, widths))
}

/// The compiler options for kernels that use quads.cu. `kind` is the type of a network's values: bf16, f16 or f32. If
/// all `widths` of matrices are multiples of four, the kernels read four numbers at once.
pub fn quad_options(kind: Kind, widths: impl IntoIterator<Item = i64>) -> Vec<&'static str> {
    let mut options = OPTIONS.to_vec();
    match kind {
        Kind::Float => options.push("--define-macro=F32"),
        Kind::Half => options.push("--define-macro=F16"),
        _ => {}
    }
    if widths.into_iter().all(|width| width % 4 == 0) {
        options.push("--define-macro=ALIGNED");
    }
    options
}

/// The compiled kernel for the current device. Unlike [`Kernel::compile`], the lookup here does not hash the whole
/// source.
fn kernel(name: &'static str) -> Result<Kernel, NativeError> {
    static COMPILED: Mutex<Option<HashMap<(usize, &'static str), Kernel>>> = Mutex::new(None);
    let device = super::cuda::current_device()?;
    // A poisoned lock is harmless: the only change to the map is to insert a whole entry, so a panic cannot leave the
    // map inconsistent.
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    let compiled = compiled.get_or_insert_default();
    if let Some(kernel) = compiled.get(&(device, name)) {
        return Ok(kernel.clone());
    }
    let kernel = Kernel::compile(name, SOURCE, OPTIONS)?;
    compiled.insert((device, name), kernel.clone());
    Ok(kernel)
}
