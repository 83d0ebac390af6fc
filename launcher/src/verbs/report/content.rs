//! The content of a report, computed from the files of one or several evaluated runs. As JSON, it is the file
//! `report.json` and the data of the page.
//!
//! The content depends on the files of the runs alone. To limit the size of the page, it may hold only some of the
//! photos; tables and curves are always computed from all of them.

use std::collections::{BTreeMap, HashSet};

use locdiff_core::config::REPORT_PHOTOS_MAX;
use locdiff_core::draw::spread;
use locdiff_core::metrics::{NamedIntervals, PlaceGroups, THRESHOLDS_KM, compare};
use serde::Serialize;
use serde_json::{Value, json};

use super::photos::PhotoDetail;
use super::source::{CalibrationTable, EvaluatedRun, SuiteResult};
use super::systems::{PhotoSet, System, bootstrap, curve_km, photo_set, short_id, system, vectors};
use crate::error::{LaunchError, reported};

/// Largest number of answers in the content, over all systems: about 1.5 MB.
const ANSWERS_MAX: usize = 60_000;

/// Largest number of photos with samples, for each run.
const IMAGES_MAX: usize = REPORT_PHOTOS_MAX as usize;

/// Largest number of points of a training curve.
const CURVE_POINTS_MAX: usize = 400;

/// Prefixes of the TensorBoard tags that are shown as training curves.
const CURVES: [&str; 3] = ["loss/", "validation/", "train/"];

/// The content of a report.
#[derive(Debug, Serialize)]
pub(super) struct ReportContent {
    pub(super) title: String,
    pub(super) version: String,
    pub(super) runs: Vec<RunFacts>,
    /// The distances of the accuracies in `rows`, km.
    pub(super) thresholds_km: Vec<f64>,
    /// The rows of the results tables of all runs, then the published rows, each once.
    pub(super) rows: Vec<Value>,
    /// Differences between LocDiff-H and its parts, for each run.
    pub(super) differences: Vec<Value>,
    /// Differences between each run and the first one, for methods that both have, if both located the same photos.
    pub(super) between_runs: Vec<BetweenRuns>,
    /// Fields in which the configurations of the runs differ.
    pub(super) settings: Vec<SettingRow>,
    /// Remarks about what the report leaves out.
    pub(super) notes: Vec<String>,
    /// The distances of the error curves, km.
    curve_km: Vec<f64>,
    pub(super) systems: Vec<System>,
    pub(super) photo_sets: Vec<PhotoSet>,
    pub(super) calibration: Vec<RunCalibration>,
    pub(super) training: Vec<TrainingCurves>,
    /// Photos with samples, alternatives and densities.
    pub(super) images: Vec<RunImage>,
    /// Results of the paper's experiments.
    pub(super) experiments: Vec<SuiteResult>,
}

/// A run and its evaluation.
#[derive(Debug, Serialize)]
pub(super) struct RunFacts {
    pub(super) name: String,
    pub(super) folder: String,
    pub(super) checkpoint: String,
    pub(super) step: Option<u64>,
    pub(super) degree: Option<u64>,
    pub(super) photos: usize,
    pub(super) places: usize,
    pub(super) dataset: String,
    pub(super) simulated: bool,
    pub(super) source: Option<String>,
    pub(super) head: Option<String>,
    pub(super) exclude_km: Option<f64>,
    pub(super) prior: Option<String>,
    pub(super) overlap: Value,
}

/// The scores of a method in one run minus its scores in the first run, with paired intervals.
#[derive(Debug, Serialize)]
pub(super) struct BetweenRuns {
    pub(super) run: String,
    pub(super) less: String,
    pub(super) method: String,
    pub(super) name: String,
    #[serde(flatten)]
    numbers: NamedIntervals,
}

/// A field of the configuration and its value in each run.
#[derive(Debug, Serialize)]
pub(super) struct SettingRow {
    pub(super) key: String,
    pub(super) values: Vec<String>,
}

/// The calibration of a run.
#[derive(Debug, Serialize)]
pub(super) struct RunCalibration {
    pub(super) run: usize,
    #[serde(flatten)]
    pub(super) calibration: CalibrationTable,
}

/// The training curves of a run: step and value of each point. A value that is not finite is `None`.
#[derive(Debug, Serialize)]
pub(super) struct TrainingCurves {
    pub(super) run: usize,
    pub(super) curves: BTreeMap<String, Vec<(u64, Option<f32>)>>,
}

/// A photo with samples, alternatives and densities.
#[derive(Debug, Serialize)]
pub(super) struct RunImage {
    run: usize,
    #[serde(flatten)]
    photo: PhotoDetail,
}

impl ReportContent {
    /// Computes the content of a report about `runs`.
    pub(super) fn new(runs: &[EvaluatedRun]) -> Result<Self, LaunchError> {
        let set_of_run = sets_of(runs);
        let thresholds_km = thresholds_km(runs);
        let curve_km = curve_km(&thresholds_km);
        let all_systems: usize = runs.iter().map(|run| run.answers.len()).sum();
        let shown_max = ANSWERS_MAX / all_systems.max(1);
        // The runs of each photo set.
        let sets: Vec<Vec<&EvaluatedRun>> = (0..)
            .map(|set| runs.iter().zip(&set_of_run).filter(|(_, own)| **own == set).map(|(run, _)| run).collect())
            .take_while(|runs: &Vec<_>| !runs.is_empty())
            .collect();
        let shown: Vec<Vec<usize>> = sets.iter().map(|runs| shown_rows(runs, shown_max)).collect();
        let mut systems = Vec::new();
        for (at, run) in runs.iter().enumerate() {
            for (method, answers) in &run.answers {
                let mut system = system(run, method, answers, &curve_km, &shown[set_of_run[at]])?;
                (system.run, system.photo_set) = (at, set_of_run[at]);
                if runs.len() > 1 {
                    system.name = format!("{}: {}", run.name, system.name);
                }
                systems.push(system);
            }
        }
        let photo_sets: Vec<PhotoSet> =
            sets.iter().zip(&shown).map(|(runs, shown)| photo_set(runs[0], shown)).collect();
        let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
        Ok(Self {
            title: names.join(", "),
            version: format!("locdiff-launch {} ({})", locdiff_core::VERSION, locdiff_core::REVISION),
            runs: runs.iter().map(facts).collect(),
            rows: rows(runs),
            differences: runs.iter().flat_map(differences).collect(),
            between_runs: between_runs(runs, &systems, &thresholds_km)?,
            settings: settings(runs),
            notes: notes(runs, &set_of_run, &photo_sets),
            thresholds_km,
            curve_km,
            systems,
            photo_sets,
            calibration: with_number(runs, |run, from| {
                from.calibration.clone().map(|calibration| RunCalibration { run, calibration })
            }),
            training: with_number(runs, |run, from| {
                Some(TrainingCurves { run, curves: training(from) }).filter(|training| !training.curves.is_empty())
            }),
            images: runs.iter().enumerate().flat_map(|(run, from)| images(run, from)).collect(),
            experiments: Vec::new(),
        })
    }
}

fn with_number<T>(runs: &[EvaluatedRun], part: impl Fn(usize, &EvaluatedRun) -> Option<T>) -> Vec<T> {
    runs.iter().enumerate().filter_map(|(at, run)| part(at, run)).collect()
}

/// The number of the photo set of each run. Sets are numbered in the order of their first runs.
fn sets_of(runs: &[EvaluatedRun]) -> Vec<usize> {
    let mut firsts: Vec<&EvaluatedRun> = Vec::new();
    let mut found = Vec::new();
    for run in runs {
        let same = firsts.iter().position(|first| first.truth == run.truth);
        found.push(same.unwrap_or(firsts.len()));
        if same.is_none() {
            firsts.push(run);
        }
    }
    found
}

/// The distances of the accuracies in the first table that has any.
fn thresholds_km(runs: &[EvaluatedRun]) -> Vec<f64> {
    let rows = runs.iter().flat_map(|run| run.rows("computed"));
    rows.map(thresholds_of).find(|found| !found.is_empty()).unwrap_or_else(|| THRESHOLDS_KM.to_vec())
}

/// The distances of the accuracies in a row, ascending.
pub(super) fn thresholds_of(row: &Value) -> Vec<f64> {
    let keys = row.as_object().into_iter().flat_map(serde_json::Map::keys);
    let km = keys.filter_map(|key| key.strip_prefix("acc_")?.strip_suffix("km")?.parse().ok());
    let mut found: Vec<f64> = km.collect();
    found.sort_by(f64::total_cmp);
    found
}

fn facts(run: &EvaluatedRun) -> RunFacts {
    let (table, data) = (&run.table, &run.table["data"]);
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let row = run.rows("computed").next().unwrap_or(&Value::Null);
    RunFacts {
        name: run.name.clone(),
        folder: run.folder.display().to_string(),
        checkpoint: text(&table["checkpoint"]).unwrap_or_default(),
        step: data["step"].as_u64(),
        degree: data["degree"].as_u64(),
        photos: run.truth.ids.len(),
        places: PlaceGroups::of(&vectors(&run.truth.places)).count(),
        dataset: text(&row["dataset"]).unwrap_or_default(),
        simulated: data["is_simulated"].as_bool().unwrap_or_default(),
        source: text(&data["source"]),
        head: text(&data["head"]),
        exclude_km: table["exclude_km"].as_f64(),
        prior: text(&table["prior"]),
        overlap: table["overlap"].clone(),
    }
}

/// The computed rows of all runs, each with the name of its run, and the published rows of the first run that has any.
fn rows(runs: &[EvaluatedRun]) -> Vec<Value> {
    let own = |run: &EvaluatedRun| run.rows("computed").map(|row| named(&run.name, row)).collect::<Vec<_>>();
    let published = runs.iter().map(|run| run.rows("published").cloned().collect::<Vec<_>>());
    let published = published.into_iter().find(|rows| !rows.is_empty()).unwrap_or_default();
    runs.iter().flat_map(own).chain(published).collect()
}

fn differences(run: &EvaluatedRun) -> Vec<Value> {
    let rows = run.table["differences"].as_array().into_iter().flatten();
    rows.map(|row| named(&run.name, row)).collect()
}

/// A row with the name of its run.
fn named(run: &str, row: &Value) -> Value {
    let mut row = row.clone();
    if let Some(fields) = row.as_object_mut() {
        fields.insert("run".to_owned(), json!(run));
    }
    row
}

fn between_runs(
    runs: &[EvaluatedRun],
    systems: &[System],
    thresholds_km: &[f64],
) -> Result<Vec<BetweenRuns>, LaunchError> {
    let mut found = Vec::new();
    let Some(first) = runs.first() else { return Ok(found) };
    let groups = PlaceGroups::of(&vectors(&first.truth.places));
    for system in systems.iter().filter(|system| system.run > 0 && system.photo_set == 0) {
        let Some(base) = systems.iter().find(|base| base.run == 0 && base.method == system.method) else { continue };
        let run = &runs[system.run];
        let scores = compare(&system.errors_km, &base.errors_km, &groups, thresholds_km, &bootstrap(first))
            .map_err(|error| reported!(BadData, "{}: {}: {error}", run.folder.display(), system.method))?;
        found.push(BetweenRuns {
            run: run.name.clone(),
            less: first.name.clone(),
            method: system.method.clone(),
            name: run.method_name(&system.method),
            numbers: scores.named(),
        });
    }
    Ok(found)
}

/// The fields in which the configurations differ, except for the name and the folder of the run.
fn settings(runs: &[EvaluatedRun]) -> Vec<SettingRow> {
    let fields: Vec<BTreeMap<String, String>> = runs.iter().map(|run| fields(&run.config)).collect();
    let Some(first) = fields.first() else { return Vec::new() };
    let row = |key: &String| SettingRow {
        key: key.clone(),
        values: fields.iter().map(|fields| fields.get(key).cloned().unwrap_or_default()).collect(),
    };
    let rows = first.keys().filter(|key| !["checkpoint.dir", "checkpoint.run"].contains(&key.as_str())).map(row);
    rows.filter(|row| row.values.iter().any(|value| *value != row.values[0])).collect()
}

/// The dotted key and the value of each field of a configuration.
fn fields(config: &locdiff_core::config::RunConfig) -> BTreeMap<String, String> {
    let sections = toml::Table::try_from(config).unwrap_or_default();
    let of_section = |(section, fields): (String, toml::Value)| {
        let fields = fields.as_table().cloned().unwrap_or_default();
        fields.into_iter().map(move |(key, value)| (format!("{section}.{key}"), value.to_string()))
    };
    sections.into_iter().flat_map(of_section).collect()
}

fn notes(runs: &[EvaluatedRun], set_of_run: &[usize], sets: &[PhotoSet]) -> Vec<String> {
    let mut notes = Vec::new();
    for (run, _) in runs.iter().zip(set_of_run).filter(|(_, set)| **set != 0) {
        notes.push(format!(
            "{} located other photos than {}, so the two are not compared photo by photo",
            run.name, runs[0].name
        ));
    }
    for set in sets.iter().filter(|set| set.ids.len() < set.photos) {
        notes.push(format!(
            "the map shows {} of {} photos, at equal steps of the data; tables and curves use all photos",
            set.ids.len(),
            set.photos
        ));
    }
    for run in runs.iter().filter(|run| run.images.len() > IMAGES_MAX) {
        let (name, all) = (&run.name, run.images.len());
        notes.push(format!(
            "{name}: the page shows the samples of the first {IMAGES_MAX} of {all} photos that have any"
        ));
    }
    notes
}

fn training(run: &EvaluatedRun) -> BTreeMap<String, Vec<(u64, Option<f32>)>> {
    let is_shown = |tag: &str| CURVES.iter().any(|prefix| tag.starts_with(prefix));
    let curve = |(tag, values): (&String, &BTreeMap<u64, f64>)| {
        let points: Vec<(u64, f64)> = values.iter().map(|(step, value)| (*step, *value)).collect();
        let point = |row: usize| (points[row].0, Some(points[row].1 as f32).filter(|value| value.is_finite()));
        (tag.clone(), spread(points.len(), CURVE_POINTS_MAX).map(point).collect())
    };
    run.curves.iter().filter(|(tag, _)| is_shown(tag)).map(curve).collect()
}

/// The rows that the page shows of a photo set, which `runs` share: `max` rows at equal steps, or all of them, and the
/// rows with samples.
fn shown_rows(runs: &[&EvaluatedRun], max: usize) -> Vec<usize> {
    let (ids, images) = (&runs[0].truth.ids, runs.iter().flat_map(|run| run.images.iter().take(IMAGES_MAX)));
    let mut with_samples: HashSet<&str> = images.map(|photo| photo.id.as_str()).collect();
    // The first row of each id, because many rows may have the same id.
    let mut rows: Vec<usize> = (0..ids.len()).filter(|row| with_samples.remove(ids[*row].as_str())).collect();
    rows.extend(spread(ids.len(), max));
    rows.sort_unstable();
    rows.dedup();
    rows
}

fn images(run: usize, from: &EvaluatedRun) -> impl Iterator<Item = RunImage> {
    from.images.iter().take(IMAGES_MAX).cloned().map(move |mut photo| {
        photo.id = short_id(&photo.id);
        RunImage { run, photo }
    })
}
