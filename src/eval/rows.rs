//! The rows that a worker sends to the launcher: their answers, and what the samples say about them.

use locdiff_core::geo::{Degrees, Place, UnitVector};
use locdiff_core::protocol::{Alternative, LocatedRow, Method, PredictedRow, Prediction, RowDensity};

use super::likely::{LikelyPlaces, spread_km};
use crate::infer::{Image, ImageBlock, InferError};
use crate::retrieval::ImageSamples;

/// LocDiff's answers for the images of a block.
pub(super) fn located(block: &ImageBlock, samples: &[ImageSamples]) -> Vec<LocatedRow> {
    let row = |(index, (image, samples)): (u64, (&Image, &ImageSamples))| LocatedRow {
        index,
        id: image.id.clone(),
        truth: image.truth.map_or([f64::NAN; 2], |place| [place.latitude().0, place.longitude().0]),
        answers: vec![(Method::Locdiff, degrees(samples.aggregate))],
        sample: degrees(samples.samples[0]),
        out_of_range: false,
        spread_km: 0.0,
        density: RowDensity::default(),
        tuning: None,
    };
    (block.first..).zip(block.images.iter().zip(samples)).map(row).collect()
}

/// The prediction for a row that was located: the answer of the best method, and what the samples say about it.
pub(super) fn predicted(
    row: LocatedRow,
    samples: &ImageSamples,
    wanted: &Prediction,
) -> Result<PredictedRow, InferError> {
    let likely = LikelyPlaces::of(answer(&row)?.into(), &samples.samples, &samples.weights);
    let LocatedRow { index, id, truth, answers, density, .. } = row;
    let answer = answers.last().map_or([f64::NAN; 2], |(_, place)| *place);
    let alternative = |(place, weight): &(UnitVector, f64)| Alternative { place: degrees(*place), weight: *weight };
    Ok(PredictedRow {
        index,
        id,
        answer,
        spread_km: likely.spread_km,
        weight: likely.weight,
        alternatives: likely.alternatives.iter().map(alternative).collect(),
        samples: if wanted.with_samples { samples.samples.iter().copied().map(degrees).collect() } else { Vec::new() },
        truth: wanted.with_truth.then_some(truth),
        density,
    })
}

/// The answer of the last method.
fn answer(row: &LocatedRow) -> Result<Place, InferError> {
    let [latitude, longitude] = row.answers.last().map_or([f64::NAN; 2], |(_, place)| *place);
    Ok(Place::new(Degrees(latitude), Degrees(longitude))?)
}

/// Sets the spread of the samples around the answer of the last method.
pub(super) fn with_spread(mut row: LocatedRow, samples: &ImageSamples) -> Result<LocatedRow, InferError> {
    row.spread_km = spread_km(answer(&row)?.into(), &samples.samples, &samples.weights);
    Ok(row)
}

/// The latitude and longitude of `point`, in degrees.
pub(super) fn degrees(point: UnitVector) -> [f64; 2] {
    let place = Place::from(point);
    [place.latitude().0, place.longitude().0]
}
