//! The radii of predictions. `eval --calibrate` measures them on the validation photos, and keeps them in `RUN/eval/`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use locdiff_core::calibration::{Calibration, LEVELS, SpreadError};
use locdiff_core::config::RunConfig;
use locdiff_core::files::Files;
use locdiff_core::geo::{Degrees, Place};
use locdiff_core::protocol::{EvalTask, HybridRequest, Prediction, ToLauncher};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::evaluation::Evaluation;
use crate::error::{LaunchError, reported};
use crate::output::Output;
use crate::supervisor::GangObserver;
use crate::terminal::{Display, width, wrapped};
use crate::verbs::locations::require_shards;

/// A calibration in a file, with what it was measured on.
#[derive(Debug, Serialize, Deserialize)]
struct SavedCalibration {
    /// The settings that answers and samples depend on.
    settings: Value,
    /// The validation photos.
    photos: String,
    rows: u64,
    calibration: Calibration,
}

fn file(run: &Path, is_hybrid: bool) -> PathBuf {
    run.join("eval").join(if is_hybrid { "calibration-hybrid.json" } else { "calibration.json" })
}

/// The settings that answers and samples depend on.
pub(in crate::verbs) fn settings(config: &RunConfig, step: u64) -> Value {
    let eval = &config.eval;
    json!({
        "step": step, "samples": eval.samples, "sampler_steps": eval.sampler_steps, "sampler_eta": eval.sampler_eta,
        "guidance": eval.guidance, "aggregator": eval.aggregator, "anchors": eval.anchors, "refine": eval.refine,
        "grid_points": eval.grid_points, "neighbourhood_km": eval.neighbourhood_km, "prior": eval.prior,
        "mean_views": config.shards.mean_views, "retrieval": config.retrieval, "seed": config.train.seed,
    })
}

/// Reads the calibration of a run. Without one, or if it was measured with other settings, says how to make one and
/// returns `None`.
pub(in crate::verbs) fn load(
    run: &Path,
    config: &RunConfig,
    step: u64,
    is_hybrid: bool,
    output: Output,
) -> Result<Option<Calibration>, LaunchError> {
    let path = file(run, is_hybrid);
    let flag = if is_hybrid { " --hybrid" } else { "" };
    let without = |reason: String| {
        let line = format!("the answers have no radii, because {reason}; `eval --calibrate{flag}` measures them");
        output.print(&wrapped(&line, 2, width()));
        Ok(None)
    };
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return without(format!("run {} is not calibrated", run.display()));
        }
        Err(error) => return Err(LaunchError::at(path)(error)),
    };
    let saved: SavedCalibration = serde_json::from_str(&text)
        .map_err(|error| reported!(Corrupt, "{}: {error}; `eval --calibrate{flag}` makes it again", path.display()))?;
    match first_difference(&saved.settings, &settings(config, step)) {
        Some(name) => without(format!("{} was measured with another value of `{name}`", path.display())),
        None => Ok(Some(saved.calibration)),
    }
}

/// The first key of `other` whose value is different in `one`.
pub(in crate::verbs) fn first_difference(one: &Value, other: &Value) -> Option<String> {
    let keys = other.as_object().into_iter().flatten().map(|(key, _)| key);
    keys.into_iter().find(|key| one.get(key.as_str()) != other.get(key.as_str())).cloned()
}

/// Measures the radii on the validation photos, writes them to a file, and prints how well they hold.
pub(super) fn calibrate(evaluation: &mut Evaluation<'_>, hybrid: HybridRequest) -> anyhow::Result<Value> {
    let (config, step) = (evaluation.resolved.config.clone(), evaluation.checkpoint.manifest.step);
    let validation = &config.shards.validation;
    require_shards("shards.validation", validation)?;
    let is_hybrid = hybrid != HybridRequest::No;
    let task = EvalTask::Predict(Prediction {
        with_truth: true,
        with_samples: false,
        skips_bad_rows: false,
        done: Vec::new(),
    });
    let (spreads, summary) = evaluation.run(validation, hybrid, &task, Spreads::default, |spreads, found| {
        spreads.display.as_mut().map(Display::finish);
        found?.first()
    })?;
    let photos: Vec<SpreadError> = spreads.photos.into_values().collect();
    let (Some(calibration), Some(checked)) = (Calibration::fit(&photos), cross_checked(&photos)) else {
        return Err(reported!(NoData, "{validation} has {} usable photos, wanted at least 200", photos.len()).into());
    };
    let saved = SavedCalibration {
        settings: settings(&config, step),
        photos: validation.clone(),
        rows: summary.rows,
        calibration: calibration.clone(),
    };
    let path = file(evaluation.run, is_hybrid);
    Files::real().create_folders(&evaluation.run.join("eval"))?;
    Files::real().write_atomically(&path, serde_json::to_string_pretty(&saved)?.as_bytes())?;
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
    evaluation.output.print(&format!("radii in {}", path.display()));
    Ok(json!({
        "ok": true, "run": evaluation.run, "data": summary, "calibration": path,
        "rows": [{ "level": LEVELS[0], "share": checked[0] }, { "level": LEVELS[1], "share": checked[1] }],
        "median_radius_90_km": median_km, "constant_radius_90_km": constant_km,
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

/// Collects the spread and the error of each photo.
#[derive(Default)]
struct Spreads {
    /// The photos by the index of their row.
    photos: BTreeMap<u64, SpreadError>,
    display: Option<Display>,
}

impl GangObserver for Spreads {
    fn report(&mut self, message: ToLauncher) {
        let ToLauncher::Predicted(predicted) = message else { return };
        let place = |degrees: [f64; 2]| Place::new(Degrees(degrees[0]), Degrees(degrees[1])).ok();
        for row in predicted.rows {
            if let (Some(answer), Some(truth)) = (place(row.answer), row.truth.and_then(place)) {
                let photo = SpreadError { spread_km: row.spread_km, error_km: answer.distance(truth).0 };
                self.photos.insert(row.index, photo);
            }
        }
        let display = self.display.get_or_insert_with(Display::new);
        display.count("photos located", self.photos.len() as u64, predicted.of_rows);
    }
}
