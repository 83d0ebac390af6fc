//! Forward diffusion: x_t = √ᾱ_t · s · x_0 + √(1 − ᾱ_t) · ε (DDPM eq. 4 on scaled codes). Here x_0 is an unscaled code,
//! s = √(4π) is [`CODE_SCALE`], and ε is standard normal noise.
//!
//! All functions of [`Forward`] are pure, because the caller passes the noise. The network predicts s · x_0 from x_t,
//! so its target has about unit variance in each dimension.
// Letters in tensor names: b batch, d dimensions of a code, t timesteps.

use locdiff_core::random::{Philox, Stream};
use tch::{Device, Kind, Tensor};

use super::CODE_SCALE;
use super::error::DiffusionError;
use super::schedule::NoiseSchedule;
use crate::native::random::{RandomTensors, RowDraw, Step};

/// The forward process, with its coefficients on a device.
#[derive(Debug)]
pub struct Forward {
    /// s · √ᾱ at every timestep, `[t, 1]`.
    signal_t1: Tensor,
    /// √(1 − ᾱ) at every timestep, `[t, 1]`.
    noise_t1: Tensor,
}

impl Forward {
    /// Computes the coefficients of the schedule in f64 and then rounds them to the type `kind`.
    pub fn new(schedule: &NoiseSchedule, kind: Kind, device: Device) -> Result<Self, DiffusionError> {
        let table = |value: &dyn Fn(f64) -> f64| -> Result<Tensor, DiffusionError> {
            let values: Vec<f64> = schedule.alphas_bar().iter().map(|alpha_bar| value(*alpha_bar)).collect();
            Ok(Tensor::f_from_slice(&values)?.f_unsqueeze(1)?.f_to_kind(kind)?.f_to_device(device)?)
        };
        Ok(Self {
            signal_t1: table(&|alpha_bar| CODE_SCALE * alpha_bar.sqrt())?,
            noise_t1: table(&|alpha_bar| (1.0 - alpha_bar).sqrt())?,
        })
    }

    /// s · √ᾱ at every timestep, `[t, 1]`.
    pub fn signal(&self) -> &Tensor {
        &self.signal_t1
    }

    /// √(1 − ᾱ) at every timestep, `[t, 1]`.
    pub fn noise(&self) -> &Tensor {
        &self.noise_t1
    }

    /// Returns x_t for the unscaled codes `x0_bd`, the timesteps `t_b` (i64) and the standard normal noise `noise_bd`.
    pub fn noised(&self, x0_bd: &Tensor, t_b: &Tensor, noise_bd: &Tensor) -> Result<Tensor, DiffusionError> {
        let signal_bd = self.signal_t1.f_index_select(0, t_b)?.f_mul(x0_bd)?;
        let noise_bd = self.noise_t1.f_index_select(0, t_b)?.f_mul(noise_bd)?;
        Ok(signal_bd.f_add(&noise_bd)?)
    }
}

/// Draws the random numbers for consecutive samples of a training step. The numbers do not depend on which rank
/// computes the samples.
#[derive(Debug, Clone, Copy)]
pub struct TrainingDraws<'a> {
    /// The random generator of the run.
    pub philox: Philox,
    /// The training step.
    pub step: Step<'a>,
    /// Index of the first sample within the global batch, the batch of all ranks together.
    pub first_sample: u64,
    /// Number of samples.
    pub samples: usize,
    /// Device of the resulting tensors.
    pub device: Device,
}

impl TrainingDraws<'_> {
    /// A timestep for each sample, uniform over the schedule: i64 `[b]`.
    pub fn timesteps(&self, schedule: &NoiseSchedule) -> Result<Tensor, DiffusionError> {
        let bound = u32::try_from(schedule.timesteps()).unwrap_or(u32::MAX);
        Ok(self.philox.int(self.device, bound, self.rows(Stream::Timestep, 1))?.f_view([-1])?)
    }

    /// Standard normals, f32 `[b, dims]`.
    pub fn noise(&self, dims: usize) -> Result<Tensor, DiffusionError> {
        Ok(self.philox.normal(self.device, self.rows(Stream::Noise, dims))?)
    }

    /// For each sample, whether it keeps its image: bool `[b, 1]`. Each value is false with probability `drop`.
    /// Training without some of the images makes classifier-free guidance possible.
    pub fn kept_conditions(&self, drop: f64) -> Result<Tensor, DiffusionError> {
        Ok(self.philox.mask(self.device, 1.0 - drop, self.rows(Stream::Guidance, 1))?)
    }

    fn rows(&self, stream: Stream, elements: usize) -> RowDraw<'_> {
        RowDraw { stream, step: self.step, first_sample: self.first_sample, samples: self.samples, elements }
    }
}
