//! `eval --predictions`: anybody's predictions against the truth.
//!
//! Predictions are a CSV or Parquet with coordinates, and an id for each row, in any order. A file without ids is taken in the
//! order of the truth, and the result says so. Nothing is dropped: every true row needs exactly one prediction, every
//! prediction a true row, and all coordinates must be places; whatever is not so is an error that names file, row and id.

use std::collections::HashMap;
use std::path::Path;

use serde::Serialize;

use crate::exit_code::{ExitCode, HasExitCode};
use crate::geo::{Place, UnitVector};
use crate::metrics::{Bootstrap, MetricsError, Rating, rate};
use crate::tables::{self, TableError};

/// Ids that a message names.
const NAMED_MAX: usize = 3;

/// Why predictions cannot be scored.
#[derive(Debug, thiserror::Error)]
pub enum PredictionsError {
    /// A file that cannot be read as a table.
    #[error(transparent)]
    Table(#[from] TableError),
    /// Rows that are not those of the other file: which file, got and wanted.
    #[error("{0}: {1}")]
    Rows(String, String),
    /// Numbers.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
}

impl PredictionsError {
    fn rows(file: &str, reason: String) -> Self {
        Self::Rows(file.to_owned(), reason)
    }

    /// Rows of a file that the truth, or the data that the file is the truth of, does not have.
    pub fn extra(file: &str, truth: &str, rows: usize, extra: &[&String]) -> Self {
        Self::rows(file, format!("{} of its {rows} rows are not in {truth}: {}", extra.len(), some_of(extra)))
    }
}

impl HasExitCode for PredictionsError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Table(error) => error.exit_code(),
            _ => ExitCode::BadData,
        }
    }
}

/// Where photos were taken, by id.
#[derive(Debug, Clone, PartialEq)]
pub struct Truth {
    /// Where it came from.
    pub source: String,
    /// Names of the rows, each once.
    pub ids: Vec<String>,
    /// Their places.
    pub places: Vec<Place>,
}

impl Truth {
    /// Reads a CSV or Parquet with `path` or `id`, `lat` and `lon`.
    pub fn read(path: &Path) -> Result<Self, PredictionsError> {
        Self::read_as(path.display().to_string(), path)
    }

    /// The same of a file that messages call otherwise.
    pub fn read_as(source: String, path: &Path) -> Result<Self, PredictionsError> {
        let table = tables::read(path)?;
        let no_ids = || format!("no column of ids, wanted one of {} among its columns", tables::ID_NAMES.join(", "));
        let ids = table.ids.ok_or_else(|| PredictionsError::rows(&source, no_ids()))?;
        by_id(&source, &ids)?;
        Ok(Self { source, ids, places: table.places })
    }
}

/// How predictions were laid beside the truth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MatchedBy {
    /// By their ids.
    Id,
    /// By their order, for want of ids.
    Order,
}

/// How good a file of predictions is.
#[derive(Debug, Clone, PartialEq)]
pub struct PredictionScores {
    /// How its rows were laid beside those of the truth.
    pub matched_by: MatchedBy,
    /// The numbers.
    pub rating: Rating,
}

/// Scores a file of predictions.
pub fn score_predictions(
    file: &Path,
    truth: &Truth,
    thresholds_km: &[f64],
    bootstrap: &Bootstrap,
) -> Result<PredictionScores, PredictionsError> {
    let table = tables::read(file)?;
    let (name, truth_name) = (file.display().to_string(), &truth.source);
    let (got, want) = (table.places.len(), truth.places.len());
    let (predicted, matched_by) = match table.ids {
        Some(ids) => (in_order_of_truth(&name, &ids, &table.places, truth)?, MatchedBy::Id),
        None if !table.other_text.is_empty() => {
            let columns = table.other_text.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            let reason = format!(
                "no column of ids, but of text ({columns}); if one has the ids, call it {}, and if none has, leave them out: \
                 rows are then taken in the order of {truth_name}",
                tables::ID_NAMES.join(" or ")
            );
            return Err(PredictionsError::rows(&name, reason));
        }
        None if got == want => (table.places, MatchedBy::Order),
        None => {
            let reason = format!(
                "{got} rows without ids, {truth_name} has {want}; add a column `id`, or predict every row in its order"
            );
            return Err(PredictionsError::rows(&name, reason));
        }
    };
    let vectors = |places: &[Place]| places.iter().map(|place| UnitVector::from(*place)).collect::<Vec<_>>();
    let (truth, predicted) = (vectors(&truth.places), vectors(&predicted));
    let errors_km: Vec<f64> = truth.iter().zip(&predicted).map(|(one, other)| one.distance(*other).0).collect();
    Ok(PredictionScores { matched_by, rating: rate(&errors_km, &truth, &predicted, thresholds_km, bootstrap)? })
}

/// Rows by their id, which each has for itself.
fn by_id<'a>(file: &str, ids: &'a [String]) -> Result<HashMap<&'a str, usize>, PredictionsError> {
    let mut rows = HashMap::with_capacity(ids.len());
    for (row, id) in ids.iter().enumerate() {
        if let Some(first) = rows.insert(id.as_str(), row) {
            let reason = format!("rows {first} and {row} are both `{id}`, wanted every id once");
            return Err(PredictionsError::rows(file, reason));
        }
    }
    Ok(rows)
}

fn in_order_of_truth(
    file: &str,
    ids: &[String],
    places: &[Place],
    truth: &Truth,
) -> Result<Vec<Place>, PredictionsError> {
    let rows = by_id(file, ids)?;
    let known = by_id(&truth.source, &truth.ids)?;
    let extra: Vec<&String> = ids.iter().filter(|id| !known.contains_key(id.as_str())).collect();
    if !extra.is_empty() {
        return Err(PredictionsError::extra(file, &truth.source, ids.len(), &extra));
    }
    let missing: Vec<&String> = truth.ids.iter().filter(|id| !rows.contains_key(id.as_str())).collect();
    if !missing.is_empty() {
        let (count, all, source) = (missing.len(), truth.ids.len(), &truth.source);
        let reason = format!("no prediction for {count} of the {all} rows of {source}: {}", some_of(&missing));
        return Err(PredictionsError::rows(file, reason));
    }
    Ok(truth.ids.iter().map(|id| places[rows[id.as_str()]]).collect())
}

/// The first of some ids, for messages.
fn some_of(ids: &[&String]) -> String {
    let named: Vec<String> = ids.iter().take(NAMED_MAX).map(|id| format!("`{id}`")).collect();
    let rest = if ids.len() > NAMED_MAX { ", ..." } else { "" };
    named.join(", ") + rest
}
