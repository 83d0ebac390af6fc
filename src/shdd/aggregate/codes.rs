//! Combines several codes into one place: the place of the mean code, or the mode of the mixture of their densities.
//!
//! Let `score_k(a)` be the score of sample k at anchor a. The mixture `q(a)` is the mean of `softmax_a(tempering ·
//! score_k(a))` over the samples. Each sample has the same weight, however sharp its density is. Only logarithms of
//! densities are computed: `log q` is a log-softmax over the anchors, followed by a log-sum-exp over the samples.
//!
//! If the decoder has a neighbourhood, the best anchor is the one with the largest sum of q over all anchors within the
//! radius. If the decoder refines, it climbs from the best anchor to the mode of `log Σ_k exp(tempering · f_k(p)) /
//! Z_k` on the continuous sphere. Here f_k(p) is the score of sample k at place p, and Z_k is the sum of `exp(tempering
//! · f_k)` over the anchors.

use locdiff_core::geo::UnitVector;
use locdiff_core::parallel::in_parallel;
use tch::{Kind, TchError, Tensor};

use super::points::no_samples;
use crate::shdd::decode::refine::{ascend, gradient};
use crate::shdd::decode::{Anchors, Decoded, Decoder, largest, threads};
use crate::shdd::{Local, ShddError};

// Letters in tensor names: i images, k samples of each image, c coefficients, a anchors, b codes of all samples.

/// Inverse temperature: scores are multiplied by this factor before they are turned into densities. At degree L = 47,
/// this factor widens the peak of a clean code from 20 to 36 km. No other value was measured.
pub const TEMPERING: f64 = 0.3;

/// Decodes the mean code of each image. `codes_ikc` holds the codes of all samples.
pub fn mean_code(codes_ikc: &Tensor, decoder: &Decoder) -> Result<Vec<Decoded>, ShddError> {
    shape(codes_ikc, decoder.anchors())?;
    decoder.decode(&codes_ikc.f_to_kind(Kind::Float)?.f_mean_dim([1_i64].as_slice(), false, None)?)
}

/// Evaluates the code of each image (a row of `expected_ic`) at the places of the image's samples. `points` holds these
/// places. Both `points` and the result are ordered by image and then by sample.
pub(super) fn values_at(
    expected_ic: &Tensor,
    points: &[UnitVector],
    samples: usize,
    anchors: &Anchors,
) -> Result<Vec<f64>, ShddError> {
    let (basis, codes) = (anchors.basis(), anchors.whole_codes::<f64>(expected_ic)?);
    let images: Vec<_> = codes.chunks_exact(basis.dims()).zip(points.chunks_exact(samples)).collect();
    let values = in_parallel(threads(), &images, |(code, points)| {
        let values = basis.encode_f64(points);
        let value = |of_point: &[f64]| of_point.iter().zip(*code).map(|(value, coefficient)| value * coefficient).sum();
        values.chunks_exact(basis.dims()).map(value).collect::<Vec<f64>>()
    });
    Ok(values.concat())
}

/// For each image, the place where the mixture of the densities of its samples is largest. The score is the logarithm
/// of the density at that place. If the decoder has a neighbourhood and does not refine, the score is the logarithm of
/// the sum of densities over the neighbourhood.
///
/// The search first finds the best anchor. Without a neighbourhood, this is the anchor with the largest density. With a
/// neighbourhood, it is the anchor whose neighbourhood has the largest sum of densities. If the decoder refines, the
/// search continues from the best anchor to the mode of the mixture on the continuous sphere.
pub fn mixture(codes_ikc: &Tensor, decoder: &Decoder, tempering: f64) -> Result<Vec<Decoded>, ShddError> {
    if !(tempering > 0.0 && tempering.is_finite()) {
        let text = format!("aggregator: tempering is {tempering}, wanted a finite number above 0");
        return Err(ShddError::Bad(text));
    }
    let anchors = decoder.anchors();
    let [images, samples] = shape(codes_ikc, anchors)?;
    let mut found = Vec::new();
    // The number of codes per pass is divided by 3, because three tensors of the same size are in memory at once: the
    // scores, their log-softmax and a temporary tensor.
    let per_pass = (anchors.codes_per_pass() / 3 / samples).max(1) as i64;
    for first in (0..images as i64).step_by(per_pass as usize) {
        let count = per_pass.min(images as i64 - first);
        let codes_bc = codes_ikc.f_narrow(0, first, count)?.f_reshape([count * samples as i64, -1])?;
        let densities = Densities::new(&anchors.scores(&codes_bc)?, count, samples as i64, tempering)?;
        let modes = densities.modes(decoder)?;
        found.extend(if decoder.refines() { refined(&codes_bc, decoder, &densities, &modes)? } else { modes });
    }
    Ok(found)
}

/// The mixture densities of several images at the anchors, as logarithms.
struct Densities {
    /// Logarithm of the mixture's density at each anchor, f32 `[i, a]`.
    log_ia: Tensor,
    /// Logarithm of each sample's normalising sum, ordered by image and then by sample.
    log_totals: Vec<f64>,
    samples: usize,
    tempering: f64,
}

impl Densities {
    fn new(scores_ba: &Tensor, images: i64, samples: i64, tempering: f64) -> Result<Self, TchError> {
        let scores_ba = scores_ba.f_mul_scalar(tempering)?;
        let log_totals = scores_ba.f_logsumexp([1_i64].as_slice(), false)?.f_to_kind(Kind::Double)?;
        let log_ba = scores_ba.f_log_softmax(1, Kind::Float)?;
        let log_ia = log_ba.f_view([images, samples, -1])?.f_logsumexp([1_i64].as_slice(), false)?;
        Ok(Self {
            log_ia: log_ia.f_sub_scalar((samples as f64).ln())?,
            log_totals: Vec::try_from(log_totals)?,
            samples: samples as usize,
            tempering,
        })
    }

    /// The best anchor of each image. Without a neighbourhood, this is the anchor with the largest density. With a
    /// neighbourhood, it is the anchor with the largest sum of densities over its neighbourhood. If several anchors are
    /// equally good, the first is chosen.
    fn modes(&self, decoder: &Decoder) -> Result<Vec<Decoded>, TchError> {
        let points = decoder.anchors().points();
        let decoded = |(anchor, score)| Decoded { point: points[anchor], anchor, score, converged: true };
        if let Some(neighbourhood) = decoder.neighbourhood() {
            let log_densities = Vec::<f32>::try_from(self.log_ia.f_contiguous()?.f_view([-1])?)?;
            let rows: Vec<&[f32]> = log_densities.chunks_exact(points.len()).collect();
            return Ok(in_parallel(threads(), &rows, |row| decoded(largest(&neighbourhood.log_sums(row)))));
        }
        let (densities_i, best_i) = self.log_ia.f_max_dim(1, false)?;
        let (densities, best) =
            (Vec::<f64>::try_from(densities_i.f_to_kind(Kind::Double)?)?, Vec::<i64>::try_from(best_i)?);
        Ok(best.into_iter().zip(densities).map(|(anchor, score)| decoded((anchor as usize, score))).collect())
    }
}

/// Climbs from the best anchors to the modes of the mixtures on the continuous sphere.
fn refined(
    codes_bc: &Tensor,
    decoder: &Decoder,
    densities: &Densities,
    starts: &[Decoded],
) -> Result<Vec<Decoded>, ShddError> {
    let (basis, samples, tempering) = (decoder.anchors().basis(), densities.samples, densities.tempering);
    let codes = decoder.anchors().whole_codes::<f64>(codes_bc)?;
    let images = codes.chunks_exact(samples * basis.dims()).zip(densities.log_totals.chunks_exact(samples));
    let tasks: Vec<_> = starts.iter().zip(images).collect();
    let results = in_parallel(threads(), &tasks, |(start, (codes, log_totals))| {
        // Add `least` to the function during the search, and subtract it from the result. Without this offset the value
        // could be near 0, and `ascend` would tolerate no rounding errors, because its tolerance is relative to the
        // value.
        let least = log_totals.iter().copied().fold(f64::INFINITY, f64::min);
        let end = ascend(basis.degree(), start.point, |point| {
            let of_sample =
                |(code, log_total): (&[f64], &f64)| Ok((basis.value_gradient_hessian(code, point)?, log_total - least));
            let locals = codes.chunks_exact(basis.dims()).zip(*log_totals).map(of_sample);
            Ok(log_sum(&locals.collect::<Result<Vec<_>, ShddError>>()?, tempering))
        })?;
        let score = end.value - least - (samples as f64).ln();
        Ok(Decoded { point: end.point, score, converged: end.converged, ..**start })
    });
    results.into_iter().collect()
}

/// The value, gradient and Hessian of log Σ_k exp(s·f_k − c_k) at a point. `terms` holds f_k with its derivatives and
/// the offset c_k, and s is `tempering`. Let g_k and H_k be the gradient and Hessian of s·f_k, and w = softmax_k(s·f_k
/// − c_k). Then the gradient is ḡ = Σ w_k g_k, and the Hessian is Σ w_k (H_k + g_k g_kᵀ) − ḡ ḡᵀ.
fn log_sum(terms: &[(Local, f64)], tempering: f64) -> Local {
    let exponents: Vec<f64> = terms.iter().map(|(local, offset)| tempering * local.value - offset).collect();
    let most = exponents.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = exponents.iter().map(|exponent| (exponent - most).exp()).collect();
    let total: f64 = weights.iter().sum();
    let (mut along, mut hessian, mut in_space) = ([0.0; 2], [[0.0; 2]; 2], [0.0; 3]);
    for ((local, _), weight) in terms.iter().zip(weights) {
        let (weight, slope) = (weight / total, gradient(local).map(|part| tempering * part));
        in_space.iter_mut().zip(local.gradient).for_each(|(sum, part)| *sum += weight * tempering * part);
        for row in 0..2 {
            along[row] += weight * slope[row];
            for column in 0..2 {
                hessian[row][column] += weight * (tempering * local.hessian[row][column] + slope[row] * slope[column]);
            }
        }
    }
    for row in 0..2 {
        for column in 0..2 {
            hessian[row][column] -= along[row] * along[column];
        }
    }
    Local { value: most + total.ln(), gradient: in_space, hessian, basis: terms[0].0.basis }
}

/// Checks that codes have shape `[i, k, c]`, and returns the numbers of images and samples.
pub(super) fn shape(codes_ikc: &Tensor, anchors: &Anchors) -> Result<[usize; 2], ShddError> {
    let dims = anchors.dims();
    match codes_ikc.size().as_slice() {
        [_, 0, _] => Err(no_samples()),
        [images, samples, width] if *width == dims as i64 => Ok([*images as usize, *samples as usize]),
        got => Err(ShddError::Bad(format!("aggregator: codes have shape {got:?}, wanted [images, samples, {dims}]"))),
    }
}
