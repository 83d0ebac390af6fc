//! `eval --tune`: which settings of LocDiff-H are best, from the errors that the workers have found for each of them.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;

use locdiff_core::geo::{Degrees, Place};
use locdiff_core::protocol::{ChooseJob, LocatedRow};
use serde_json::{Value, json};

use super::error::EvalError;
use crate::retrieval::{Choice, Grid, TuneRow, choose};

/// Parts of the Earth by which the choice is checked.
const FOLDS: u32 = 5;

/// Chooses.
pub fn run(job: &ChooseJob) -> Result<Value, EvalError> {
    let rows = read(&job.rows)?;
    let choice = choose(&Grid::default(), &rows, &job.thresholds_km, FOLDS)?;
    let mut result = json!(choice);
    result["words"] = json!(words(&choice));
    result["settings_tried"] = json!(Grid::default().settings().len());
    Ok(result)
}

/// What was chosen, and what it is worth on places that it was not chosen on.
fn words(choice: &Choice) -> String {
    let list =
        |percents: &[f64]| percents.iter().map(|percent| format!("{percent:.1}")).collect::<Vec<_>>().join(" / ");
    let held_out = choice
        .held_out_percent
        .as_deref()
        .map_or_else(String::new, |percents| format!(", {} with settings from other places", list(percents)));
    format!(
        "{}; LocDiff-H {} %{held_out}; LocDiff {}, retrieval {}",
        choice.setting,
        list(&choice.hybrid_percent),
        list(&choice.own_percent),
        list(&choice.retrieval_percent)
    )
}

fn read(path: &Path) -> Result<Vec<TuneRow>, EvalError> {
    let wrong = |reason: String| EvalError::Answers { path: path.to_owned(), reason };
    let file = File::open(path).map_err(|error| wrong(error.to_string()))?;
    let mut rows = Vec::new();
    for line in BufReader::new(file).lines() {
        let line = line.map_err(|error| wrong(error.to_string()))?;
        let row: LocatedRow = serde_json::from_str(&line).map_err(|error| wrong(error.to_string()))?;
        let tuning = row.tuning.ok_or_else(|| wrong(format!("row {} was not tried with any setting", row.index)))?;
        let truth = Place::new(Degrees(row.truth[0]), Degrees(row.truth[1]))?.into();
        let (own_km, retrieval_km, errors_km) = (tuning.own, tuning.retrieval, tuning.settings);
        rows.push(TuneRow { truth, own_km, retrieval_km, errors_km });
    }
    Ok(rows)
}
