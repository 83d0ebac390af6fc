//! Reverse diffusion: turns noise x_{T-1} into a code, with a network that predicts the clean code x_0.
//!
//! The sampler visits a decreasing sequence of timesteps. A step goes from timestep t to the next timestep u < t. Let x
//! be the noised code at t, x̂_0 the network's prediction from x, n standard normal noise, and η between 0 and 1. With
//! a = ᾱ_t, c = ᾱ_u (c = 1 in the last step) and ε = (x − √a·x̂_0) / √(1 − a), a step is (DDIM eq. 12 and 16)
//! ```text
//! x ← √c · x̂_0 + √(1 − c − σ²) · ε + σ · n,    σ² = η² · (1 − c) / (1 − a) · (1 − a / c)
//! ```
//! With η = 1 and all timesteps, this is DDPM's ancestral sampling. With η = 0, the steps are deterministic.
//!
//! The code does not compute ε. It computes a step in this equivalent form, with coefficients in f64:
//! ```text
//! x ← (√c − r·√a) · x̂_0 + r · x + σ · n,    r = √(1 − c − σ²) / √(1 − a)
//! ```
//!
//! All codes in this module are scaled by [`CODE_SCALE`](super::CODE_SCALE), like the input and the output of the
//! network.
// Letters in tensor names: n samples, d dimensions of a code.

use locdiff_core::random::{Philox, Stream};
use tch::{Device, Kind, Tensor};

use super::error::DiffusionError;
use super::schedule::NoiseSchedule;
use crate::native::random::{RandomTensors, RowDraw, Step};

/// The coefficients of one denoising step x ← predicted · x̂_0 + kept · x + fresh · n.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    pub(super) predicted: f64,
    pub(super) kept: f64,
    pub(super) fresh: f64,
}

impl Update {
    fn between(alpha_bar: f64, next: f64, eta: f64) -> Self {
        let fresh = eta * ((1.0 - next) / (1.0 - alpha_bar) * (1.0 - alpha_bar / next)).max(0.0).sqrt();
        let kept = (1.0 - next - fresh * fresh).max(0.0).sqrt() / (1.0 - alpha_bar).sqrt();
        Self { predicted: next.sqrt() - kept * alpha_bar.sqrt(), kept, fresh }
    }
}

/// A chain of denoising steps.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampler {
    steps: Vec<(usize, Update)>,
}

impl Sampler {
    /// Creates a chain of `steps` steps. Their timesteps are spread evenly from T - 1 to 0, where T is the number of
    /// timesteps in the schedule. A chain of one step has only timestep T - 1. `eta` is η, the factor of the noise that
    /// each step adds. A chain of T steps with an `eta` of 1 is DDPM's ancestral sampling.
    pub fn few_steps(schedule: &NoiseSchedule, steps: usize, eta: f64) -> Result<Self, DiffusionError> {
        let timesteps = schedule.timesteps();
        if steps == 0 || steps > timesteps {
            let text = format!("the chain has {steps} steps, wanted 1 to {timesteps} (the schedule's timesteps)");
            return Err(DiffusionError::Bad(text));
        }
        if !(0.0..=1.0).contains(&eta) {
            return Err(DiffusionError::Bad(format!("eta is {eta}, wanted 0 to 1")));
        }
        let grid = grid(timesteps, steps)?;
        let mut chain = Vec::with_capacity(steps);
        for (k, t) in grid.iter().enumerate() {
            let next = grid.get(k + 1).map_or(Ok(1.0), |next| schedule.alpha_bar(*next))?;
            chain.push((*t, Update::between(schedule.alpha_bar(*t)?, next, eta)));
        }
        Ok(Self { steps: chain })
    }

    /// The timestep and the coefficients of each step, in order.
    pub fn steps(&self) -> &[(usize, Update)] {
        &self.steps
    }

    /// Runs the chain and returns a scaled code for each sample. `predict` receives x_t and t, and returns x̂_0.
    /// `noise(0)` returns the noise at which the chain starts, and `noise(k + 1)` returns the noise that step k adds.
    /// `noise` is not called for a step that adds no noise. [`ChainNoise::draw`] can serve as `noise`.
    pub fn run_with<E: From<DiffusionError>>(
        &self,
        mut noise: impl FnMut(usize) -> Result<Tensor, DiffusionError>,
        mut predict: impl FnMut(&Tensor, usize) -> Result<Tensor, E>,
    ) -> Result<Tensor, E> {
        let _without_gradients = tch::no_grad_guard();
        let mut x_nd = noise(0)?;
        for (k, (t, update)) in self.steps.iter().enumerate() {
            let predicted_nd = predict(&x_nd, *t)?;
            x_nd = apply_update(&x_nd, &predicted_nd, *update, || noise(k + 1))?;
        }
        Ok(x_nd)
    }
}

/// One denoising step. `noise` is not called if the step adds no noise.
pub(super) fn apply_update(
    x_nd: &Tensor,
    predicted_nd: &Tensor,
    update: Update,
    noise: impl FnOnce() -> Result<Tensor, DiffusionError>,
) -> Result<Tensor, DiffusionError> {
    // The last step does not use x: its result must be exactly the prediction.
    if update.kept == 0.0 && update.predicted == 1.0 {
        return Ok(predicted_nd.shallow_clone());
    }
    let next_nd = predicted_nd.f_mul_scalar(update.predicted)?.f_add(&x_nd.f_mul_scalar(update.kept)?)?;
    if update.fresh == 0.0 {
        return Ok(next_nd);
    }
    Ok(next_nd.f_add(&noise()?.f_mul_scalar(update.fresh)?)?)
}

/// The timesteps of a chain: linspace(T - 1, 0, steps) in f32, rounded half to even. libtorch's linspace is used, so
/// that the timesteps are the same as in the PyTorch reference implementation.
fn grid(timesteps: usize, steps: usize) -> Result<Vec<usize>, DiffusionError> {
    let last = timesteps.saturating_sub(1) as f64;
    let grid = Tensor::f_linspace(last, 0.0, steps as i64, (Kind::Float, Device::Cpu))?.f_round()?;
    let grid = Vec::<f32>::try_from(&grid)?;
    Ok(grid.into_iter().map(|t| t as usize).collect())
}

/// Classifier-free guidance of strength g: x̂_0 = unconditional + (1 + g) · (conditional − unconditional) (Ho and
/// Salimans, 2022, eq. 6, applied to x_0). With a strength of 0, the result is exactly the conditional prediction.
pub fn guided(conditional_nd: &Tensor, unconditional_nd: &Tensor, strength: f64) -> Result<Tensor, DiffusionError> {
    if strength == 0.0 {
        return Ok(conditional_nd.shallow_clone());
    }
    let difference_nd = conditional_nd.f_sub(unconditional_nd)?;
    Ok(conditional_nd.f_add(&difference_nd.f_mul_scalar(strength)?)?)
}

/// Draws the random numbers for the chains of some images. The numbers of a chain depend only on the seed of its image
/// and on the number of the chain within the image.
#[derive(Debug, Clone)]
pub struct ChainNoise {
    /// The seed of each image.
    pub seeds: Vec<u64>,
    /// Chains per image.
    pub samples: usize,
    /// Number of dimensions of a code.
    pub dims: usize,
    /// Type of the resulting tensors. The numbers are drawn in f32 and then converted.
    pub kind: Kind,
    /// Device of the resulting tensors.
    pub device: Device,
}

impl ChainNoise {
    /// Standard normals `[n, d]`. Draw 0 is the noise at which the chains start, and draw k + 1 is the noise of step k.
    pub fn draw(&self, draw: usize) -> Result<Tensor, DiffusionError> {
        let (step, samples, elements) = (Step::At(draw as u64), self.samples, self.dims);
        let rows = RowDraw { stream: Stream::Sampler, step, first_sample: 0, samples, elements };
        let of_image = |seed: &u64| Philox::new(*seed).normal(self.device, rows);
        let images = self.seeds.iter().map(of_image).collect::<Result<Vec<_>, _>>()?;
        Ok(Tensor::f_cat(&images, 0)?.f_to_kind(self.kind)?)
    }
}
