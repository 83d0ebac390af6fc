//! Denoising chains whose noised codes stay in one place in memory, so that all their steps can be captured in a CUDA
//! graph.
//!
//! A step computes the same numbers as [`Sampler::run_with`](super::Sampler::run_with), with the noise of
//! [`ChainNoise::draw`]. On CUDA, a step is one kernel, which draws its noise itself. The kernel reads the seeds of the
//! images from the memory of the device, so that a captured graph can serve any images.
// Letters in tensor names: n chains, d dimensions of a code.

use locdiff_core::random::{Draw, Philox, Stream};
use tch::{Device, Kind, Tensor};

use super::error::DiffusionError;
use super::sampler::{ChainNoise, Update, apply_update, guided};
use crate::native::host::{copy_async, pinned};
use crate::native::nvrtc::{Arg, Kernel};
use crate::native::random::sampler_kernel;

/// The noised codes of the chains of some images.
#[derive(Debug)]
pub struct Chains {
    noise: ChainNoise,
    /// The scaled noised codes, f32.
    x_nd: Tensor,
    /// The noised codes as the network takes them: rounded to its type. The same tensor as `x_nd` if that type is f32.
    input_nd: Tensor,
    /// The seed of each image, i64.
    seeds: Tensor,
    /// The kernel of a step. `None` on the CPU.
    kernel: Option<Kernel>,
}

/// The predictions of a network for one step, before the bias of the last layer is added. The predictions have the same
/// number type as the values in the network.
#[derive(Debug)]
pub struct Predictions<'a> {
    /// The prediction with the image.
    pub conditional_nd: &'a Tensor,
    /// The prediction without the image, and the strength of the guidance. `None` if there is no guidance.
    pub unconditional: Option<(&'a Tensor, f64)>,
    /// The bias of the last layer, f32.
    pub bias_d: &'a Tensor,
}

impl Chains {
    /// Makes room for `samples` chains of each of `images` images. The values of the network have the type `kind` (f16
    /// or f32). If `device` is a GPU, it must be the current device.
    pub fn new(
        images: usize,
        samples: usize,
        dims: usize,
        (kind, device): (Kind, Device),
    ) -> Result<Self, DiffusionError> {
        let shape = [(images * samples) as i64, dims as i64];
        let x_nd = Tensor::f_zeros(shape, (Kind::Float, device))?;
        let input_nd = if kind == Kind::Float { x_nd.shallow_clone() } else { Tensor::f_zeros(shape, (kind, device))? };
        Ok(Self {
            noise: ChainNoise { seeds: vec![0; images], samples, dims, kind: Kind::Float, device },
            x_nd,
            input_nd,
            seeds: Tensor::f_zeros([images as i64], (Kind::Int64, device))?,
            kernel: if device.is_cuda() { Some(sampler_kernel("denoise", kind, [dims as i64])?) } else { None },
        })
    }

    /// Starts all chains at noise. `seeds` holds the seed of each image.
    pub fn start(&mut self, seeds: Vec<u64>) -> Result<(), DiffusionError> {
        let values: Vec<i64> = seeds.iter().map(|seed| seed.cast_signed()).collect();
        self.noise.seeds = seeds;
        let Some(kernel) = &self.kernel else { return self.set(&self.noise.draw(0)?) };
        // The host does not wait for a copy from pinned memory.
        let mut on_host = pinned(values.len() as i64, Kind::Int64)?;
        on_host.f_copy_(&Tensor::f_from_slice(&values)?)?;
        copy_async(&mut self.seeds, &on_host)?;
        // A step that keeps nothing and adds noise of size 1, as draw 0.
        let nothing = Tensor::f_zeros([self.noise.dims as i64], (Kind::Float, self.noise.device))?;
        let _ = self.input_nd.f_zero_()?;
        let predictions = Predictions { conditional_nd: &self.input_nd, unconditional: None, bias_d: &nothing };
        self.launch(kernel, 0, Update { predicted: 0.0, kept: 0.0, fresh: 1.0 }, &predictions)
    }

    /// The noised codes in the type of the network.
    pub fn input(&self) -> &Tensor {
        &self.input_nd
    }

    /// The scaled noised codes in f32. After the last step, these are the samples.
    pub fn codes(&self) -> &Tensor {
        &self.x_nd
    }

    /// Takes step `k`, counted from 0.
    pub fn step(&self, k: usize, update: Update, predictions: &Predictions<'_>) -> Result<(), DiffusionError> {
        match &self.kernel {
            Some(kernel) => self.launch(kernel, k + 1, update, predictions),
            None => self.compute(k, update, predictions),
        }
    }

    /// Launches the kernel of a step, with the noise of draw `draw`.
    fn launch(
        &self,
        kernel: &Kernel,
        draw: usize,
        update: Update,
        predictions: &Predictions<'_>,
    ) -> Result<(), DiffusionError> {
        let (samples, dims, step) = (self.noise.samples, self.noise.dims, draw as u64);
        let draw = Draw { stream: Stream::Sampler, step, first_sample: 0, elements: dims };
        let stream = Philox::check(draw, samples as u64).map_err(crate::native::random::RandomError::from)?;
        let chains = self.noise.seeds.len() * samples;
        let is_narrow = self.input_nd.kind() != Kind::Float;
        let (unconditional, strength) = predictions
            .unconditional
            .map_or((Arg::Null, 0.0), |(alone_nd, strength)| (Arg::Tensor(alone_nd), strength));
        let arguments = [
            Arg::Tensor(&self.x_nd),
            if is_narrow { Arg::Tensor(&self.input_nd) } else { Arg::Null },
            Arg::Tensor(predictions.conditional_nd),
            unconditional,
            Arg::Tensor(predictions.bias_d),
            Arg::F32(strength as f32),
            Arg::F32(update.predicted as f32),
            Arg::F32(update.kept as f32),
            Arg::F32(update.fresh as f32),
            Arg::Tensor(&self.seeds),
            Arg::U64(samples as u64),
            Arg::U32(stream),
            Arg::U64(step),
            Arg::U64(chains as u64),
            Arg::U64(dims as u64),
        ];
        Ok(kernel.launch_threads((chains * dims.div_ceil(4)) as u64, &arguments)?)
    }

    fn compute(&self, k: usize, update: Update, predictions: &Predictions<'_>) -> Result<(), DiffusionError> {
        let with_bias = |product_nd: &Tensor| product_nd.f_to_kind(Kind::Float)?.f_add(predictions.bias_d);
        let conditional_nd = with_bias(predictions.conditional_nd)?;
        let clean_nd = match predictions.unconditional {
            Some((alone_nd, strength)) => guided(&conditional_nd, &with_bias(alone_nd)?, strength)?,
            None => conditional_nd,
        };
        self.set(&apply_update(&self.x_nd, &clean_nd, update, || self.noise.draw(k + 1))?)
    }

    fn set(&self, x_nd: &Tensor) -> Result<(), DiffusionError> {
        self.x_nd.shallow_clone().f_copy_(x_nd)?;
        if self.input_nd.kind() != Kind::Float {
            self.input_nd.shallow_clone().f_copy_(x_nd)?;
        }
        Ok(())
    }
}
