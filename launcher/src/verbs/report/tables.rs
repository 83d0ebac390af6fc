//! The tables of a report, before they become Markdown or HTML. Nothing in them is escaped.

use serde::Serialize;
use serde_json::Value;

use super::content::{ReportContent, RunFacts};

/// A table of text.
#[derive(Debug)]
pub(super) struct TextTable {
    pub(super) title: &'static str,
    /// A sentence that explains the table; may be empty.
    pub(super) note: String,
    pub(super) headings: Vec<String>,
    pub(super) rows: Vec<TextRow>,
    /// Whether the cells are text, which is aligned to the left, instead of numbers.
    pub(super) is_text: bool,
}

/// A row of a table. The first cell is the name of the row.
#[derive(Debug)]
pub(super) struct TextRow {
    pub(super) cells: Vec<TextCell>,
    pub(super) group: RowGroup,
}

/// The part of a table that a row belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RowGroup {
    /// The table has only one part.
    Whole,
    /// The rows of a run.
    Run(String),
    /// Numbers that others published, instead of computed here.
    Published,
}

/// A cell: its text and, for a number with an interval, the interval.
#[derive(Debug, Default)]
pub(super) struct TextCell {
    pub(super) text: String,
    pub(super) interval: Option<String>,
}

impl TextCell {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), interval: None }
    }
}

impl TextRow {
    /// A row with the numbers of `row`, which may be a published row.
    pub(super) fn grouped(cells: Vec<TextCell>, row: &Value) -> Self {
        Self { cells, group: if is_published(row) { RowGroup::Published } else { RowGroup::Whole } }
    }
}

const INTERVALS: &str = "Below each number is its 95 % interval, from a bootstrap over places.";

/// The results of all runs, and the published rows.
pub(super) fn results(content: &ReportContent) -> TextTable {
    let mut table = score_table("Results", &content.rows, &content.thresholds_km);
    for (shown, row) in table.rows.iter_mut().zip(&content.rows).filter(|(_, row)| !is_published(row)) {
        shown.group = group_of(content, row);
    }
    table
}

/// The accuracies and other scores of computed and published rows.
pub(super) fn score_table(title: &'static str, rows: &[Value], thresholds_km: &[f64]) -> TextTable {
    let has_published = rows.iter().any(is_published);
    let mut headings = vec!["% of photos within".to_owned()];
    headings.extend(thresholds_km.iter().map(|km| format!("{km} km")));
    headings.extend(["median km", "mean km", "GeoScore", "density", "coverage"].map(str::to_owned));
    let row = |row: &Value| {
        let published = is_published(row);
        let text = |key: &str| row[key].as_str().unwrap_or_default();
        let name = row["name"].as_str().unwrap_or(text("method"));
        let name = if published { format!("{name}, {}", text("dataset")) } else { name.to_owned() };
        let mut cells = vec![TextCell::new(name)];
        cells.extend(thresholds_km.iter().map(|km| number(row, &format!("acc_{km}km"), 1, false)));
        let others = [("median_km", 1), ("mean_km", 0), ("geo_score", 0), ("density", 3), ("coverage", 3)];
        cells.extend(others.map(|(key, decimals)| number(row, key, decimals, false)));
        TextRow::grouped(cells, row)
    };
    let published =
        if has_published { " Published rows are not computed here; they may belong to other photos." } else { "" };
    TextTable {
        title,
        note: format!("{INTERVALS}{published}"),
        headings,
        rows: rows.iter().map(row).collect(),
        is_text: false,
    }
}

/// The tables below the results. Tables without rows are left out.
pub(super) fn others(content: &ReportContent) -> Vec<TextTable> {
    let found = [between_runs(content), differences(content), settings(content), facts(content)];
    found.into_iter().filter(|table| !table.rows.is_empty()).collect()
}

/// LocDiff-H minus its parts.
fn differences(content: &ReportContent) -> TextTable {
    let name_of = |run: &Value, method: &str| {
        let row = content.rows.iter().find(|row| row["run"] == *run && row["method"] == method);
        row.and_then(|row| row["name"].as_str()).unwrap_or(method).to_owned()
    };
    let name = |row: &Value| {
        let parts = ["method", "less"].map(|key| name_of(&row["run"], row[key].as_str().unwrap_or_default()));
        format!("{} minus {}", parts[0], parts[1])
    };
    let row = |row: &Value| TextRow {
        group: group_of(content, row),
        ..difference_row(&content.thresholds_km, name(row), row)
    };
    let rows = content.differences.iter().map(row);
    difference_table("Paired differences", &content.thresholds_km, rows.collect())
}

/// Each run minus the first one.
fn between_runs(content: &ReportContent) -> TextTable {
    let rows = content.between_runs.iter().map(|row| {
        let name = format!("{}: {} minus {}", row.name, row.run, row.less);
        difference_row(&content.thresholds_km, name, &json_of(row))
    });
    difference_table("Runs compared", &content.thresholds_km, rows.collect())
}

/// A table of differences between scores on the same photos.
pub(super) fn difference_table(title: &'static str, thresholds_km: &[f64], rows: Vec<TextRow>) -> TextTable {
    let distances = thresholds_km.iter().map(|km| format!("{km} km"));
    TextTable {
        title,
        note: "Percentage points; intervals are paired, because the same photos were located.".to_owned(),
        headings: std::iter::once("difference".to_owned()).chain(distances).chain(["GeoScore".to_owned()]).collect(),
        rows,
        is_text: false,
    }
}

/// A row of a table of differences.
pub(super) fn difference_row(thresholds_km: &[f64], name: String, row: &Value) -> TextRow {
    let mut cells = vec![TextCell::new(name)];
    cells.extend(thresholds_km.iter().map(|km| number(row, &format!("acc_{km}km"), 1, true)));
    cells.push(number(row, "geo_score", 0, true));
    TextRow { cells, group: RowGroup::Whole }
}

fn settings(content: &ReportContent) -> TextTable {
    let names = content.runs.iter().map(|run| run.name.clone());
    let row = |row: &super::content::SettingRow| {
        let cells = std::iter::once(&row.key).chain(&row.values).map(TextCell::new).collect();
        TextRow { cells, group: RowGroup::Whole }
    };
    TextTable {
        title: "Settings that differ",
        note: String::new(),
        headings: std::iter::once("field".to_owned()).chain(names).collect(),
        rows: content.settings.iter().map(row).collect(),
        is_text: true,
    }
}

/// What was evaluated, one column per run.
fn facts(content: &ReportContent) -> TextTable {
    type Fact = fn(&RunFacts) -> String;
    let facts: [(&str, Fact); 11] = [
        ("folder", |run| run.folder.clone()),
        ("checkpoint", |run| run.checkpoint.clone()),
        ("training steps", |run| run.step.map(|step| step.to_string()).unwrap_or_default()),
        ("degree L", |run| run.degree.map(|degree| degree.to_string()).unwrap_or_default()),
        ("test data", |run| run.dataset.clone()),
        ("photos", |run| {
            format!("{} {}", run.photos, if run.simulated { "(simulated)" } else { "" }).trim().to_owned()
        }),
        ("places", |run| run.places.to_string()),
        ("origin", |run| run.source.clone().unwrap_or_default()),
        ("retrieval head", |run| run.head.clone().unwrap_or_default()),
        ("gallery left out within", |run| match run.exclude_km {
            Some(km) if km > 0.0 => format!("{km} km"),
            _ => String::new(),
        }),
        ("test places near training places", |run| overlap(&run.overlap["training"])),
    ];
    let row = |(name, fact): &(&str, Fact)| {
        let values: Vec<String> = content.runs.iter().map(fact).collect();
        let is_known = values.iter().any(|value| !value.is_empty());
        let cells = std::iter::once((*name).to_owned()).chain(values).map(TextCell::new).collect();
        is_known.then_some(TextRow { cells, group: RowGroup::Whole })
    };
    let names = content.runs.iter().map(|run| run.name.clone());
    TextTable {
        title: "Runs",
        note: String::new(),
        headings: std::iter::once(String::new()).chain(names).collect(),
        rows: facts.iter().filter_map(row).collect(),
        is_text: true,
    }
}

fn overlap(found: &Value) -> String {
    let count = |key: &str| found[key].as_u64();
    match (count("within_100m"), count("within_1km"), count("places")) {
        (Some(near), Some(far), Some(all)) => format!("{near} within 100 m and {far} within 1 km, of {all}"),
        _ => String::new(),
    }
}

/// How often predicted radii hold the truth. `None` if no run was calibrated.
pub(super) fn calibration(content: &ReportContent) -> Option<TextTable> {
    let rows = content.calibration.iter().flat_map(|run| {
        let name = content.runs.get(run.run).map(|run| run.name.clone()).unwrap_or_default();
        run.calibration.rows.iter().map(move |row| {
            let percent = |share: f64| format!("{:.1}", 100.0 * share);
            let interval = Some(format!("{} to {}", percent(row.lo), percent(row.hi)));
            let cells = vec![
                TextCell::new(name.clone()),
                TextCell::new(percent(row.level)),
                TextCell { text: percent(row.share), interval },
            ];
            TextRow { cells, group: RowGroup::Whole }
        })
    });
    let rows: Vec<TextRow> = rows.collect();
    (!rows.is_empty()).then(|| TextTable {
        title: "Calibration",
        note: "How often the truth is within the predicted radius.".to_owned(),
        headings: ["run", "% wanted", "% found"].map(str::to_owned).to_vec(),
        rows,
        is_text: false,
    })
}

/// The last values of the training curves. `None` if no run has any.
pub(super) fn training(content: &ReportContent) -> Option<TextTable> {
    let mut tags: Vec<&String> = content.training.iter().flat_map(|run| run.curves.keys()).collect();
    tags.retain(|tag| !tag.starts_with("train/"));
    tags.sort();
    tags.dedup();
    let last = |run: &super::content::TrainingCurves, tag: &String| {
        let (step, value) = run.curves.get(tag)?.last()?;
        Some(format!("{} (step {step})", (*value)?))
    };
    let row = |tag: &&String| {
        let values = content.training.iter().map(|run| TextCell::new(last(run, tag).unwrap_or_else(|| "-".to_owned())));
        TextRow { cells: std::iter::once(TextCell::new(*tag)).chain(values).collect(), group: RowGroup::Whole }
    };
    let names = content.training.iter().filter_map(|run| content.runs.get(run.run)).map(|run| run.name.clone());
    (!tags.is_empty()).then(|| TextTable {
        title: "Training",
        note: "The last value of each curve.".to_owned(),
        headings: std::iter::once("curve".to_owned()).chain(names).collect(),
        rows: tags.iter().map(row).collect(),
        is_text: true,
    })
}

/// The group of a row of a run. If the report is about one run, there are no groups.
fn group_of(content: &ReportContent, row: &Value) -> RowGroup {
    match row["run"].as_str() {
        Some(run) if content.runs.len() > 1 => RowGroup::Run(run.to_owned()),
        _ => RowGroup::Whole,
    }
}

fn is_published(row: &Value) -> bool {
    row["source"] == "published"
}

/// The number `key` of a row, with the interval from `key_lo` to `key_hi` if the row has one.
pub(super) fn number(row: &Value, key: &str, decimals: usize, is_signed: bool) -> TextCell {
    let text = |value: f64| if is_signed { format!("{value:+.decimals$}") } else { format!("{value:.decimals$}") };
    let Some(value) = row[key].as_f64() else { return TextCell::new("-") };
    // Published numbers keep all their digits.
    let shown = if is_published(row) && text(value).parse() != Ok(value) { value.to_string() } else { text(value) };
    let bounds = ["lo", "hi"].map(|end| row[format!("{key}_{end}")].as_f64().map(text));
    let interval = match bounds {
        [Some(lo), Some(hi)] => Some(format!("{lo} to {hi}")),
        _ => None,
    };
    TextCell { text: shown, interval }
}

fn json_of(row: &impl Serialize) -> Value {
    serde_json::to_value(row).expect("a row can be written as JSON")
}
