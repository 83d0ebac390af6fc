//! The calibration of a model, which `eval --calibrate` keeps in `RUN/eval/`: the radii of predictions and the
//! temperature of densities.

use std::path::{Path, PathBuf};

use locdiff_core::calibration::{Calibration, FittedTemperature};
use locdiff_core::config::RunConfig;
use locdiff_core::files::{self, Files};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::files::calibration_name;
use super::model::{ModelFile, ModelSource, SourceText, head_xxh3};
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
        let path = run.join("eval").join(calibration_name(is_hybrid));
        Files::real().create_folders(&run.join("eval"))?;
        Files::real().write_atomically(&path, serde_json::to_string_pretty(self)?.as_bytes())?;
        Ok(path)
    }

    fn parse(source: &SourceText, is_hybrid: bool) -> Result<Self, LaunchError> {
        serde_json::from_str(&source.text).map_err(|error| {
            let flag = if is_hybrid { " --hybrid" } else { "" };
            reported!(Corrupt, "{}: {error}; `eval --calibrate{flag}` makes it again", source.name)
        })
    }

    /// Why the calibration does not fit `settings`; `None` if it does.
    fn misfit(&self, settings: &Value) -> Option<String> {
        let name = first_difference(&self.settings, settings)?;
        Some(match (name.as_str(), self.settings.get(CHECKPOINT)) {
            (CHECKPOINT, None) => "is from an older version, which did not record the checkpoint".to_owned(),
            (CHECKPOINT, _) => "was measured with another checkpoint of the same step".to_owned(),
            _ => format!("was measured with another value of `{name}`"),
        })
    }
}

/// The setting that names the checkpoint by its checksum.
const CHECKPOINT: &str = "checkpoint";

/// The settings that answers and samples depend on. Files that they name are identified by their contents, so that they
/// may be moved.
pub(in crate::verbs) fn settings(config: &RunConfig, model: &ModelFile) -> Value {
    let (eval, mut retrieval) = (&config.eval, json!(config.retrieval));
    retrieval["geoclip"] = json!(contents(&Path::new(&config.retrieval.geoclip).join("manifest.json")));
    retrieval["gallery"] = json!(contents(Path::new(&config.retrieval.gallery)));
    retrieval["run"] = json!(head_xxh3(config, &config.retrieval.run));
    json!({
        "step": model.step, CHECKPOINT: model.xxh3, "samples": eval.samples, "sampler_steps": eval.sampler_steps,
        "sampler_eta": eval.sampler_eta, "guidance": eval.guidance, "aggregator": eval.aggregator,
        "anchors": eval.anchors, "refine": eval.refine, "grid_points": eval.grid_points,
        "neighbourhood_km": eval.neighbourhood_km, "prior": eval.prior, "mean_views": config.shards.mean_views,
        "retrieval": retrieval, "seed": config.train.seed,
    })
}

/// The checksum of a file; `None` if it cannot be read.
pub(in crate::verbs) fn contents(path: &Path) -> Option<String> {
    files::measure(path).ok().map(|found| found.xxh3)
}

/// The calibration of a model, as far as there is one.
enum FoundCalibration {
    Missing,
    /// It does not fit, for this reason.
    Other(String),
    Fitting(SavedCalibration),
}

fn look(
    source: &ModelSource,
    config: &RunConfig,
    model: &ModelFile,
    is_hybrid: bool,
) -> Result<FoundCalibration, LaunchError> {
    let Some(text) = source.calibration(is_hybrid)? else { return Ok(FoundCalibration::Missing) };
    let saved = SavedCalibration::parse(&text, is_hybrid)?;
    Ok(match saved.misfit(&settings(config, model)) {
        Some(reason) => FoundCalibration::Other(format!("{} {reason}", text.name)),
        None => FoundCalibration::Fitting(saved),
    })
}

/// Reads the calibration of a model. Without one, or if it was measured with other settings, says how to make one and
/// returns `None`.
pub(in crate::verbs) fn load(
    source: &ModelSource,
    config: &RunConfig,
    model: &ModelFile,
    is_hybrid: bool,
    output: Output,
) -> Result<Option<SavedCalibration>, LaunchError> {
    let reason = match look(source, config, model, is_hybrid)? {
        FoundCalibration::Fitting(saved) => return Ok(Some(saved)),
        FoundCalibration::Other(reason) => reason,
        FoundCalibration::Missing => format!("{} is not calibrated", source.described()),
    };
    let line = format!("the answers have no radii, because {reason}; {}", source.how_to_calibrate(is_hybrid));
    output.print(&wrapped(&line, 2, width()));
    Ok(None)
}

/// Reads the calibration that an evaluation checks. If it was measured with other settings, says so and returns `None`.
pub(super) fn load_to_check(
    source: &ModelSource,
    config: &RunConfig,
    model: &ModelFile,
    is_hybrid: bool,
    output: Output,
) -> Result<Option<SavedCalibration>, LaunchError> {
    match look(source, config, model, is_hybrid)? {
        FoundCalibration::Fitting(saved) => Ok(Some(saved)),
        FoundCalibration::Missing => Ok(None),
        FoundCalibration::Other(reason) => {
            let line =
                format!("the calibration is not checked, because {reason}; {}", source.how_to_calibrate(is_hybrid));
            output.print(&wrapped(&line, 2, width()));
            Ok(None)
        }
    }
}

/// The calibration of a run as text, if it was measured with the checkpoint `model`. If it was measured with another
/// one, says so.
pub(in crate::verbs) fn to_export(
    source: &ModelSource,
    model: &ModelFile,
    is_hybrid: bool,
    output: Output,
) -> Result<Option<String>, LaunchError> {
    let Some(found) = source.calibration(is_hybrid)? else { return Ok(None) };
    let saved = SavedCalibration::parse(&found, is_hybrid)?;
    let Some(reason) = saved.misfit(&json!({ "step": model.step, CHECKPOINT: model.xxh3 })) else {
        return Ok(Some(found.text));
    };
    let line = format!("not exported: {} {reason}; {}", found.name, source.how_to_calibrate(is_hybrid));
    output.print(&wrapped(&line, 2, width()));
    Ok(None)
}

/// The first key of `other` whose value is different in `one`.
pub(in crate::verbs) fn first_difference(one: &Value, other: &Value) -> Option<String> {
    let keys = other.as_object().into_iter().flatten().map(|(key, _)| key);
    keys.into_iter().find(|key| one.get(key.as_str()) != other.get(key.as_str())).cloned()
}
