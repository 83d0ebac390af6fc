//! From answers to metrics: plain files in, one row of a table per method out.
//!
//! What is scored is what stands in the files, to the digit: whoever has them gets the same numbers.

use std::path::Path;

use locdiff_launch::protocol::{ScoreJob, ScoreMethod};
use serde_json::{Value, json};

use super::error::EvalError;
use crate::geo::{Degrees, Place, UnitVector};
use crate::metrics::{THRESHOLDS_KM, Tally};

/// Scores every method.
pub fn run(job: &ScoreJob) -> Result<Value, EvalError> {
    let truth = read(&job.truth)?;
    let rows = job.methods.iter().map(|method| row(method, &truth)).collect::<Result<Vec<Value>, _>>()?;
    Ok(json!({ "rows": rows }))
}

fn row(method: &ScoreMethod, truth: &[(String, UnitVector)]) -> Result<Value, EvalError> {
    let answers = read_like(&method.answers, truth)?;
    let mut tally = Tally::default();
    truth.iter().zip(&answers).for_each(|((_, truth), answer)| tally.add(truth.distance(*answer).0));
    let mut row = json!({ "method": method.method, "rows": truth.len(), "geo_score": tally.mean_score() });
    for (threshold, percent) in THRESHOLDS_KM.iter().zip(tally.within_percent()) {
        row[format!("acc_{threshold}km")] = json!(percent);
    }
    Ok(row)
}

/// The places of a file that must have the rows of the truth, in its order.
fn read_like(path: &Path, truth: &[(String, UnitVector)]) -> Result<Vec<UnitVector>, EvalError> {
    let wrong = |reason: String| EvalError::Answers { path: path.to_owned(), reason };
    let found = read(path)?;
    if found.len() != truth.len() {
        return Err(wrong(format!("{} rows, wanted {} as the truth has", found.len(), truth.len())));
    }
    let misplaced = found.iter().zip(truth).position(|((got, _), (want, _))| got != want);
    if let Some(row) = misplaced {
        return Err(wrong(format!("row {row} is {:?}, wanted {:?}", found[row].0, truth[row].0)));
    }
    Ok(found.into_iter().map(|(_, point)| point).collect())
}

/// Rows of id, lat, lon.
fn read(path: &Path) -> Result<Vec<(String, UnitVector)>, EvalError> {
    let wrong = |reason: String| EvalError::Answers { path: path.to_owned(), reason };
    let mut reader = csv::Reader::from_path(path).map_err(|error| wrong(error.to_string()))?;
    let mut rows = Vec::new();
    for (row, found) in reader.deserialize::<(String, f64, f64)>().enumerate() {
        let (id, latitude, longitude) = found.map_err(|error| wrong(format!("row {row}: {error}")))?;
        let place = Place::new(Degrees(latitude), Degrees(longitude));
        let place = place.map_err(|error| wrong(format!("row {row}: {error}")))?;
        rows.push((id, place.into()));
    }
    Ok(rows)
}
