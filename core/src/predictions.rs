//! `eval --predictions`: scores a file of predictions from any source against the truth.
//!
//! The predictions are a table of coordinates: CSV, Parquet or `.npy`. If the table has an id column, predictions and
//! true places are matched by id, so the rows may be in any order. If the table has no id column, rows are matched by
//! their order, and the result says so. A table without an id column but with other text columns is refused, because
//! one of them probably holds the ids.
//!
//! No row is dropped: every true place needs exactly one prediction, every prediction needs a true place, and all
//! coordinates must be valid. Every error names the file, and also the rows or ids if single rows are at fault.

use std::collections::HashMap;
use std::path::Path;

use serde::Serialize;

use crate::exit_code::{ExitCode, HasExitCode};
use crate::geo::{Place, UnitVector};
use crate::metrics::{Bootstrap, MetricsError, Rating, rate};
use crate::tables::{self, TableError};

/// Largest number of ids listed in an error message.
const NAMED_MAX: usize = 3;

/// Why predictions cannot be scored.
#[derive(Debug, thiserror::Error)]
pub enum PredictionsError {
    /// A file cannot be read as a table.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The rows of the predictions do not match the rows of the truth, or ids are missing or repeated. Holds the name
    /// of the file at fault and the reason.
    #[error("{0}: {1}")]
    Rows(String, String),
    /// The metrics cannot be computed.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
}

impl PredictionsError {
    fn rows(file: &str, reason: String) -> Self {
        Self::Rows(file.to_owned(), reason)
    }

    /// The error for a `file` with rows that are not in `truth`. `extra` holds the ids of these rows, and `rows` is the
    /// number of all rows in `file`.
    pub fn extra_rows(file: &str, truth: &str, rows: usize, extra: &[&String]) -> Self {
        Self::rows(file, format!("{} of its {rows} rows are not in {truth}: {}", extra.len(), first_few(extra)))
    }
}

impl HasExitCode for PredictionsError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Table(error) => error.exit_code(),
            _ => ExitCode::BadData,
        }
    }

    fn wrapped(&self) -> Option<&dyn HasExitCode> {
        match self {
            Self::Table(error) => Some(error),
            _ => None,
        }
    }
}

/// The true place of every photo, with the id of the photo.
#[derive(Debug, Clone, PartialEq)]
pub struct Truth {
    /// Where the truth was read from, for error messages.
    pub source: String,
    /// Ids of the rows, all different.
    pub ids: Vec<String>,
    /// Places of the rows.
    pub places: Vec<Place>,
}

impl Truth {
    /// Reads a CSV or Parquet file with columns for ids, latitudes and longitudes. The ids must be unique.
    pub fn read(path: &Path) -> Result<Self, PredictionsError> {
        Self::read_as(path.display().to_string(), path)
    }

    /// Like [`Truth::read`], but with `source` in error messages instead of the path.
    pub fn read_as(source: String, path: &Path) -> Result<Self, PredictionsError> {
        let table = tables::read(path)?;
        let no_ids = || format!("no id column; accepted names: {}", tables::ID_NAMES.join(", "));
        let ids = table.ids.ok_or_else(|| PredictionsError::rows(&source, no_ids()))?;
        by_id(&source, &ids)?;
        Ok(Self { source, ids, places: table.places })
    }
}

/// How predictions were matched with the truth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MatchedBy {
    /// By id.
    Id,
    /// By the order of the rows, because the predictions have no id column.
    Order,
}

/// The metrics of a file of predictions.
#[derive(Debug, Clone, PartialEq)]
pub struct PredictionScores {
    /// How the rows of the predictions were matched with the rows of the truth.
    pub matched_by: MatchedBy,
    /// The metrics.
    pub rating: Rating,
}

/// Scores a file of predictions against `truth`.
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
                "there are text columns ({columns}), but none is an id column; rename the column with the ids to {}; \
                 or, to match rows by the order of {truth_name}, remove all text columns",
                tables::ID_NAMES.join(" or ")
            );
            return Err(PredictionsError::rows(&name, reason));
        }
        None if got == want => (table.places, MatchedBy::Order),
        None => {
            let reason = format!(
                "{got} rows without ids, but {truth_name} has {want} rows; add a column `id`, or predict every row in \
                 the order of {truth_name}"
            );
            return Err(PredictionsError::rows(&name, reason));
        }
    };
    let vectors = |places: &[Place]| places.iter().map(|place| UnitVector::from(*place)).collect::<Vec<_>>();
    let (truth, predicted) = (vectors(&truth.places), vectors(&predicted));
    let errors_km: Vec<f64> = truth.iter().zip(&predicted).map(|(one, other)| one.distance(*other).0).collect();
    Ok(PredictionScores { matched_by, rating: rate(&errors_km, &truth, &predicted, thresholds_km, bootstrap)? })
}

/// Maps each id to its row number. A repeated id is an error.
fn by_id<'a>(file: &str, ids: &'a [String]) -> Result<HashMap<&'a str, usize>, PredictionsError> {
    let mut rows = HashMap::with_capacity(ids.len());
    for (row, id) in ids.iter().enumerate() {
        if let Some(first) = rows.insert(id.as_str(), row) {
            let reason = format!("rows {first} and {row} both have the id `{id}`, wanted unique ids");
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
    let truth_rows = by_id(&truth.source, &truth.ids)?;
    let extra: Vec<&String> = ids.iter().filter(|id| !truth_rows.contains_key(id.as_str())).collect();
    if !extra.is_empty() {
        return Err(PredictionsError::extra_rows(file, &truth.source, ids.len(), &extra));
    }
    let missing: Vec<&String> = truth.ids.iter().filter(|id| !rows.contains_key(id.as_str())).collect();
    if !missing.is_empty() {
        let (count, all, source) = (missing.len(), truth.ids.len(), &truth.source);
        let reason = format!("{count} of {all} rows in {source} have no prediction: {}", first_few(&missing));
        return Err(PredictionsError::rows(file, reason));
    }
    Ok(truth.ids.iter().map(|id| places[rows[id.as_str()]]).collect())
}

/// Lists the first [`NAMED_MAX`] ids for an error message.
fn first_few(ids: &[&String]) -> String {
    let named: Vec<String> = ids.iter().take(NAMED_MAX).map(|id| format!("`{id}`")).collect();
    let rest = if ids.len() > NAMED_MAX { ", ..." } else { "" };
    named.join(", ") + rest
}
