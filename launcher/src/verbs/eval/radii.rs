//! The calibration of a run, which `eval --calibrate` keeps in `RUN/eval/`: the radii of predictions and the temperature
//! of densities.

use std::path::{Path, PathBuf};

use locdiff_core::calibration::{Calibration, FittedTemperature};
use locdiff_core::config::RunConfig;
use locdiff_core::files::Files;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{LaunchError, reported};
use crate::output::Output;
use crate::terminal::{width, wrapped};

/// A calibration in a file, with what it was measured on.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::verbs) struct SavedCalibration {
    /// The settings that answers and samples depend on.
    pub(super) settings: Value,
    /// The validation photos.
    pub(super) photos: String,
    pub(super) rows: u64,
    pub(in crate::verbs) calibration: Calibration,
    /// The temperature of the densities; `None` for a run without densities.
    #[serde(default)]
    pub(in crate::verbs) density: Option<FittedTemperature>,
}

impl SavedCalibration {
    /// Writes the calibration to the folder of the run. Returns the path of the file.
    pub(super) fn write(&self, run: &Path, is_hybrid: bool) -> anyhow::Result<PathBuf> {
        let path = file(run, is_hybrid);
        Files::real().create_folders(&run.join("eval"))?;
        Files::real().write_atomically(&path, serde_json::to_string_pretty(self)?.as_bytes())?;
        Ok(path)
    }
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

/// The calibration of a run, as far as there is one.
enum FoundCalibration {
    Missing,
    /// Measured with another value of this setting.
    Other(String),
    Fitting(SavedCalibration),
}

fn flag(is_hybrid: bool) -> &'static str {
    if is_hybrid { " --hybrid" } else { "" }
}

fn look(run: &Path, config: &RunConfig, step: u64, is_hybrid: bool) -> Result<FoundCalibration, LaunchError> {
    let path = file(run, is_hybrid);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(FoundCalibration::Missing),
        Err(error) => return Err(LaunchError::at(path)(error)),
    };
    let saved: SavedCalibration = serde_json::from_str(&text).map_err(|error| {
        let flag = flag(is_hybrid);
        reported!(Corrupt, "{}: {error}; `eval --calibrate{flag}` makes it again", path.display())
    })?;
    let difference = first_difference(&saved.settings, &settings(config, step));
    Ok(difference.map_or(FoundCalibration::Fitting(saved), FoundCalibration::Other))
}

/// Reads the calibration of a run. Without one, or if it was measured with other settings, says how to make one and
/// returns `None`.
pub(in crate::verbs) fn load(
    run: &Path,
    config: &RunConfig,
    step: u64,
    is_hybrid: bool,
    output: Output,
) -> Result<Option<SavedCalibration>, LaunchError> {
    let reason = match look(run, config, step, is_hybrid)? {
        FoundCalibration::Fitting(saved) => return Ok(Some(saved)),
        FoundCalibration::Missing => format!("run {} is not calibrated", run.display()),
        FoundCalibration::Other(name) => other_value(run, is_hybrid, &name),
    };
    let flag = flag(is_hybrid);
    let line = format!("the answers have no radii, because {reason}; `eval --calibrate{flag}` measures them");
    output.print(&wrapped(&line, 2, width()));
    Ok(None)
}

/// Reads the calibration that an evaluation checks. If it was measured with other settings, says so and returns `None`.
pub(super) fn load_to_check(
    run: &Path,
    config: &RunConfig,
    step: u64,
    is_hybrid: bool,
    output: Output,
) -> Result<Option<SavedCalibration>, LaunchError> {
    match look(run, config, step, is_hybrid)? {
        FoundCalibration::Fitting(saved) => Ok(Some(saved)),
        FoundCalibration::Missing => Ok(None),
        FoundCalibration::Other(name) => {
            let (reason, flag) = (other_value(run, is_hybrid, &name), flag(is_hybrid));
            let line = format!("the calibration is not checked, because {reason}; repeat `eval --calibrate{flag}`");
            output.print(&wrapped(&line, 2, width()));
            Ok(None)
        }
    }
}

fn other_value(run: &Path, is_hybrid: bool, name: &str) -> String {
    format!("{} was measured with another value of `{name}`", file(run, is_hybrid).display())
}

/// The first key of `other` whose value is different in `one`.
pub(in crate::verbs) fn first_difference(one: &Value, other: &Value) -> Option<String> {
    let keys = other.as_object().into_iter().flatten().map(|(key, _)| key);
    keys.into_iter().find(|key| one.get(key.as_str()) != other.get(key.as_str())).cloned()
}
