//! The results table, as rows for JSON and as text. The text is no wider than the terminal: if the table does not
//! fit, it is split into several tables.

use std::fmt::Write as _;

use locdiff_core::config::{DecodeAnchors, EvalConfig, RetrievalHead, RunConfig};
use locdiff_core::metrics::{Interval, NEAREST_K, Overlaps, Rating, Within};
use locdiff_core::protocol::{EvalSummary, Method};
use locdiff_core::tuning::Choice;
use serde::Serialize;
use serde_json::{Map, Value};

use super::gather::Gather;
use super::published::{self, Published};
use super::score::{BETTER_PART, Difference, MethodScore};
use crate::terminal::{TableColumn, table, wrapped};

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
    /// What a suite says about the row, such as its gallery or the degree of its run.
    #[serde(flatten)]
    pub(super) labels: Map<String, Value>,
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
            labels: Map::new(),
        })
    };
    found.into_iter().map(row).collect()
}

/// The name of a method in the table and in the plot.
pub(super) fn name(method: Method, summary: &EvalSummary) -> String {
    match (method, summary.head) {
        (Method::Retrieval, Some(RetrievalHead::Knn)) => "nearest training photos".to_owned(),
        (Method::Retrieval, Some(RetrievalHead::Trained)) => "GeoCLIP, trained head".to_owned(),
        (Method::Retrieval, _) => "GeoCLIP retrieval".to_owned(),
        (Method::RetrievalConsensus, Some(RetrievalHead::Knn)) => "nearest photos, consensus".to_owned(),
        (Method::RetrievalConsensus, _) => "GeoCLIP, consensus".to_owned(),
        (Method::Locdiff, _) => format!("LocDiff (L = {})", summary.degree),
        (Method::LocdiffH, _) => format!("LocDiff-H (L = {})", summary.degree),
    }
}

/// The tables as text, at most `width` columns wide: the accuracies, the other scores, and the 95 % intervals. The first
/// two are combined into one table if it fits into `width`; otherwise, the first has the median error if that fits. The
/// first line is `data`, a description of the data.
pub(super) fn text(data: &str, thresholds_km: &[f64], rows: &[Row], width: usize) -> String {
    let names: Vec<String> = rows.iter().map(Row::name).collect();
    let mut whole = accuracy_columns(thresholds_km, rows);
    whole.extend(score_columns(rows));
    let mut text = wrapped(data, 2, width) + "\n";
    let fits = |columns: &usize| table(WITHIN, &names, &whole[..*columns], width).lines().count() == rows.len() + 1;
    let accuracies = thresholds_km.len();
    let first = [whole.len(), accuracies + 1].into_iter().find(fits).unwrap_or(accuracies);
    text += &table(WITHIN, &names, &whole[..first], width);
    let published: Vec<&Published> = rows.iter().filter_map(Row::published).collect();
    for line in published::footnotes(&published) {
        text += &(wrapped(&line, 2, width) + "\n");
    }
    let scored: Vec<(String, &Rating)> = rows.iter().filter_map(|row| Some((row.name(), row.rating()?))).collect();
    let (scored_names, ratings): (Vec<String>, Vec<&Rating>) = scored.into_iter().unzip();
    if first < whole.len() {
        let has_scores = |row: &&Row| row.spread()[0].is_some() || row.rating().is_some();
        let kept: Vec<usize> = (0..rows.len()).filter(|row| has_scores(&&rows[*row])).collect();
        let names: Vec<String> = kept.iter().map(|row| names[*row].clone()).collect();
        let columns: Vec<TableColumn> = whole[first..].iter().map(|column| column.of_rows(&kept)).collect();
        let _ = write!(text, "\n{}", table("other scores", &names, &columns, width));
    }
    // All methods are scored on the same true places, so they have the same ceiling.
    let ceiling = ratings.first().and_then(|rating| rating.coverage_ceiling).filter(|ceiling| *ceiling < 1.0);
    if let Some(ceiling) = ceiling {
        let line = format!(
            "coverage can be at most {ceiling:.3}, because photos that share their place with {NEAREST_K} or more \
             others cannot be covered"
        );
        text += &(wrapped(&line, 2, width) + "\n");
    }
    let intervals = interval_columns(thresholds_km, &ratings);
    let _ = write!(text, "\n{}", table("95 % intervals", &scored_names, &intervals, width));
    text
}

/// The heading of the column of names, in a table with accuracies.
const WITHIN: &str = "% of photos within";

/// One column per threshold, with the percentage of photos located within that distance.
fn accuracy_columns(thresholds_km: &[f64], rows: &[Row]) -> Vec<TableColumn> {
    let column = |(place, km): (usize, &f64)| {
        let cell = |row: &Row| match row {
            Row::Computed(row) => number(Some(row.rating.scores.within[place].percent.value), 1),
            Row::Published(row) => published(row.within(*km)),
        };
        TableColumn { heading: format!("{km} km"), cells: rows.iter().map(cell).collect() }
    };
    thresholds_km.iter().enumerate().map(column).collect()
}

/// The columns to the right of the accuracies, the median first. Of these scores, published rows have at most density
/// and coverage.
fn score_columns(rows: &[Row]) -> Vec<TableColumn> {
    let column = |heading: &str, decimals: usize, value: fn(&Row) -> Option<f64>| TableColumn {
        heading: heading.to_owned(),
        cells: rows.iter().map(|row| number(value(row), decimals)).collect(),
    };
    vec![
        column("median km", 1, |row| Some(row.rating()?.scores.median_km.value)),
        column("mean km", 0, |row| Some(row.rating()?.scores.mean_km.value)),
        column("GeoScore", 0, |row| Some(row.rating()?.scores.geo_score.value)),
        column("density", 3, |row| row.spread()[0]),
        column("coverage", 3, |row| row.spread()[1]),
    ]
}

fn interval_columns(thresholds_km: &[f64], ratings: &[&Rating]) -> Vec<TableColumn> {
    let column = |heading: String, decimals: usize, interval: &dyn Fn(&Rating) -> Interval| {
        let bounds = |rating: &&Rating| {
            let Interval { lo, hi, .. } = interval(rating);
            format!("{lo:.decimals$}-{hi:.decimals$}")
        };
        TableColumn { heading, cells: ratings.iter().map(bounds).collect() }
    };
    let accuracy =
        |(place, km): (usize, &f64)| column(format!("{km} km"), 1, &|rating| rating.scores.within[place].percent);
    let mut columns: Vec<TableColumn> = thresholds_km.iter().enumerate().map(accuracy).collect();
    columns.push(column("median km".to_owned(), 1, &|rating| rating.scores.median_km));
    columns.push(column("mean km".to_owned(), 0, &|rating| rating.scores.mean_km));
    columns.push(column("GeoScore".to_owned(), 0, &|rating| rating.scores.geo_score));
    columns
}

/// The accuracies on the validation photos, with the setting that tuning chose.
pub(super) fn choice(choice: &Choice, thresholds_km: &[f64], width: usize) -> String {
    let held_out = choice.held_out_percent.as_ref().map(|percents| ("LocDiff-H, cross-validated", percents));
    let rows = [
        ("retrieval", &choice.retrieval_percent),
        ("retrieval, consensus", &choice.consensus_percent),
        ("LocDiff", &choice.own_percent),
        ("LocDiff-H", &choice.hybrid_percent),
    ];
    let rows: Vec<(&str, &Vec<f64>)> = rows.into_iter().chain(held_out).collect();
    let names: Vec<String> = rows.iter().map(|(name, _)| (*name).to_owned()).collect();
    let column = |(place, km): (usize, &f64)| TableColumn {
        heading: format!("{km} km"),
        cells: rows.iter().map(|(_, percents)| number(percents.get(place).copied(), 1)).collect(),
    };
    let columns: Vec<TableColumn> = thresholds_km.iter().enumerate().map(column).collect();
    table(WITHIN, &names, &columns, width)
}

/// A line of text that describes the evaluated data. `places` is the number of different true places.
pub(super) fn data_summary(summary: &EvalSummary, places: usize, config: &EvalConfig) -> String {
    let kind = photo_kind(summary.is_simulated);
    let source = summary.source.as_ref().map_or_else(String::new, |source| format!(" ({source})"));
    let skipped = match summary.skipped_rows {
        0 => String::new(),
        skipped => format!("; left out {skipped} invalid rows"),
    };
    let views = if summary.views == 1 { "one view".to_owned() } else { format!("{} views", summary.views) };
    let means = summary.mean_views.min(summary.views);
    let views = if means > 1 { format!("{views} (means of {means})") } else { views };
    // With a gallery, the answers of LocDiff depend on the head, because the head decides which gallery is used.
    let choice = match config.anchors {
        DecodeAnchors::Gallery if !config.refine && summary.anchors > 0 => {
            format!("; LocDiff chooses among {} places", summary.anchors)
        }
        _ => String::new(),
    };
    let excluded = excluded(summary, config);
    format!("{} {kind} of {views} at {places} places{source}{skipped}{choice}{excluded}", summary.rows)
}

/// Says which gallery points were left out; "" if none were.
pub(super) fn excluded(summary: &EvalSummary, config: &EvalConfig) -> String {
    match exclude_km(summary, config) {
        0.0 => String::new(),
        km => format!("; gallery points within {km} km of a photo's true place are left out"),
    }
}

/// The radius within which gallery points were left out; 0 if none were, or if the evaluation used no gallery.
pub(super) fn exclude_km(summary: &EvalSummary, config: &EvalConfig) -> f64 {
    if summary.head.is_some() { config.exclude_km } else { 0.0 }
}

/// The noun for the evaluated rows in the output: "simulated photos" or "photos".
pub(super) fn photo_kind(is_simulated: bool) -> &'static str {
    if is_simulated { "simulated photos" } else { "photos" }
}

/// A cell with a number, or a dash if `value` is `None`.
fn number(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.decimals$}"))
}

/// A cell with a published number. The number is shown with all its digits.
fn published(value: Option<f64>) -> String {
    let short = number(value, 1);
    match value {
        Some(value) if short.parse() != Ok(value) => value.to_string(),
        _ => short,
    }
}

impl Row {
    /// The name of the row in the text.
    fn name(&self) -> String {
        match self {
            Self::Computed(row) => row.name.clone().unwrap_or_else(|| "predictions".to_owned()),
            Self::Published(row) => format!("{} {} {}", row.about.method, row.dataset, row.about.origin.mark()),
        }
    }

    /// The published numbers; `None` in a computed row.
    fn published(&self) -> Option<&Published> {
        match self {
            Self::Computed(_) => None,
            Self::Published(row) => Some(row),
        }
    }

    /// Density and coverage.
    fn spread(&self) -> [Option<f64>; 2] {
        match self {
            Self::Computed(Computed { rating, .. }) => [rating.density, rating.coverage],
            Self::Published(row) => [row.density, row.coverage],
        }
    }

    /// The computed scores; `None` in a published row.
    fn rating(&self) -> Option<&Rating> {
        match self {
            Self::Computed(row) => Some(&row.rating),
            Self::Published(_) => None,
        }
    }
}

/// The text below the tables: LocDiff-H compared with its parts, and the number of rows in which LocDiff-H fell back to
/// LocDiff's answer.
pub(super) fn notes(rows: &[Row], differences: &[Difference], width: usize) -> String {
    let mut text = String::new();
    let names: Vec<String> = differences.iter().map(difference_name).collect();
    let within: Vec<&[Within]> = differences.iter().map(|difference| difference.within.as_slice()).collect();
    text += &paired("paired differences", &names, &within, width);
    for difference in differences.iter().filter(|difference| difference.less != BETTER_PART) {
        let is_worse = |at: &&Within| at.percent.hi < 0.0;
        let worse: Vec<String> = difference.within.iter().filter(is_worse).map(|at| at.km.to_string()).collect();
        if !worse.is_empty() {
            let part = part_name(difference.less);
            let line = format!("LocDiff-H is less accurate than {part} within {} km", worse.join(", "));
            let _ = write!(text, "\n{}\n", wrapped(&line, 2, width));
        }
    }
    let out_of_range = rows.iter().find_map(|row| match row {
        Row::Computed(row) => row.out_of_range,
        Row::Published(_) => None,
    });
    if let Some(count) = out_of_range.filter(|count| *count > 0) {
        let line = format!("LocDiff-H: in {count} rows no gallery point was in range, so LocDiff's answer is used");
        let _ = write!(text, "\n{}\n", wrapped(&line, 2, width));
    }
    text
}

/// A table of paired differences, with the heading `what`, and a table of their intervals. `within` has the differences
/// of the accuracies for each of `names`. "" if there are none.
pub(super) fn paired(what: &str, names: &[String], within: &[&[Within]], width: usize) -> String {
    let Some(first) = within.first() else { return String::new() };
    let column = |place: usize, cell: fn(Interval) -> String| TableColumn {
        heading: format!("{} km", first[place].km),
        cells: within.iter().map(|difference| cell(difference[place].percent)).collect(),
    };
    let places = 0..first.len();
    let values: Vec<TableColumn> =
        places.clone().map(|place| column(place, |interval| format!("{:+.1}", interval.value))).collect();
    let bounds: Vec<TableColumn> =
        places.map(|place| column(place, |Interval { lo, hi, .. }| format!("{lo:+.1} to {hi:+.1}"))).collect();
    let (values, bounds) = [(what, values), ("95 % intervals", bounds)]
        .map(|(first, columns)| table(first, names, &columns, width))
        .into();
    format!("\n{values}\n{bounds}")
}

/// The lines about test places near training places and gallery points.
pub(super) fn known_places(overlaps: &Overlaps, width: usize) -> String {
    let lines = overlaps.lines();
    lines.iter().fold("\n".to_owned(), |text, line| text + &wrapped(line, 2, width) + "\n")
}

/// The name of a difference in the text.
fn difference_name(difference: &Difference) -> String {
    format!("LocDiff-H minus {}", part_name(difference.less))
}

/// The name of a part of LocDiff-H in the text.
fn part_name(part: &str) -> &str {
    match part {
        part if part == Method::Locdiff.name() => "LocDiff",
        part if part == Method::RetrievalConsensus.name() => "consensus",
        part => part,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use locdiff_core::geo::{UnitVector, fibonacci_grid};
    use locdiff_core::metrics::{Bootstrap, PlaceGroups, THRESHOLDS_KM, compare, rate};

    use super::*;
    use crate::cli::Suite;
    use crate::verbs::eval::published::rows_for;

    #[test]
    fn published_numbers_keep_their_digits() {
        assert_eq!(published(Some(0.05)), "0.05");
        assert_eq!(published(Some(28.0)), "28.0");
        assert_eq!(number(Some(0.05), 2), "0.05");
        assert_eq!(number(Some(33.333_333), 1), "33.3");
        assert_eq!(published(None), "-");
    }

    fn rows(places: &[UnitVector]) -> Vec<Row> {
        let errors_km: Vec<f64> = (0..40).map(|row| f64::from(row * row) * 10.0).collect();
        let rating = rate(&errors_km, places, places, &THRESHOLDS_KM, &Bootstrap::default());
        let rating = rating.expect("there is one error per place");
        let computed = |method: Method, name: &str| {
            Row::Computed(Computed {
                method: method.name().to_owned(),
                rating: rating.clone(),
                name: Some(name.to_owned()),
                dataset: "shards/test".to_owned(),
                simulated: false,
                source: "computed",
                out_of_range: None,
                labels: Map::new(),
            })
        };
        let methods = [(Method::Retrieval, "nearest training photos"), (Method::LocdiffH, "LocDiff-H (L = 15)")];
        let rows = methods.into_iter().map(|(method, name)| computed(method, name));
        rows.chain(rows_for(Suite::Main, &THRESHOLDS_KM).into_iter().map(Row::Published)).collect()
    }

    #[test]
    fn the_ceiling_of_coverage_is_shown_where_places_repeat() {
        assert!(!text("40 photos", &THRESHOLDS_KM, &rows(&fibonacci_grid(40)), 80).contains("coverage can be at most"));
        // Of the 40 rows, 9 share one place.
        let mut truth = fibonacci_grid(32);
        truth.resize(40, truth[0]);
        let found = text("40 photos", &THRESHOLDS_KM, &rows(&truth), 80);
        assert!(found.contains("coverage can be at most 0.775, because "), "{found}");
        let Some(Row::Computed(row)) = rows(&truth).into_iter().next() else { panic!("the first row is computed") };
        let json = serde_json::to_value(row).expect("the row can be written as JSON");
        assert_eq!((&json["places"], &json["coverage_ceiling"]), (&32.into(), &0.775.into()), "{json}");
    }

    fn words(text: &str) -> BTreeSet<&str> {
        text.split_whitespace().collect()
    }

    #[test]
    fn tables_fit_the_width_and_have_the_same_numbers() {
        let rows = rows(&fibonacci_grid(40));
        let [narrow, wide] = [80, 120].map(|width| text("40 photos", &THRESHOLDS_KM, &rows, width));
        for (text, width) in [(&narrow, 80), (&wide, 120)] {
            assert!(text.lines().all(|line| line.chars().count() <= width), "wider than {width}:\n{text}");
        }
        let one = wide.lines().nth(1).expect("the table has a heading").split_whitespace().collect::<Vec<_>>();
        assert_eq!(one[one.len() - 2..], ["density", "coverage"], "{wide}");
        assert!(narrow.contains("\nother scores "), "{narrow}");
        let difference: Vec<&str> = words(&narrow).symmetric_difference(&words(&wide)).copied().collect();
        assert_eq!(difference, ["other", "scores"], "the numbers differ");
    }

    #[test]
    fn differences_name_both_methods_and_fit_the_width() {
        let errors_km = [1.0, 30.0, 500.0];
        let groups = PlaceGroups::of(&fibonacci_grid(3));
        let less = |one_km: &[f64]| {
            compare(one_km, &errors_km, &groups, &THRESHOLDS_KM, &Bootstrap::default()).expect("the lengths agree")
        };
        let found = notes(&[], &[Difference::new("locdiff", &less(&errors_km))], 80);
        assert!(found.contains("\nLocDiff-H minus LocDiff  "), "{found}");
        assert!(found.contains("+0.0 to +0.0") && found.lines().all(|line| line.len() <= 80), "{found}");
        assert!(!found.contains("less accurate"), "{found}");
        let far_km = errors_km.map(|error_km| error_km + 1000.0);
        let found = notes(&[], &[Difference::new("retrieval", &less(&far_km))], 80);
        assert!(found.contains("LocDiff-H is less accurate than retrieval within "), "{found}");
    }
}
