//! `eval --predictions`: anybody's predictions against the truth.
//!
//! Predictions are a CSV or Parquet with coordinates, and an id for each row, in any order. A file without ids is taken in the
//! order of the truth, and the result says so. Nothing is dropped: every true row needs exactly one prediction, every
//! prediction a true row, and all coordinates must be places; whatever is not so is an error that names file, row and id.

use std::collections::HashMap;
use std::path::Path;

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::geo::{Place, UnitVector};
use locdiff_core::metrics::{Bootstrap, DensityCoverage, MetricsError, NEAREST_K, Scores, density_coverage, score};
use locdiff_core::tables::{self, TableError};
use serde::{Deserialize, Serialize};

/// Ids that a message names.
const NAMED_MAX: usize = 3;

/// Why predictions cannot be scored.
#[derive(Debug, thiserror::Error)]
pub enum PredictionsError {
    /// A file that cannot be read as a table.
    #[error(transparent)]
    Table(#[from] TableError),
    /// A truth without names for its rows.
    #[error("{truth}: no column of ids, wanted one of {} among its columns", tables::ID_NAMES.join(", "))]
    NoIds {
        /// Its file.
        truth: String,
    },
    /// Predictions whose ids, if they have any, are in a column of another name.
    #[error(
        "{file}: no column of ids, but of text ({columns}); if one has the ids, call it {}, and if none has, leave them out: \
         rows are then taken in the order of {truth}",
        tables::ID_NAMES.join(" or ")
    )]
    UnknownIds {
        /// The predictions.
        file: String,
        /// Columns of text.
        columns: String,
        /// The truth.
        truth: String,
    },
    /// A truth without rows.
    #[error("{truth}: no rows, wanted at least 1")]
    EmptyTruth {
        /// Where it came from.
        truth: String,
    },
    /// An id that stands in two rows.
    #[error("{file}: rows {first} and {second} are both `{id}`, wanted every id once")]
    Twice {
        /// Which file.
        file: String,
        /// The id.
        id: String,
        /// The one row.
        first: usize,
        /// The other.
        second: usize,
    },
    /// True rows without a prediction.
    #[error("{file}: no prediction for {count} of the {rows} rows of {truth}: {ids}")]
    Missing {
        /// The predictions.
        file: String,
        /// The truth.
        truth: String,
        /// How many.
        count: usize,
        /// True rows.
        rows: usize,
        /// Some of them.
        ids: String,
    },
    /// Predictions for rows that are not in the truth, or a truth of rows that are not in the data.
    #[error("{file}: {count} of its {rows} rows are not in {truth}: {ids}")]
    Extra {
        /// The predictions.
        file: String,
        /// The truth.
        truth: String,
        /// How many.
        count: usize,
        /// Predictions.
        rows: usize,
        /// Some of them.
        ids: String,
    },
    /// Without ids, lengths must agree.
    #[error("{file}: {got} rows without ids, {truth} has {want}; add a column `id`, or predict every row in its order")]
    Length {
        /// The predictions.
        file: String,
        /// How many there are.
        got: usize,
        /// The truth.
        truth: String,
        /// How many rows it has.
        want: usize,
    },
    /// Numbers.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
}

impl HasExitCode for PredictionsError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Table(error) => error.exit_code(),
            Self::EmptyTruth { .. } => ExitCode::NoData,
            _ => ExitCode::BadData,
        }
    }
}

/// Where photos were taken, by id.
#[derive(Debug, Clone, PartialEq)]
pub struct Truth {
    source: String,
    ids: Vec<String>,
    places: Vec<Place>,
}

impl Truth {
    /// Reads a CSV or Parquet with `path` or `id`, `lat` and `lon`.
    pub fn read(path: &Path) -> Result<Self, PredictionsError> {
        let source = path.display().to_string();
        let table = tables::read(path)?;
        let ids = table.ids.ok_or_else(|| PredictionsError::NoIds { truth: source.clone() })?;
        Self::new(source, ids, table.places)
    }

    /// Ids and places of rows that are known otherwise, such as those of test shards; `source` names them in messages.
    ///
    /// # Panics
    /// Where there are not as many ids as places.
    pub fn new(source: String, ids: Vec<String>, places: Vec<Place>) -> Result<Self, PredictionsError> {
        assert_eq!(ids.len(), places.len(), "an id for every place");
        if ids.is_empty() {
            return Err(PredictionsError::EmptyTruth { truth: source });
        }
        by_id(&source, &ids)?;
        Ok(Self { source, ids, places })
    }

    /// Where it came from.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Names of the rows.
    pub fn ids(&self) -> &[String] {
        &self.ids
    }

    /// Their places.
    pub fn places(&self) -> &[Place] {
        &self.places
    }
}

/// How predictions were laid beside the truth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MatchedBy {
    /// By their ids.
    Id,
    /// By their order, for want of ids.
    Order,
}

/// How good a file of predictions is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PredictionScores {
    /// The file.
    pub predictions: String,
    /// What it was compared with.
    pub truth: String,
    /// How.
    pub matched_by: MatchedBy,
    /// The numbers.
    pub scores: Scores,
    /// Density and coverage, k = 3; none where there are fewer than four rows.
    pub prdc: Option<DensityCoverage>,
}

/// Scores a file of predictions.
pub fn score_predictions(
    file: &Path,
    truth: &Truth,
    thresholds_km: &[f64],
    bootstrap: &Bootstrap,
) -> Result<PredictionScores, PredictionsError> {
    let table = tables::read(file)?;
    let name = file.display().to_string();
    let (predicted, matched_by) = match table.ids {
        Some(ids) => (in_order_of_truth(&name, &ids, &table.places, truth)?, MatchedBy::Id),
        None if !table.other_text.is_empty() => {
            let columns = table.other_text.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            return Err(PredictionsError::UnknownIds { file: name, columns, truth: truth.source.clone() });
        }
        None if table.places.len() == truth.places.len() => (table.places, MatchedBy::Order),
        None => {
            let (got, want) = (table.places.len(), truth.places.len());
            return Err(PredictionsError::Length { file: name, got, truth: truth.source.clone(), want });
        }
    };
    let errors_km: Vec<f64> = truth.places.iter().zip(&predicted).map(|(one, other)| one.distance(*other).0).collect();
    let vectors = |places: &[Place]| places.iter().map(|place| UnitVector::from(*place)).collect::<Vec<_>>();
    let prdc = (errors_km.len() > NEAREST_K)
        .then(|| density_coverage(&vectors(&truth.places), &vectors(&predicted), NEAREST_K))
        .transpose()?;
    Ok(PredictionScores {
        predictions: name,
        truth: truth.source.clone(),
        matched_by,
        scores: score(&errors_km, thresholds_km, bootstrap)?,
        prdc,
    })
}

/// Rows by their id, which each has for itself.
fn by_id<'a>(file: &str, ids: &'a [String]) -> Result<HashMap<&'a str, usize>, PredictionsError> {
    let mut rows = HashMap::with_capacity(ids.len());
    for (row, id) in ids.iter().enumerate() {
        if let Some(first) = rows.insert(id.as_str(), row) {
            return Err(PredictionsError::Twice { file: file.to_owned(), id: id.clone(), first, second: row });
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
    let missing: Vec<&String> = truth.ids.iter().filter(|id| !rows.contains_key(id.as_str())).collect();
    let (file, truth_name) = (file.to_owned(), truth.source.clone());
    if !extra.is_empty() {
        let (count, rows, ids) = (extra.len(), ids.len(), some_of(&extra));
        return Err(PredictionsError::Extra { file, truth: truth_name, count, rows, ids });
    }
    if !missing.is_empty() {
        let (count, rows, ids) = (missing.len(), truth.ids.len(), some_of(&missing));
        return Err(PredictionsError::Missing { file, truth: truth_name, count, rows, ids });
    }
    Ok(truth.ids.iter().map(|id| places[rows[id.as_str()]]).collect())
}

/// The first of some ids, for messages.
pub(super) fn some_of(ids: &[&String]) -> String {
    let named: Vec<String> = ids.iter().take(NAMED_MAX).map(|id| format!("`{id}`")).collect();
    let rest = if ids.len() > NAMED_MAX { ", ..." } else { "" };
    named.join(", ") + rest
}
