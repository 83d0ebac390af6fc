//! From answers to metrics: plain files in, one row of a table per method out.
//!
//! What is scored is what stands in the files, to the digit: whoever has them gets the same numbers.

use std::path::Path;

use locdiff_core::draw::{ANSWERS_MAX, Answer, answers_map};
use locdiff_core::geo::{Degrees, Place, UnitVector};
use locdiff_core::metrics::{Bootstrap, NEAREST_K, Scores, compare, density_coverage, score};
use locdiff_core::protocol::{Method, PredictionsJob, ScoreJob, ScoreMethod};
use locdiff_core::tensorboard::Board;
use serde_json::{Map, Value, json};

use super::error::EvalError;
use super::predictions::{Truth, score_predictions};
use crate::infer::Rows;

/// Scores every method; where LocDiff-H is among them, it is compared with its parts on the same resamples.
pub fn run(job: &ScoreJob) -> Result<Value, EvalError> {
    let (ids, truth): (Vec<String>, Vec<UnitVector>) = read(&job.truth)?.into_iter().unzip();
    let mut found = Vec::new();
    for method in &job.methods {
        found.push(Scored::new(method, &ids, &truth, job)?);
    }
    let rows: Vec<Value> = found.iter().map(|scored| scored.fields.clone().into()).collect();
    if let Some((folder, step)) = &job.board {
        let values = scalars(&rows);
        let values: Vec<(&str, f64)> = values.iter().map(|(tag, value)| (tag.as_str(), *value)).collect();
        let mut board = Board::beside(folder, *step)?;
        board.scalars(*step, &values)?;
        board.text(*step, "test/data", &job.data)?;
        for scored in found.iter().filter(|scored| scored.method != Method::Retrieval) {
            let answers = truth.iter().zip(&scored.answers).take(ANSWERS_MAX);
            let answers: Vec<Answer> =
                answers.map(|(truth, answer)| Answer { truth: *truth, answer: *answer }).collect();
            board.image(*step, &format!("test/{}/answers", scored.method.name()), &answers_map(&answers))?;
        }
    }
    Ok(json!({ "rows": rows, "differences": differences(&found, job)? }))
}

/// Scores anybody's predictions against `eval.truth`, or against the test shards.
pub fn run_predictions(job: &PredictionsJob) -> Result<Value, EvalError> {
    let config = &job.config;
    let (truth, is_simulated) = match config.eval.truth.as_str() {
        "" => {
            let rows = Rows::open(&config.shards.test, config)?;
            let (mut ids, mut places) = (Vec::new(), Vec::new());
            for block in rows.blocks(rows.share(0, 1)) {
                let block = block?;
                ids.extend(block.images.iter().map(|image| image.id.clone()));
                places.extend(block.images.iter().map(|image| image.truth));
            }
            (Truth::new(config.shards.test.clone(), ids, places)?, rows.is_simulated())
        }
        path => (Truth::read(Path::new(path))?, false),
    };
    let bootstrap = Bootstrap { seed: config.train.seed, ..Bootstrap::default() };
    let found = score_predictions(&job.file, &truth, &config.eval.thresholds_km, &bootstrap)?;
    let mut row = Map::new();
    row.insert("method".to_owned(), json!(found.predictions));
    row.insert("rows".to_owned(), json!(found.scores.rows));
    row.extend(found.scores.to_fields());
    row.insert("density".to_owned(), json!(found.prdc.map(|spread| spread.density)));
    row.insert("coverage".to_owned(), json!(found.prdc.map(|spread| spread.coverage)));
    row.insert("dataset".to_owned(), json!(found.truth));
    row.insert("simulated".to_owned(), json!(is_simulated));
    row.insert("source".to_owned(), json!("computed"));
    let data = json!({ "rows": found.scores.rows, "is_simulated": is_simulated, "source": found.truth });
    Ok(json!({ "ok": true, "matched_by": found.matched_by, "data": data, "rows": [row] }))
}

/// Answers of one method and what they are worth.
struct Scored {
    method: Method,
    answers: Vec<UnitVector>,
    errors_km: Vec<f64>,
    scores: Scores,
    fields: Map<String, Value>,
}

impl Scored {
    fn new(of: &ScoreMethod, ids: &[String], truth: &[UnitVector], job: &ScoreJob) -> Result<Self, EvalError> {
        let answers = read_like(&of.answers, ids)?;
        let errors_km: Vec<f64> = truth.iter().zip(&answers).map(|(truth, answer)| truth.distance(*answer).0).collect();
        let scores = score(&errors_km, &job.thresholds_km, &bootstrap(job))?;
        let mut fields = Map::new();
        fields.insert("method".to_owned(), json!(of.method));
        fields.insert("rows".to_owned(), json!(truth.len()));
        fields.extend(scores.to_fields());
        let samples = of.samples.as_deref().map(|path| read_like(path, ids)).transpose()?;
        // Too few places have no k-th neighbour; then there is nothing to say.
        let spread = match truth.len() > NEAREST_K {
            true => Some(density_coverage(truth, samples.as_deref().unwrap_or(&answers), NEAREST_K)?),
            false => None,
        };
        fields.insert("density".to_owned(), json!(spread.map(|spread| spread.density)));
        fields.insert("coverage".to_owned(), json!(spread.map(|spread| spread.coverage)));
        Ok(Self { method: of.method, answers, errors_km, scores, fields })
    }
}

fn bootstrap(job: &ScoreJob) -> Bootstrap {
    Bootstrap { seed: job.seed, ..Bootstrap::default() }
}

/// LocDiff-H less each of its parts, and at each distance less the better one.
fn differences(found: &[Scored], job: &ScoreJob) -> Result<Vec<Value>, EvalError> {
    let Some(hybrid) = found.iter().find(|scored| scored.method == Method::LocdiffH) else { return Ok(Vec::new()) };
    let parts: Vec<&Scored> = found.iter().filter(|scored| scored.method != Method::LocdiffH).collect();
    let mut rows = Vec::new();
    let mut better = json!({ "method": Method::LocdiffH, "less": "better part" });
    for part in &parts {
        let difference = compare(&hybrid.errors_km, &part.errors_km, &job.thresholds_km, &bootstrap(job))?;
        let fields = difference.to_fields();
        for (place, threshold) in job.thresholds_km.iter().enumerate() {
            let percent = |scored: &Scored| scored.scores.within[place].percent.value;
            let is_best = parts.iter().all(|other| percent(other) <= percent(part));
            for name in ["", "_lo", "_hi"].map(|end| format!("acc_{threshold}km{end}")).into_iter().filter(|_| is_best)
            {
                better[&name] = fields[&name].clone();
            }
        }
        let mut row = json!({ "method": Method::LocdiffH, "less": part.method });
        fields.into_iter().for_each(|(name, value)| row[name] = value);
        rows.push(row);
    }
    rows.push(better);
    Ok(rows)
}

/// What TensorBoard shows: `test/METHOD/NUMBER`.
fn scalars(rows: &[Value]) -> Vec<(String, f64)> {
    let of_row = |row: &Value| {
        let method = row["method"].as_str().unwrap_or_default().to_owned();
        let numbers = row.as_object().cloned().unwrap_or_default();
        let shown = |(name, value): (String, Value)| {
            let is_bound = name.ends_with("_lo") || name.ends_with("_hi") || name == "rows";
            value.as_f64().filter(|_| !is_bound).map(|value| (format!("test/{method}/{name}"), value))
        };
        numbers.into_iter().filter_map(shown).collect::<Vec<_>>()
    };
    rows.iter().flat_map(of_row).collect()
}

/// The places of a file that must have the rows of the truth, in its order.
fn read_like(path: &Path, ids: &[String]) -> Result<Vec<UnitVector>, EvalError> {
    let wrong = |reason: String| EvalError::Answers { path: path.to_owned(), reason };
    let found = read(path)?;
    if found.len() != ids.len() {
        return Err(wrong(format!("{} rows, wanted {} as the truth has", found.len(), ids.len())));
    }
    if let Some(row) = found.iter().zip(ids).position(|((got, _), want)| got != want) {
        return Err(wrong(format!("row {row} is {:?}, wanted {:?}", found[row].0, ids[row])));
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
