//! The results table, as rows for JSON and as text. In the text, each row has a line with its values. A row of computed
//! (not published) values also has a line with 95 % intervals.

use std::fmt::Write as _;

use locdiff_core::config::{RetrievalHead, RunConfig};
use locdiff_core::metrics::{Interval, Rating};
use locdiff_core::protocol::{EvalSummary, Method};
use serde::Serialize;

use super::gather::Gather;
use super::published::Published;
use super::score::{Difference, MethodScore};

/// Width of the first column.
const NAME: usize = 30;

/// The columns to the right of the accuracies: the heading and the number of decimals of each column.
const OTHER_SCORES: [(&str, usize); 5] =
    [("median km", 1), ("mean km", 0), ("GeoScore", 0), ("density", 3), ("coverage", 3)];

/// A row of the table.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Row {
    Computed(Computed),
    Published(Published),
}

/// Computed scores, and the data that they were computed on.
#[derive(Debug, Serialize)]
pub(super) struct Computed {
    /// Name of the method, or path of a file of predictions.
    pub(super) method: String,
    #[serde(flatten)]
    pub(super) rating: Rating,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<String>,
    pub(super) dataset: String,
    pub(super) simulated: bool,
    pub(super) source: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) out_of_range: Option<usize>,
}

/// The rows of an evaluation, one per method.
pub(super) fn computed(
    found: Vec<MethodScore>,
    summary: &EvalSummary,
    gather: &Gather,
    config: &RunConfig,
) -> Vec<Row> {
    let out_of_range = gather.rows().filter(|row| row.out_of_range).count();
    let row = |MethodScore { method, rating, .. }: MethodScore| {
        Row::Computed(Computed {
            method: method.name().to_owned(),
            rating,
            name: Some(name(method, summary)),
            dataset: config.shards.test.clone(),
            simulated: summary.is_simulated,
            source: "computed",
            out_of_range: (method == Method::LocdiffH).then_some(out_of_range),
        })
    };
    found.into_iter().map(row).collect()
}

fn name(method: Method, summary: &EvalSummary) -> String {
    match (method, summary.head) {
        (Method::Retrieval, Some(RetrievalHead::Knn)) => "nearest training photos".to_owned(),
        (Method::Retrieval, _) => "GeoCLIP retrieval".to_owned(),
        (Method::Locdiff, _) => format!("LocDiff (L = {})", summary.degree),
        (Method::LocdiffH, _) => format!("LocDiff-H (L = {})", summary.degree),
    }
}

/// The table as text. Its first line is `data`, a description of the data.
pub(super) fn text(data: &str, thresholds_km: &[f64], rows: &[Row]) -> String {
    let mut text = format!("{data}\n{:<NAME$}", "method");
    let accuracies = thresholds_km.iter().map(|km| format!("{km} km %"));
    for heading in accuracies.chain(OTHER_SCORES.map(|(heading, _)| heading.to_owned())) {
        let _ = write!(text, " {heading:>11}");
    }
    let _ = writeln!(text, "  source");
    rows.iter().for_each(|row| row.write(&mut text, thresholds_km));
    text
}

/// A line of text that describes the evaluated data.
pub(super) fn data_summary(summary: &EvalSummary) -> String {
    let kind = photo_kind(summary.is_simulated);
    let source = summary.source.as_ref().map_or_else(String::new, |source| format!(" ({source})"));
    let skipped = match summary.skipped_rows {
        0 => String::new(),
        skipped => format!("; left out {skipped} invalid rows"),
    };
    format!("{} {kind} of {} views{source}{skipped}", summary.rows, summary.views)
}

/// The noun for the evaluated rows in the output: "simulated photos" or "photos".
pub(super) fn photo_kind(is_simulated: bool) -> &'static str {
    if is_simulated { "simulated photos" } else { "photos" }
}

/// One cell of the table: the value and, if known, its interval.
struct Cell {
    value: String,
    bounds: Option<String>,
}

impl Cell {
    fn none() -> Self {
        Self { value: "-".to_owned(), bounds: None }
    }

    fn interval(Interval { value, lo, hi }: Interval, decimals: usize) -> Self {
        Self { value: format!("{value:.decimals$}"), bounds: Some(format!("{lo:.decimals$}-{hi:.decimals$}")) }
    }

    fn number(value: Option<f64>, decimals: usize) -> Self {
        value.map_or_else(Self::none, |value| Self { value: format!("{value:.decimals$}"), bounds: None })
    }

    /// A cell with a published number. The number is shown with all its digits.
    fn published(value: Option<f64>) -> Self {
        let digits = |value: f64| {
            if format!("{value:.1}").parse() == Ok(value) { format!("{value:.1}") } else { value.to_string() }
        };
        value.map_or_else(Self::none, |value| Self { value: digits(value), bounds: None })
    }
}

impl Row {
    fn write(&self, text: &mut String, thresholds_km: &[f64]) {
        let (name, source) = match self {
            Self::Computed(row) => (format!("{} ", row.name.as_ref().unwrap_or(&row.method)), "computed"),
            Self::Published(row) => (format!("{} {}", row.method, row.dataset), "published"),
        };
        let simulated = if matches!(self, Self::Computed(row) if row.simulated) { ", simulated" } else { "" };
        let cells = self.cells(thresholds_km);
        let _ = write!(text, "{name:<NAME$}");
        for cell in &cells {
            let _ = write!(text, " {:>11}", cell.value);
        }
        let _ = writeln!(text, "  {source}{simulated}");
        if cells.iter().any(|cell| cell.bounds.is_some()) {
            let _ = write!(text, "{:<NAME$}", "");
            for cell in &cells {
                let _ = write!(text, " {:>11}", cell.bounds.as_deref().unwrap_or_default());
            }
            let _ = writeln!(text, "  95 % interval");
        }
    }

    fn cells(&self, thresholds_km: &[f64]) -> Vec<Cell> {
        let row = match self {
            Self::Computed(row) => &row.rating,
            Self::Published(row) => {
                let accuracies = thresholds_km.iter().map(|km| Cell::published(row.within(*km)));
                return accuracies.chain(OTHER_SCORES.map(|_| Cell::none())).collect();
            }
        };
        let accuracies = row.scores.within.iter().map(|within| Cell::interval(within.percent, 1));
        let [median, mean, geo_score, density, coverage] = OTHER_SCORES.map(|(_, decimals)| decimals);
        let other_scores = [
            Cell::interval(row.scores.median_km, median),
            Cell::interval(row.scores.mean_km, mean),
            Cell::interval(row.scores.geo_score, geo_score),
            Cell::number(row.density, density),
            Cell::number(row.coverage, coverage),
        ];
        accuracies.chain(other_scores).collect()
    }
}

/// Lines below the table: LocDiff-H compared with its parts, and the number of rows in which LocDiff-H fell back to
/// LocDiff's answer.
pub(super) fn notes(rows: &[Row], differences: &[Difference]) -> String {
    let mut text = String::new();
    for Difference { less, within, .. } in differences {
        let _ = write!(text, "LocDiff-H minus {less}, paired:");
        for within in within {
            let (km, Interval { value, lo, hi }) = (within.km, within.percent);
            let _ = write!(text, "  {km} km {value:+.1} ({lo:+.1} to {hi:+.1})");
        }
        let _ = writeln!(text);
    }
    let out_of_range = rows.iter().find_map(|row| match row {
        Row::Computed(row) => row.out_of_range,
        Row::Published(_) => None,
    });
    if let Some(count) = out_of_range {
        let _ = writeln!(text, "LocDiff-H: in {count} rows no gallery point was in range, so LocDiff's answer is used");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_numbers_keep_their_digits() {
        assert_eq!(Cell::published(Some(0.05)).value, "0.05");
        assert_eq!(Cell::published(Some(28.0)).value, "28.0");
        assert_eq!(Cell::number(Some(0.05), 2).value, "0.05");
        assert_eq!(Cell::number(Some(33.333_333), 1).value, "33.3");
        assert_eq!(Cell::published(None).value, "-");
    }
}
