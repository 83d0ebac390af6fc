//! KL divergence between two softmax distributions over anchors, for each row of a mini-batch.
//!
//! With logits z (prediction) and y (truth) over anchors a: q = softmax z, p = softmax y. Logits reach 183 at L = 47, so
//! the log-sum-exp is always subtracted before exponentiating.
//!
//! When split over ranks, rank r holds the logits of its own anchors A_r. Let Z_r and Y_r be their log-sum-exps, q_r and p_r
//! the distributions within A_r, K_r = KL(q_r ‖ p_r), w = softmax_r Z_r and v = softmax_r Y_r. Because q = w_r · q_r on
//! A_r, the chain rule of relative entropy gives
//! ```text
//! KL(q ‖ p) = Σ_r w_r · (K_r + log w_r − log v_r)      reverse
//! KL(p ‖ q) = Σ_r v_r · (K_r + log v_r − log w_r)      forward, with K_r = KL(p_r ‖ q_r)
//! ```
//! The forward pass therefore gathers three numbers per row, (Z_r, Y_r, K_r), and every rank computes the same divergence.
//!
//! Gradient: every rank evaluates this formula, so each already has the whole derivative for its own (Z_r, K_r). The backward
//! pass of the gather therefore just keeps the rank's own piece. For the reverse divergence D,
//! ```text
//! ∂D/∂K_r = w_r,   ∂D/∂Z_r = w_r · (K_r + log w_r − log v_r − D),
//! ```
//! and with ∂K_r/∂z_a = q_ra · (log q_ra − log p_ra − K_r), ∂Z_r/∂z_a = q_ra the sum is q_a · (log q_a − log p_a − D), the
//! gradient of the unsplit divergence. For the forward divergence, ∂D/∂Z_r = w_r − v_r and the sum is q_a − p_a. From the exact
//! derivative of its own logits, each rank gets its share of the gradient of the prediction. The shares are summed by a single
//! all-reduce of `[batch, d]`, in the backward pass of `differentiable::copy`.
// b batch · a this rank's anchors · d dimensions of the code · r ranks

use locdiff_core::config::KlDirection;
use tch::{Kind, Tensor};

use super::error::LossError;
use crate::comm::{Group, differentiable};
use crate::native::gemm::mm_f32;

/// The divergence of each row `[b]`, over the anchors of all ranks of `group`.
pub(super) fn divergence(
    logits_ba: &Tensor,
    truth_ba: &Tensor,
    direction: KlDirection,
    group: Option<&Group>,
) -> Result<Tensor, LossError> {
    let own_b = weighted_difference(&log_softmax(logits_ba, 1)?, &log_softmax(truth_ba, 1)?, None, direction, 1)?;
    let Some(group) = group.filter(|group| group.size() > 1) else { return Ok(own_b) };
    let own_1b3 = Tensor::f_stack(&[logits_ba.f_logsumexp([1], false)?, truth_ba.f_logsumexp([1], false)?, own_b], 1)?;
    let all_rb3 = differentiable::gather_replicated(group, &own_1b3.f_unsqueeze(0)?, 0)?;
    let [log_sums_rb, truth_sums_rb, own_rb] = [0, 1, 2].map(|column| all_rb3.f_select(2, column));
    let (log_w_rb, log_v_rb) = (log_softmax(&log_sums_rb?, 0)?, log_softmax(&truth_sums_rb?, 0)?);
    weighted_difference(&log_w_rb, &log_v_rb, Some(&own_rb?), direction, 0)
}

/// Σ exp(log q) · (inner + log q − log p) along `dim` (reverse), or the same with p and q swapped (forward).
fn weighted_difference(
    log_q: &Tensor,
    log_p: &Tensor,
    inner: Option<&Tensor>,
    direction: KlDirection,
    dim: i64,
) -> Result<Tensor, LossError> {
    let (log_weight, log_other) = match direction {
        KlDirection::Reverse => (log_q, log_p),
        KlDirection::Forward => (log_p, log_q),
    };
    let difference = log_weight.f_sub(log_other)?;
    let difference = inner.map_or(Ok(difference.shallow_clone()), |inner| difference.f_add(inner))?;
    Ok(log_weight.f_exp()?.f_mul(&difference)?.f_sum_dim_intlist([dim].as_slice(), false, None::<Kind>)?)
}

/// Logits `codes · basisᵀ`: from bf16 factors with f32 results, or entirely in the kind of the codes.
pub(super) fn logits(codes_bd: &Tensor, basis_ad: &Tensor, bf16: bool) -> Result<Tensor, LossError> {
    if bf16 {
        let (codes_bd, basis_ad) = (codes_bd.f_to_kind(Kind::BFloat16)?, basis_ad.f_to_kind(Kind::BFloat16)?);
        return Ok(mm_f32(&codes_bd, &basis_ad.f_tr()?)?);
    }
    Ok(codes_bd.f_matmul(&basis_ad.f_to_kind(codes_bd.kind())?.f_tr()?)?)
}

fn log_softmax(logits: &Tensor, dim: i64) -> Result<Tensor, LossError> {
    Ok(logits.f_log_softmax(dim, None::<Kind>)?)
}
