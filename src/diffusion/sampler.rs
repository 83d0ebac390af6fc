//! Reverse diffusion: from noise x_{T-1} to a code, with a network that predicts x_0.
//!
//! A step goes from timestep t to u < t of the grid. With a = ᾱ_t, c = ᾱ_u (1 after the last timestep) and
//! ε = (x − √a·x̂_0) / √(1 − a):
//! ```text
//! x ← √c · x̂_0 + √(1 − c − σ²) · ε + σ · n,    σ² = η² · (1 − c) / (1 − a) · (1 − a / c)
//! ```
//! (DDIM eq. 12 and 16). η = 1 on the grid of all timesteps is DDPM's ancestral sampling; η = 0 is deterministic.
//! The coefficients are computed in f64. ε is never computed explicitly: x ← (√c − r·√a) · x̂_0 + r · x + σ · n with
//! r = √(1 − c − σ²) / √(1 − a).
//!
//! All codes here are scaled by [`CODE_SCALE`](super::CODE_SCALE), as the network sees and predicts them.
// n samples · d dimensions of the code

use locdiff_core::random::{Philox, Stream};
use tch::{Device, Kind, Tensor};

use super::error::DiffusionError;
use super::schedule::NoiseSchedule;
use crate::native::random::{RandomTensors, RowDraw, Step};

/// The coefficients of one denoising step: x ← predicted · x̂_0 + kept · x + fresh · n.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Update {
    predicted: f64,
    kept: f64,
    fresh: f64,
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
    /// A chain of `steps` timesteps, spread evenly from T - 1 to 0, with `eta` times the ancestral noise. All timesteps with an
    /// `eta` of 1 are DDPM.
    pub fn few_steps(schedule: &NoiseSchedule, steps: usize, eta: f64) -> Result<Self, DiffusionError> {
        let timesteps = schedule.timesteps();
        if steps == 0 || steps > timesteps {
            let text = format!("a chain of {steps} steps, wanted 1 to the schedule's {timesteps}");
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

    /// Runs the chain and returns a scaled code for each sample. `predict` gets x_t and t and returns x̂_0. `noise(0)` is the
    /// starting noise, and `noise(k + 1)` is the noise that step k adds. It is not called for steps that add none. See
    /// [`ChainNoise::draw`].
    pub fn run_with<E: From<DiffusionError>>(
        &self,
        mut noise: impl FnMut(usize) -> Result<Tensor, DiffusionError>,
        mut predict: impl FnMut(&Tensor, usize) -> Result<Tensor, E>,
    ) -> Result<Tensor, E> {
        let _without_gradients = tch::no_grad_guard();
        let mut x_nd = noise(0)?;
        for (k, (t, update)) in self.steps.iter().enumerate() {
            let predicted_nd = predict(&x_nd, *t)?;
            x_nd = apply_update(&x_nd, &predicted_nd, *update)?;
            if update.fresh > 0.0 {
                let fresh_nd = noise(k + 1)?.f_mul_scalar(update.fresh).map_err(DiffusionError::from)?;
                x_nd = x_nd.f_add(&fresh_nd).map_err(DiffusionError::from)?;
            }
        }
        Ok(x_nd)
    }
}

fn apply_update(x_nd: &Tensor, predicted_nd: &Tensor, update: Update) -> Result<Tensor, DiffusionError> {
    // The last step keeps nothing of x. Its result must equal the prediction to the bit.
    if update.kept == 0.0 && update.predicted == 1.0 {
        return Ok(predicted_nd.shallow_clone());
    }
    Ok(predicted_nd.f_mul_scalar(update.predicted)?.f_add(&x_nd.f_mul_scalar(update.kept)?)?)
}

/// linspace(T - 1, 0, steps) in f32, rounded half to even. Uses libtorch's linspace, so that the grid equals the reference's.
fn grid(timesteps: usize, steps: usize) -> Result<Vec<usize>, DiffusionError> {
    let last = timesteps.saturating_sub(1) as f64;
    let grid = Tensor::f_linspace(last, 0.0, steps as i64, (Kind::Float, Device::Cpu))?.f_round()?;
    let grid = Vec::<f32>::try_from(&grid)?;
    Ok(grid.into_iter().map(|t| t as usize).collect())
}

/// Classifier-free guidance: x̂_0 = unconditional + (1 + g) · (conditional − unconditional)   (Ho and Salimans, 2022,
/// eq. 6, on x_0). Computed as an offset from the conditional prediction, which strength 0 returns to the bit.
pub fn guided(conditional_nd: &Tensor, unconditional_nd: &Tensor, strength: f64) -> Result<Tensor, DiffusionError> {
    if strength == 0.0 {
        return Ok(conditional_nd.shallow_clone());
    }
    let difference_nd = conditional_nd.f_sub(unconditional_nd)?;
    Ok(conditional_nd.f_add(&difference_nd.f_mul_scalar(strength)?)?)
}

/// The random numbers of consecutive chains. They do not depend on which rank runs the chains.
#[derive(Debug, Clone, Copy)]
pub struct ChainNoise {
    /// The random source of the evaluation.
    pub philox: Philox,
    /// Global index of the first chain, such as image × ensemble + member.
    pub first_sample: u64,
    /// Number of chains.
    pub samples: usize,
    /// Dimensions of a code.
    pub dims: usize,
    /// Kind of the resulting tensors. The numbers are drawn in f32.
    pub kind: Kind,
    /// Device of the resulting tensors.
    pub device: Device,
}

impl ChainNoise {
    /// Standard normals `[n, d]`; draw 0 is the start of the chains.
    pub fn draw(&self, draw: usize) -> Result<Tensor, DiffusionError> {
        let step = Step::At(draw as u64);
        let (first_sample, samples, elements) = (self.first_sample, self.samples, self.dims);
        let rows = RowDraw { stream: Stream::Sampler, step, first_sample, samples, elements };
        Ok(self.philox.normal(self.device, rows)?.f_to_kind(self.kind)?)
    }
}
