//! Several codes into one place: their mean, or the mode of their mixture.
//!
//! The mixture is `q(a) = Σ_k softmax_a(tempering · score_k(a))`: each sample has the same weight, however sharp it is. Densities
//! are never computed, only their logarithms: `log q` by log-softmax over the anchors and log-sum-exp over the samples.

use tch::{Kind, TchError, Tensor};

use super::AggregateError;
use crate::geo::UnitVector;
use crate::shdd::decode::{Anchors, Decoded, Decoder, torch_error};

// i images · k samples of each · c coefficients · a anchors

/// What scores are multiplied with before they become densities: an inverse temperature, which widens the peak of a clean code
/// at L = 47 from 20 to 36 km. The value behind the recipe's figures.
pub const TEMPERING: f64 = 0.3;

/// The place of the mean of each image's codes `codes_ikc`.
pub fn mean_code(codes_ikc: &Tensor, decoder: &Decoder) -> Result<Vec<Decoded>, AggregateError> {
    shape(codes_ikc, decoder.anchors())?;
    let mean_ic = codes_ikc.f_to_kind(Kind::Float).and_then(|codes| codes.f_mean_dim([1_i64].as_slice(), false, None));
    Ok(decoder.decode(&mean_ic.map_err(torch_error("mean of codes"))?)?)
}

/// The anchor where the mixture of each image's densities is largest, and its log density.
pub fn mixture(codes_ikc: &Tensor, anchors: &Anchors, tempering: f64) -> Result<Vec<Decoded>, AggregateError> {
    if !(tempering > 0.0 && tempering.is_finite()) {
        return Err(AggregateError::Tempering { got: tempering });
    }
    let [images, samples] = shape(codes_ikc, anchors)?;
    let mut found = Vec::new();
    // Scores, their log-softmax and one temporary are held at once.
    let per_pass = (anchors.codes_per_pass() / 3 / samples).max(1) as i64;
    for first in (0..images as i64).step_by(per_pass as usize) {
        let count = per_pass.min(images as i64 - first);
        let flat = |codes_ikc: &Tensor| codes_ikc.f_narrow(0, first, count)?.f_reshape([count * samples as i64, -1]);
        let scores_ba = anchors.scores(&flat(codes_ikc).map_err(torch_error("codes of samples"))?)?;
        let (densities, best) =
            log_modes(&scores_ba, count, samples as i64, tempering).map_err(torch_error("mixture density"))?;
        found.extend(densities.into_iter().zip(best).map(|(score, anchor)| decoded(anchors, anchor as usize, score)));
    }
    Ok(found)
}

/// Largest log density of each image, and where.
fn log_modes(scores_ba: &Tensor, images: i64, samples: i64, tempering: f64) -> Result<(Vec<f64>, Vec<i64>), TchError> {
    let log_ba = scores_ba.f_mul_scalar(tempering)?.f_log_softmax(1, Kind::Float)?;
    let log_ia = log_ba.f_view([images, samples, -1])?.f_logsumexp([1_i64].as_slice(), false)?;
    let (densities_i, best_i) = log_ia.f_max_dim(1, false)?;
    let densities = Vec::try_from(densities_i.f_sub_scalar((samples as f64).ln())?.f_to_kind(Kind::Double)?)?;
    Ok((densities, Vec::try_from(best_i)?))
}

fn decoded(anchors: &Anchors, anchor: usize, score: f64) -> Decoded {
    let point: UnitVector = anchors.points()[anchor];
    Decoded { point, anchor, score, converged: true }
}

/// Images and samples of `[i, k, c]`.
pub(super) fn shape(codes_ikc: &Tensor, anchors: &Anchors) -> Result<[usize; 2], AggregateError> {
    let dims = anchors.basis().dims();
    match codes_ikc.size().as_slice() {
        [_, 0, _] => Err(AggregateError::NoSamples),
        [images, samples, width] if *width == dims as i64 => Ok([*images as usize, *samples as usize]),
        got => Err(AggregateError::Shape { got: got.to_vec(), dims }),
    }
}
