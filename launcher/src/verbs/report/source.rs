//! Reads an evaluated run: the files in `RUN/eval/`, the configuration, and the curves in the TensorBoard files.
//!
//! Two parts are optional. `table.json` may have an object `calibration`, and `images.json` may hold single photos
//! (`photos`). docs/OPERATIONS.md specifies both.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use clap::ValueEnum as _;
use locdiff_core::config::{self, Layer, RunConfig};
use locdiff_core::geo::Place;
use locdiff_core::tables::{ColumnNames, TableReader};
use locdiff_core::tensorboard::{ScalarCurves, board_folder, read_scalars};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::photos::{self, PhotoDetail, PhotosFile};
use crate::cli::Suite;
use crate::error::{LaunchError, refuse, reported};
use crate::run_folder::CONFIG;

/// A run with the files of its last evaluation.
#[derive(Debug)]
pub(super) struct EvaluatedRun {
    /// Name of the run's folder.
    pub(super) name: String,
    pub(super) folder: PathBuf,
    pub(super) config: RunConfig,
    /// The JSON result of the evaluation.
    pub(super) table: Value,
    /// The ids and true places of the photos, in the order of the data.
    pub(super) truth: PlacedIds,
    /// The methods and their answers, in the order of the photos.
    pub(super) answers: Vec<(String, Vec<Place>)>,
    pub(super) curves: ScalarCurves,
    pub(super) calibration: Option<CalibrationTable>,
    pub(super) images: Vec<PhotoDetail>,
}

/// Ids and places.
#[derive(Debug, PartialEq)]
pub(super) struct PlacedIds {
    pub(super) ids: Vec<String>,
    pub(super) places: Vec<Place>,
}

/// How often the truth is within the predicted radius.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct CalibrationTable {
    pub(super) rows: Vec<CalibrationRow>,
}

/// One level of a calibration. All values are shares between 0 and 1.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct CalibrationRow {
    /// The probability with which the radius should hold the truth.
    pub(super) level: f64,
    /// The share of photos whose radius holds the truth, with its 95 % interval.
    pub(super) share: f64,
    pub(super) lo: f64,
    pub(super) hi: f64,
}

/// The result of an experiment of the paper, from a file with the output of `eval --suite NAME --json`.
#[derive(Debug, Serialize)]
pub(super) struct SuiteResult {
    #[serde(serialize_with = "as_name")]
    pub(super) suite: Suite,
    pub(super) rows: Vec<Value>,
    pub(super) differences: Vec<Value>,
}

fn as_name<S: serde::Serializer>(suite: &Suite, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(suite.name())
}

impl SuiteResult {
    /// Reads the last line of a file, which is the JSON result of the command.
    pub(super) fn read(path: &Path) -> Result<Self, LaunchError> {
        let text = std::fs::read_to_string(path).map_err(LaunchError::at(path))?;
        let line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        let wanted = "wanted the output of `eval --suite NAME --json`";
        let bad = |reason: String| reported!(BadData, "--experiment {}: {reason}; {wanted}", path.display());
        let found: Value =
            serde_json::from_str(line).map_err(|error| bad(format!("its last line is not JSON ({error})")))?;
        let suite = found["suite"].as_str().and_then(|name| Suite::from_str(name, false).ok());
        let suite = suite.ok_or_else(|| bad("it names no known suite".to_owned()))?;
        let list = |key: &str| found[key].as_array().cloned().unwrap_or_default();
        let (rows, differences) = (list("rows"), list("differences"));
        if rows.is_empty() {
            return Err(bad("it has no rows".to_owned()));
        }
        Ok(Self { suite, rows, differences })
    }
}

impl EvaluatedRun {
    /// Reads the run in `folder`. Fails if the run has not been evaluated.
    pub(super) fn read(folder: &Path) -> Result<Self, LaunchError> {
        let absolute = std::path::absolute(folder).map_err(LaunchError::at(folder))?;
        let name = absolute.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let eval = folder.join("eval");
        let Some(table) = read_json::<Value>(&eval.join("table.json"))? else {
            refuse!(
                NoData,
                "run {} has not been evaluated: there is no {}; evaluate it with `locdiff-launch --run {name} eval`",
                folder.display(),
                eval.join("table.json").display()
            );
        };
        let calibration =
            match table.get("calibration") {
                None | Some(Value::Null) => None,
                Some(found) => Some(CalibrationTable::deserialize(found).map_err(|error| {
                    reported!(BadData, "{}: calibration: {error}", eval.join("table.json").display())
                })?),
            };
        let truth = read_places(&eval.join("truth.csv"))?;
        let answers = read_answers(&eval, &truth)?;
        let images = read_json::<PhotosFile>(&eval.join(photos::FILE))?.map_or_else(Vec::new, |file| file.images);
        Ok(Self {
            config: config::load(&[Layer::File(folder.join(CONFIG))])?.config,
            curves: read_scalars(&board_folder(folder)).map_err(LaunchError::reported)?,
            folder: folder.to_owned(),
            name,
            table,
            truth,
            answers,
            calibration,
            images,
        })
    }

    /// The rows of the table that were computed, or those that were published.
    pub(super) fn rows<'a>(&'a self, source: &'a str) -> impl Iterator<Item = &'a Value> {
        let rows = self.table["rows"].as_array().into_iter().flatten();
        rows.filter(move |row| row["source"].as_str().unwrap_or("computed") == source)
    }

    /// The name of a method in the table; the method itself if the table does not have it.
    pub(super) fn method_name(&self, method: &str) -> String {
        let row = self.rows("computed").find(|row| row["method"] == method);
        row.and_then(|row| row["name"].as_str()).unwrap_or(method).to_owned()
    }
}

/// Reads a JSON file. `None` if it does not exist.
fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, LaunchError> {
    match std::fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(LaunchError::at(path)(error)),
        Ok(bytes) => match serde_json::from_slice(&bytes) {
            Ok(found) => Ok(Some(found)),
            Err(error) => Err(reported!(BadData, "{}: {error}", path.display())),
        },
    }
}

fn read_places(path: &Path) -> Result<PlacedIds, LaunchError> {
    let reader = TableReader::open(path, ColumnNames::default(), true).map_err(LaunchError::reported)?;
    let (mut ids, mut places) = (Vec::new(), Vec::new());
    for row in reader {
        let row = row.map_err(LaunchError::reported)?;
        ids.push(row.id.unwrap_or_default());
        places.extend(row.place);
    }
    Ok(PlacedIds { ids, places })
}

/// Reads every `predictions-METHOD.csv`, in the order of the table. Each file must have the ids of the truth.
fn read_answers(eval: &Path, truth: &PlacedIds) -> Result<Vec<(String, Vec<Place>)>, LaunchError> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(eval).map_err(LaunchError::at(eval))? {
        let path = entry.map_err(LaunchError::at(eval))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let method = name.strip_prefix("predictions-").and_then(|name| name.strip_suffix(".csv"));
        let Some(method) = method.map(str::to_owned) else { continue };
        let PlacedIds { ids, places } = read_places(&path)?;
        if ids != truth.ids {
            refuse!(
                BadData,
                "{}: its ids are not those of truth.csv, in the same order; evaluate the run again",
                path.display()
            );
        }
        found.push((method, places));
    }
    // The order of the results table, in which LocDiff-H is last.
    const ORDER: [&str; 4] = ["retrieval", "retrieval-consensus", "locdiff", "locdiff-h"];
    let rank = |method: &str| ORDER.iter().position(|known| *known == method).unwrap_or(ORDER.len());
    found.sort_by_key(|(method, _)| (rank(method), method.clone()));
    Ok(found)
}
