//! The loss: a weighted sum of terms, with the weights of the configuration.
//!
//! The network predicts codes multiplied by [`CODE_SCALE`]; the truth is unscaled. For L1, L2 and cosine, this module
//! scales the truth. For the KL divergence, it divides the prediction by the scale. Terms of weight 0 are not computed.
//! The host waits for the device only in [`Losses::check`].
//!
//! With a low-pass filter, the prediction, the truth and the harmonics of the anchors hold only the kept dimensions.
//! The KL divergence and cosine equal those of whole codes with zeros in the dropped dimensions. The automatic weight
//! of the KL divergence is different ([`Loss::filtered`]), and L1 and L2 are means over the kept dimensions.
//!
//! If the anchors of the KL divergence are split over ranks, every rank still computes L1, L2 and cosine completely.
//! The values and gradients of these terms are the same on every rank and are not summed over ranks.
// Letters in tensor names: b batch, a this rank's anchors, d dimensions of a code.

use locdiff_core::config::{KlDirection, LossConfig, Precision};
use tch::{Device, Kind, Reduction, Tensor};

use super::CODE_SCALE;
use super::error::LossError;
use super::kl::{divergence, logits};
use crate::comm::{Group, differentiable};
use crate::shdd::Filter;

/// Lower limit of the norms in the cosine similarity. PyTorch uses the same limit.
const COSINE_EPSILON: f64 = 1e-8;

/// The loss function: its terms and their weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Loss {
    /// Direction of the KL divergence.
    pub direction: KlDirection,
    /// Weight of the KL divergence.
    pub kl_weight: f64,
    /// Weight of the mean squared error.
    pub l2_weight: f64,
    /// Weight of the mean absolute error.
    pub l1_weight: f64,
    /// Weight of one minus the cosine similarity.
    pub cosine_weight: f64,
    precision: Precision,
}

/// The inputs of the loss for one mini-batch.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// The scaled codes that the network predicts.
    pub predicted_bd: &'a Tensor,
    /// The unscaled codes of the true places.
    pub truth_bd: &'a Tensor,
    /// The harmonics of all anchors or, if the anchors are split over ranks, of this rank's share.
    pub basis_ad: &'a Tensor,
    /// The group of ranks over which the anchors are split, or `None` if they are not split. All ranks of the group
    /// have the same prediction and truth.
    pub anchors_split: Option<&'a Group>,
}

/// The loss and its terms, as scalars on the device. Only `total` carries a gradient. A term is `None` if its weight is
/// 0.
#[derive(Debug)]
pub struct Losses {
    /// The weighted sum of the terms. Call `backward` on this tensor.
    pub total: Tensor,
    /// Mean KL divergence.
    pub kl: Option<Tensor>,
    /// Mean squared error of scaled codes.
    pub l2: Option<Tensor>,
    /// Mean absolute error of scaled codes.
    pub l1: Option<Tensor>,
    /// One minus the mean cosine similarity.
    pub cosine: Option<Tensor>,
    /// The largest finite magnitude among the prediction's logits over this rank's anchors. If the weight of the KL
    /// divergence is 0, this is the largest finite magnitude in the prediction. It is -1 if no value is finite.
    pub largest: Tensor,
}

impl Loss {
    /// The loss of a validated configuration, for unfiltered codes of degree `degree`.
    pub fn new(config: &LossConfig, degree: u32, precision: Precision) -> Self {
        Self::of_dims(config, (f64::from(degree) + 1.0).powi(2), precision)
    }

    /// The loss of a validated configuration, for codes filtered by `filter`. The automatic weight of the KL divergence
    /// depends on `filter.kept()`, the number of kept dimensions. Each dimension has a mean square of 1 / 4π over the
    /// sphere, so the largest logits are `filter.kept()` / 4π on average instead of (L + 1)² / 4π.
    pub fn filtered(config: &LossConfig, filter: &Filter, precision: Precision) -> Self {
        Self::of_dims(config, filter.kept() as f64, precision)
    }

    fn of_dims(config: &LossConfig, dims: f64, precision: Precision) -> Self {
        let kl_weight = config.kl_weight(dims);
        let LossConfig { kl: direction, l2_weight, l1_weight, cosine_weight, .. } = *config;
        Self { direction, kl_weight, l2_weight, l1_weight, cosine_weight, precision }
    }

    /// Computes the loss of one mini-batch. Each term is a mean over the rows of the mini-batch.
    pub fn compute(&self, inputs: Inputs<'_>) -> Result<Losses, LossError> {
        check_shapes(inputs)?;
        let predicted_bd = widened(inputs.predicted_bd)?;
        let target_bd = inputs.truth_bd.f_to_kind(predicted_bd.kind())?.f_mul_scalar(CODE_SCALE)?;
        let (kl, largest_logit) = term(self.kl_weight, || self.kl(&predicted_bd, inputs))?.unzip();
        let l2 = term(self.l2_weight, || Ok(predicted_bd.f_mse_loss(&target_bd, Reduction::Mean)?))?;
        let l1 = term(self.l1_weight, || Ok(predicted_bd.f_l1_loss(&target_bd, Reduction::Mean)?))?;
        let cosine = term(self.cosine_weight, || {
            let similarity_b = Tensor::f_cosine_similarity(&predicted_bd, &target_bd, 1, COSINE_EPSILON)?;
            Ok(similarity_b.f_mean(None::<Kind>)?.f_neg()?.f_add_scalar(1.0)?)
        })?;
        let mut total = Tensor::f_zeros([], (predicted_bd.kind(), predicted_bd.device()))?;
        let weights = [self.kl_weight, self.l2_weight, self.l1_weight, self.cosine_weight];
        for (term, weight) in [&kl, &l2, &l1, &cosine].into_iter().zip(weights) {
            if let Some(term) = term {
                total = total.f_add(&term.f_mul_scalar(weight)?)?;
            }
        }
        Ok(Losses {
            total,
            kl: detached(kl)?,
            l2: detached(l2)?,
            l1: detached(l1)?,
            cosine: detached(cosine)?,
            largest: largest_logit.map_or_else(|| largest_finite(&predicted_bd), Ok)?,
        })
    }

    /// Returns the mean KL divergence and the largest finite magnitude of the prediction's logits.
    fn kl(&self, predicted_bd: &Tensor, inputs: Inputs<'_>) -> Result<(Tensor, Tensor), LossError> {
        let bf16 = match self.precision {
            Precision::Auto => predicted_bd.device().is_cuda() && predicted_bd.kind() == Kind::Float,
            Precision::F32 => false,
            Precision::Bf16 => true,
        };
        let unscaled_bd = predicted_bd.f_mul_scalar(1.0 / CODE_SCALE)?;
        // Each rank's anchors contribute a share of the prediction's gradient, so the backward pass must sum the
        // shares.
        let unscaled_bd = match inputs.anchors_split {
            Some(group) => differentiable::copy(group, &unscaled_bd)?,
            None => unscaled_bd,
        };
        let logits_ba = logits(&unscaled_bd, inputs.basis_ad, bf16)?;
        let truth_ba = logits(&inputs.truth_bd.f_to_kind(predicted_bd.kind())?, inputs.basis_ad, bf16)?;
        let kl = divergence(&logits_ba, &truth_ba, self.direction, inputs.anchors_split)?.f_mean(None::<Kind>)?;
        Ok((kl, largest_finite(&logits_ba)?))
    }
}

impl Losses {
    /// Returns the total, or an error that names `step` and `rank` if the total is not finite. The host waits for the
    /// device.
    pub fn check(&self, step: u64, rank: u32) -> Result<f64, LossError> {
        let loss = self.total.f_double_value(&[])?;
        if loss.is_finite() {
            return Ok(loss);
        }
        Err(not_finite(step, rank, loss, self.largest.f_double_value(&[])?, self.kl.is_some()))
    }
}

/// The error for a loss that is not finite. `largest` is [`Losses::largest`]: a logit if `has_kl` is true, otherwise a
/// predicted value.
pub fn not_finite(step: u64, rank: u32, loss: f64, largest: f64, has_kl: bool) -> LossError {
    let what = if has_kl { "logit over the anchors" } else { "value of the prediction" };
    let largest = match largest {
        largest if largest >= 0.0 => format!("the largest finite {what} is {largest}"),
        _ => format!("no {what} is finite"),
    };
    let advice = "lower train.learning_rate, or set train.precision = \"f32\"";
    LossError::Bad(format!("step {step}, rank {rank}: the loss is {loss}; {largest}; {advice}"))
}

/// The largest magnitude among the finite values, as a scalar on the device. -1 if no value is finite.
pub fn largest_finite(values: &Tensor) -> Result<Tensor, LossError> {
    let values = values.f_detach()?;
    if values.device() == Device::Cpu {
        // One pass over the values is enough if all of them are finite. On a GPU, the host would have to wait for the
        // result of this pass.
        let (least, most) = values.f_aminmax(None, false)?;
        let largest = most.f_maximum(&least.f_neg()?)?;
        if largest.f_double_value(&[])?.is_finite() {
            return Ok(largest);
        }
    }
    let magnitudes = values.f_abs()?;
    let others = magnitudes.f_isfinite()?.f_logical_not()?;
    Ok(magnitudes.f_masked_fill(&others, -1.0)?.f_max()?)
}

/// Converts 16-bit numbers to f32, because sums of 16-bit numbers would lose too much precision.
fn widened(predicted_bd: &Tensor) -> Result<Tensor, LossError> {
    match predicted_bd.kind() {
        Kind::Float | Kind::Double => Ok(predicted_bd.shallow_clone()),
        _ => Ok(predicted_bd.f_to_kind(Kind::Float)?),
    }
}

fn term<T>(weight: f64, compute: impl FnOnce() -> Result<T, LossError>) -> Result<Option<T>, LossError> {
    (weight != 0.0).then(compute).transpose()
}

fn detached(term: Option<Tensor>) -> Result<Option<Tensor>, LossError> {
    Ok(term.map(|term| term.f_detach()).transpose()?)
}

fn check_shapes(inputs: Inputs<'_>) -> Result<(), LossError> {
    let want = inputs.predicted_bd.size();
    let got = inputs.truth_bd.size();
    if got != want {
        return Err(LossError::Bad(format!("loss: the truth has shape {got:?}, wanted {want:?}")));
    }
    let (got, dims) = (inputs.basis_ad.size(), want.last().copied().unwrap_or(0));
    if got.len() != 2 || got[1] != dims || got[0] == 0 {
        return Err(LossError::Bad(format!(
            "loss: the harmonics of the anchors have shape {got:?}, wanted [1 or more, {dims}]"
        )));
    }
    Ok(())
}
