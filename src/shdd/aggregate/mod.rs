//! Combines the samples of one image into one place, by any method of [`Aggregator`].
//!
//! - [`points`]: methods that work on decoded places.
//! - [`codes`]: methods that work on codes.
//! - [`aggregate`]: applies any method to many images at once. [`aggregate_decoded`] does the same for samples that are
//!   already decoded.

pub mod codes;
pub mod points;

pub use codes::{TEMPERING, mean_code, mixture};
pub use points::{geometric_median, kernel_medoid, mean_vector, posterior_medoid};

use locdiff_core::config::Aggregator;
use locdiff_core::geo::UnitVector;
use locdiff_core::parallel::in_parallel;
use tch::{Kind, Tensor};

use super::ShddError;
use super::decode::{Decoded, Decoder, threads};

/// The codes of some images. In the shapes, c is the number of dimensions of a code.
#[derive(Debug, Clone, Copy)]
pub struct Ensemble<'a> {
    /// The samples of each image, `[images, samples, c]`.
    pub codes_ikc: &'a Tensor,
    /// The code that the network predicts for each image from pure noise, before any sample is drawn, `[images, c]`.
    /// Only the posterior medoid uses it.
    pub expected_ic: &'a Tensor,
    /// The score of `expected_ic` at the place of each sample, `[images, samples]`. Computed from the code if `None`.
    pub expected_ik: Option<&'a Tensor>,
    /// The weights of the samples, ordered by image and then by sample. Empty if all are equal. Only the medoids use
    /// them.
    pub weights: &'a [f64],
}

/// Returns one place per image. If a code is not finite, the error names its row:
/// - For the mean of codes, the row is the index of the image.
/// - For all other methods, the row is `image * samples + sample`.
///
/// Exception: the mixture, and decoders with a neighbourhood, work in several passes, and count the row from the start
/// of the current pass.
pub fn aggregate(how: Aggregator, of: Ensemble<'_>, decoder: &Decoder) -> Result<Vec<UnitVector>, ShddError> {
    if matches!(how, Aggregator::MeanCode | Aggregator::Mixture) {
        return aggregate_decoded(how, of, &[], decoder);
    }
    codes::shape(of.codes_ikc, decoder.anchors())?;
    let codes_bc = of.codes_ikc.f_flatten(0, 1)?;
    aggregate_decoded(how, of, &points_of(&decoder.decode(&codes_bc)?), decoder)
}

/// Like [`aggregate`], for samples that are already decoded. `points` holds the places of all samples of the first
/// image, then of the second image, and so on. Methods that work on codes ignore `points`.
pub fn aggregate_decoded(
    how: Aggregator,
    of: Ensemble<'_>,
    points: &[UnitVector],
    decoder: &Decoder,
) -> Result<Vec<UnitVector>, ShddError> {
    let Ensemble { codes_ikc, expected_ic, expected_ik, weights } = of;
    let [_, samples] = codes::shape(codes_ikc, decoder.anchors())?;
    let weights_of = |image: usize| weights.get(image * samples..(image + 1) * samples).unwrap_or_default();
    let of_places = match how {
        Aggregator::MeanCode => return Ok(points_of(&mean_code(codes_ikc, decoder)?)),
        Aggregator::Mixture => return Ok(points_of(&mixture(codes_ikc, decoder, TEMPERING)?)),
        Aggregator::PosteriorMedoid => {
            let expected = match expected_ik {
                Some(expected_ik) => Vec::try_from(expected_ik.f_flatten(0, 1)?.f_to_kind(Kind::Double)?)?,
                None => codes::values_at(expected_ic, points, samples, decoder.anchors())?,
            };
            let images: Vec<_> = points.chunks_exact(samples).zip(expected.chunks_exact(samples)).enumerate().collect();
            let answer = |(image, (points, expected)): &(usize, (&[UnitVector], &[f64]))| {
                Ok(points[posterior_medoid(points, expected, weights_of(*image))?])
            };
            return in_parallel(threads(), &images, answer).into_iter().collect();
        }
        Aggregator::KernelMedoid => {
            let images: Vec<_> = points.chunks_exact(samples).enumerate().collect();
            let answer =
                |(image, points): &(usize, &[UnitVector])| Ok(points[kernel_medoid(points, weights_of(*image))?]);
            return in_parallel(threads(), &images, answer).into_iter().collect();
        }
        Aggregator::MeanVector => mean_vector,
        Aggregator::GeometricMedian => geometric_median,
    };
    let images: Vec<_> = points.chunks_exact(samples).collect();
    in_parallel(threads(), &images, |points| of_places(points)).into_iter().collect()
}

fn points_of(decoded: &[Decoded]) -> Vec<UnitVector> {
    decoded.iter().map(|decoded| decoded.point).collect()
}
