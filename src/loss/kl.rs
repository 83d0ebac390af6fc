//! KL divergence between two softmax distributions over anchors, for each row of a mini-batch.
//!
//! Let z be the logits of the prediction and y the logits of the truth over the anchors a. Then q = softmax z and p =
//! softmax y are the two distributions. Logits reach 183 at L = 47, and exp(183) overflows f32, so the log-sum-exp is
//! always subtracted first.
//!
//! If the anchors are split over ranks, rank r holds the logits of its own anchors A_r. Over A_r, let Z_r be the
//! log-sum-exp of z, Y_r the log-sum-exp of y, and q_r and p_r the two softmax distributions. Let w = softmax_r Z_r and
//! v = softmax_r Y_r. Because q = w_r · q_r and p = v_r · p_r on A_r, the chain rule of relative entropy gives
//! ```text
//! KL(q ‖ p) = Σ_r w_r · (K_r + log w_r − log v_r)      reverse, with K_r = KL(q_r ‖ p_r)
//! KL(p ‖ q) = Σ_r v_r · (K_r + log v_r − log w_r)      forward, with K_r = KL(p_r ‖ q_r)
//! ```
//! The forward pass therefore gathers three numbers per row from every rank, (Z_r, Y_r, K_r), and every rank computes
//! the same divergence D from them.
//!
//! So every rank already has the whole derivative of D with respect to its own (Z_r, K_r), and the backward pass of the
//! gather only keeps the rank's own piece. For the reverse divergence and an anchor a in A_r, the derivatives are
//! ```text
//! ∂D/∂K_r   = w_r                                     ∂D/∂Z_r   = w_r · (K_r + log w_r − log v_r − D)
//! ∂K_r/∂z_a = q_ra · (log q_ra − log p_ra − K_r)      ∂Z_r/∂z_a = q_ra
//! ```
//! By the chain rule, ∂D/∂z_a = q_a · (log q_a − log p_a − D), which is the same as without a split. The forward
//! divergence has ∂D/∂Z_r = w_r − v_r and ∂D/∂z_a = q_a − p_a.
//!
//! From these exact derivatives with respect to its own logits, each rank computes its share of the gradient of the
//! prediction. A single all-reduce of `[batch, d]` sums the shares, in the backward pass of `differentiable::copy`.
// Letters in tensor names: b batch, a this rank's anchors, d dimensions of a code, r ranks.

use locdiff_core::config::KlDirection;
use tch::{Kind, Tensor};

use super::error::LossError;
use crate::comm::{Group, differentiable};
use crate::native::gemm::mm_f32;

/// The divergence of each row, `[b]`. If `group` is set, the anchors are split over its ranks, and the divergence is
/// over the anchors of all ranks.
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

/// For the reverse direction, returns the sum of `exp(log_q) · (inner + log_q − log_p)` along `dim`. For the forward
/// direction, swaps p and q. If `inner` is `None`, it counts as 0.
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

/// The logits `codes · basisᵀ`. If `bf16` is true, the factors are rounded to bf16 and the result is f32. Otherwise,
/// factors and result have the type of the codes.
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
