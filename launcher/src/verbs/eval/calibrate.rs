//! `eval --calibrate`: measures the radii of predictions and the temperature of densities on the validation photos.

use locdiff_core::calibration::{Calibration, FittedTemperature, LEVELS, SpreadError, temperatures};
use locdiff_core::geo::{Degrees, Place};
use locdiff_core::metrics::even_nll;
use locdiff_core::protocol::{EvalJob, EvalTask, HybridRequest, PredictedRow, Prediction, ToLauncher};
use serde_json::{Value, json};

use super::evaluation::Evaluation;
use super::gather::{KeptRows, RowCollector};
use super::model::ModelFile;
use super::radii::{SavedCalibration, settings};
use crate::error::{LaunchError, reported};
use crate::supervisor::GangObserver;
use crate::terminal::{width, wrapped};
use crate::verbs::locations::require_shards;

/// Measures the radii on the validation photos, writes them to a file, and prints how well they hold.
pub(super) fn calibrate(evaluation: &mut Evaluation<'_>, hybrid: HybridRequest) -> anyhow::Result<Value> {
    let (config, model) = (evaluation.resolved.config.clone(), ModelFile::of(evaluation.checkpoint)?);
    let validation = &config.shards.validation;
    require_shards("shards.validation", validation)?;
    let is_hybrid = hybrid != HybridRequest::No;
    let task = EvalTask::Predict(Prediction {
        with_truth: true,
        with_samples: false,
        truth_temperatures: temperatures(),
        cells_temperature: None,
        prior: None,
        skips_bad_rows: false,
    });
    let mut spreads = Spreads::default();
    let summary = evaluation.run(validation, hybrid, task, &mut spreads)?;
    let (photos, densities): (Vec<SpreadError>, Vec<Vec<f64>>) = spreads.0.into_rows().unzip();
    let density = FittedTemperature::fit(&densities);
    let (Some(calibration), Some(checked)) = (Calibration::fit(&photos), cross_checked(&photos)) else {
        return Err(reported!(NoData, "{validation} has {} usable photos, wanted at least 200", photos.len()).into());
    };
    let saved = SavedCalibration {
        settings: settings(&config, &model),
        photos: validation.clone(),
        rows: summary.rows,
        calibration: calibration.clone(),
        density: density.clone(),
    };
    let path = saved.write(evaluation.run, is_hybrid)?;
    let mut radii: Vec<f64> = photos.iter().map(|photo| calibration.radii_km(photo.spread_km)[1]).collect();
    let mut errors: Vec<f64> = photos.iter().map(|photo| photo.error_km).collect();
    let [median_km, constant_km] = [(&mut radii, 0.5), (&mut errors, LEVELS[1])].map(|(values, level)| {
        values.sort_by(f64::total_cmp);
        values[((values.len() as f64 * level) as usize).min(values.len() - 1)]
    });
    let text = format!(
        "radii measured on {} photos of {validation}; for each half of the photos with the radii of the other half, the \
         50 % radius holds {:.1} % and the 90 % radius {:.1} % of the true places; the median 90 % radius is {median_km:.0} km, and one radius for all \
         photos would be {constant_km:.0} km",
        photos.len(),
        checked[0] * 100.0,
        checked[1] * 100.0,
    );
    evaluation.output.print(&wrapped(&text, 2, width()));
    if let Some(fitted) = &density {
        let text = format!(
            "at temperature {:.3}, the negative log-likelihood of the true places is smallest: {:.2} nats per km²; an \
             even density over the Earth has {:.2}",
            fitted.temperature,
            fitted.nll,
            even_nll(),
        );
        evaluation.output.print(&wrapped(&text, 2, width()));
    }
    evaluation.output.print(&format!("radii in {}", path.display()));
    Ok(json!({
        "ok": true, "run": evaluation.run, "data": summary, "calibration": path,
        "rows": [{ "level": LEVELS[0], "share": checked[0] }, { "level": LEVELS[1], "share": checked[1] }],
        "median_radius_90_km": median_km, "constant_radius_90_km": constant_km,
        "temperature": density.as_ref().map(|fitted| fitted.temperature),
        "nll": density.as_ref().map(|fitted| fitted.nll), "even_nll": even_nll(),
    }))
}

/// The shares of photos within their 50 % and 90 % radii, if the radii of each half of the photos are measured on the
/// other half.
///
/// `None` if a half has too few photos.
fn cross_checked(photos: &[SpreadError]) -> Option<[f64; 2]> {
    let half = |rest: usize| photos.iter().copied().skip(rest).step_by(2).collect::<Vec<SpreadError>>();
    let halves = [half(0), half(1)];
    let mut inside = [0_usize; 2];
    for (own, other) in [(&halves[0], &halves[1]), (&halves[1], &halves[0])] {
        let fitted = Calibration::fit(other)?;
        for photo in own {
            let radii = fitted.radii_km(photo.spread_km);
            (0..2).for_each(|level| inside[level] += usize::from(photo.error_km <= radii[level]));
        }
    }
    Some(inside.map(|count| count as f64 / photos.len() as f64))
}

/// Collects the spread and the error of each photo, and the logarithm of the density at its true place for each
/// temperature.
#[derive(Default)]
struct Spreads(KeptRows<(SpreadError, Vec<f64>)>);

impl GangObserver for Spreads {
    fn report(&mut self, message: ToLauncher) -> Result<(), LaunchError> {
        let ToLauncher::Predicted(predicted) = message else { return Ok(()) };
        let place = |degrees: [f64; 2]| Place::new(Degrees(degrees[0]), Degrees(degrees[1])).ok();
        let photo = |row: PredictedRow| {
            let (answer, truth) = (place(row.answer)?, place(row.truth?)?);
            let spread = SpreadError { spread_km: row.spread_km, error_km: answer.distance(truth).0 };
            Some((row.index, (spread, row.density.log_at_truth)))
        };
        self.0.add(predicted.of_rows, predicted.data_version, predicted.rows.into_iter().filter_map(photo))
    }
}

impl RowCollector for Spreads {
    fn begin(&mut self, job: &mut EvalJob) -> Result<(), LaunchError> {
        job.done = self.0.begin(|_| true);
        Ok(())
    }

    fn end(&mut self) {
        self.0.end();
    }
}
