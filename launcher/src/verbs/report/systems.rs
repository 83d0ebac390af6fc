//! The methods of a run with their error curves, and the photos that are shown.

use locdiff_core::geo::{Place, UnitVector};
use locdiff_core::metrics::{Bootstrap, Interval, PlaceGroups, score};
use serde::Serialize;

use super::source::EvaluatedRun;
use crate::error::{LaunchError, reported};

/// Largest number of characters of an id.
const ID_CHARS_MAX: usize = 200;

/// Distances of the error curve, km: the first, the number of points per power of ten, and half of the Earth's
/// circumference, which no error exceeds.
const CURVE_FIRST_KM: f64 = 0.1;
const CURVE_POINTS_PER_DECADE: i32 = 10;
const CURVE_LAST_KM: f64 = 20_016.0;

/// With more rows than this, the curves use fewer resamples than the table, so that a report never takes minutes.
const ROWS_WITH_ALL_RESAMPLES: usize = 20_000;

/// A method of a run, with its error curve and the answers that are shown.
#[derive(Debug, Serialize)]
pub(super) struct System {
    /// Number of the run.
    pub(super) run: usize,
    pub(super) method: String,
    /// Name of the method; with several runs, also the name of the run.
    pub(super) name: String,
    /// Number of the photo set.
    pub(super) photo_set: usize,
    /// Percentage of photos within each distance of the curve, and its 95 % interval.
    percent: Vec<f64>,
    lo: Vec<f64>,
    hi: Vec<f64>,
    /// Latitude and longitude of the answer for each shown photo of the set.
    answers: Vec<f64>,
    #[serde(skip)]
    pub(super) errors_km: Vec<f64>,
}

/// Photos with their true places. Runs that located the same photos share a set.
#[derive(Debug, Serialize)]
pub(super) struct PhotoSet {
    /// Number of photos that were located. If it is larger than the number of ids, some photos are not shown.
    pub(super) photos: usize,
    pub(super) ids: Vec<String>,
    /// Latitude and longitude of each shown photo.
    truth: Vec<f64>,
}

/// Distances at equal steps of the logarithm, and the thresholds of the table among them.
pub(super) fn curve_km(thresholds_km: &[f64]) -> Vec<f64> {
    let at = |step: i32| CURVE_FIRST_KM * 10_f64.powf(f64::from(step) / f64::from(CURVE_POINTS_PER_DECADE));
    let mut found: Vec<f64> = (0..).map(at).take_while(|km| *km < CURVE_LAST_KM).collect();
    found.retain(|km| thresholds_km.iter().all(|threshold| (km / threshold).ln().abs() > 1e-6));
    found.extend(thresholds_km.iter().filter(|km| (CURVE_FIRST_KM..CURVE_LAST_KM).contains(*km)));
    found.push(CURVE_LAST_KM);
    found.sort_by(f64::total_cmp);
    found
}

pub(super) fn vectors(places: &[Place]) -> Vec<UnitVector> {
    places.iter().map(|place| UnitVector::from(*place)).collect()
}

pub(super) fn bootstrap(run: &EvaluatedRun) -> Bootstrap {
    let Bootstrap { resamples, .. } = Bootstrap::default();
    let factor = (ROWS_WITH_ALL_RESAMPLES as f64 / run.truth.places.len().max(1) as f64).clamp(0.1, 1.0);
    Bootstrap { seed: run.config.train.seed, resamples: (f64::from(resamples) * factor) as u32 }
}

pub(super) fn system(
    run: &EvaluatedRun,
    method: &str,
    answers: &[Place],
    curve_km: &[f64],
    shown: &[usize],
) -> Result<System, LaunchError> {
    let truth = vectors(&run.truth.places);
    let errors_km: Vec<f64> =
        truth.iter().zip(vectors(answers)).map(|(truth, answer)| truth.distance(answer).0).collect();
    let scores = score(&errors_km, &PlaceGroups::of(&truth), curve_km, &bootstrap(run))
        .map_err(|error| reported!(BadData, "{}: {method}: {error}", run.folder.display()))?;
    let of = |value: fn(&Interval) -> f64| -> Vec<f64> {
        scores.within.iter().map(|within| rounded(value(&within.percent), 1e4)).collect()
    };
    Ok(System {
        run: 0,
        method: method.to_owned(),
        name: run.method_name(method),
        photo_set: 0,
        percent: of(|interval| interval.value),
        lo: of(|interval| interval.lo),
        hi: of(|interval| interval.hi),
        answers: shown.iter().flat_map(|row| degrees(answers[*row])).collect(),
        errors_km,
    })
}

/// The photos of a run, of which the rows `shown` are shown.
pub(super) fn photo_set(run: &EvaluatedRun, shown: &[usize]) -> PhotoSet {
    let (ids, places) = (&run.truth.ids, &run.truth.places);
    PhotoSet {
        photos: ids.len(),
        ids: shown.iter().map(|row| short_id(&ids[*row])).collect(),
        truth: shown.iter().flat_map(|row| degrees(places[*row])).collect(),
    }
}

/// The id as the page shows it.
pub(super) fn short_id(id: &str) -> String {
    match id.char_indices().nth(ID_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &id[..end]),
        None => id.to_owned(),
    }
}

/// Latitude and longitude, rounded to about a metre.
fn degrees(place: Place) -> [f64; 2] {
    [place.latitude().0, place.longitude().0].map(|degrees| rounded(degrees, 1e5))
}

fn rounded(value: f64, scale: f64) -> f64 {
    (value * scale).round() / scale
}
