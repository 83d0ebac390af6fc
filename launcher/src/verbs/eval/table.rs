//! The table for people: a line of values and, where they are known, a line of intervals for each row.

use std::fmt::Write as _;

use locdiff_core::config::{RetrievalHead, RunConfig};
use locdiff_core::protocol::{EvalSummary, Method};
use serde_json::{Value, json};

use super::gather::Gather;

/// Width of the first column.
const NAME: usize = 30;

/// A column: its heading, the key of its number, decimals.
struct Column {
    heading: String,
    key: String,
    decimals: usize,
}

/// What was computed, with what it was computed on.
pub(super) fn computed(rows: &Value, summary: &EvalSummary, gather: &Gather, config: &RunConfig) -> Vec<Value> {
    let mut found = rows.as_array().cloned().unwrap_or_default();
    for row in &mut found {
        let method = serde_json::from_value::<Method>(row["method"].clone()).unwrap_or(Method::Locdiff);
        row["name"] = json!(name(method, summary));
        row["dataset"] = json!(config.shards.test);
        row["simulated"] = json!(summary.is_simulated);
        row["source"] = json!("computed");
        if method == Method::LocdiffH {
            row["out_of_range"] = json!(gather.rows().filter(|row| row.out_of_range).count());
        }
    }
    found
}

fn name(method: Method, summary: &EvalSummary) -> String {
    match (method, summary.head) {
        (Method::Retrieval, Some(RetrievalHead::Knn)) => "nearest training photos".to_owned(),
        (Method::Retrieval, _) => "GeoCLIP retrieval".to_owned(),
        (Method::Locdiff, _) => format!("LocDiff (L = {})", summary.degree),
        (Method::LocdiffH, _) => format!("LocDiff-H (L = {})", summary.degree),
    }
}

fn columns(row: Option<&Value>) -> Vec<Column> {
    let column = |heading: &str, key: &str, decimals| Column { heading: heading.into(), key: key.into(), decimals };
    let keys = row.and_then(Value::as_object).into_iter().flatten().map(|(key, _)| key);
    let accuracy = |key: &String| {
        let km = key.strip_prefix("acc_")?.strip_suffix("km")?;
        Some(column(&format!("{km} km %"), key, 1))
    };
    let mut found: Vec<Column> = keys.filter_map(accuracy).collect();
    found.extend([column("median km", "median_km", 1), column("mean km", "mean_km", 0)]);
    found.extend([
        column("GeoScore", "geo_score", 0),
        column("density", "density", 3),
        column("coverage", "coverage", 3),
    ]);
    found
}

/// The whole result as people read it.
pub(super) fn text(result: &Value) -> String {
    let rows = result["rows"].as_array().cloned().unwrap_or_default();
    let columns = columns(rows.first());
    let mut text = data_words(&result["data"]) + "\n";
    let _ = write!(text, "{:<NAME$}", "method");
    for column in &columns {
        let _ = write!(text, " {:>11}", column.heading);
    }
    let _ = writeln!(text, "  source");
    for row in &rows {
        write_row(&mut text, row, &columns);
    }
    if result["matched_by"] == "order" {
        text.push_str("matched by order: the predictions have no ids, and row n is taken for row n of the truth\n");
    }
    write_notes(&mut text, &rows, &result["differences"]);
    text
}

/// What was evaluated.
pub(super) fn data_words(data: &Value) -> String {
    let kind = if data["is_simulated"] == true { "simulated photos" } else { "photos" };
    let source = data["source"].as_str().map_or_else(String::new, |source| format!(" ({source})"));
    let views = data["views"].as_u64().map_or_else(String::new, |views| format!(" of {views} views"));
    let skipped = match data["skipped_rows"].as_u64().unwrap_or_default() {
        0 => String::new(),
        skipped => format!("; {skipped} rows that cannot be used are left out"),
    };
    format!("{} {kind}{views}{source}{skipped}", data["rows"])
}

fn write_row(text: &mut String, row: &Value, columns: &[Column]) {
    let dataset = if row["source"] == "published" { row["dataset"].as_str().unwrap_or_default() } else { "" };
    let name = row["name"].as_str().or_else(|| row["method"].as_str()).unwrap_or_default();
    let _ = write!(text, "{:<NAME$}", format!("{name} {dataset}"));
    for Column { key, decimals, .. } in columns {
        let cell = row[key].as_f64().map_or_else(|| "-".to_owned(), |value| number(value, *decimals, &row["source"]));
        let _ = write!(text, " {cell:>11}");
    }
    let simulated = if row["simulated"] == true { ", simulated" } else { "" };
    let _ = writeln!(text, "  {}{simulated}", row["source"].as_str().unwrap_or_default());
    if columns.iter().all(|column| bounds(row, &column.key).is_none()) {
        return;
    }
    let _ = write!(text, "{:<NAME$}", "");
    for Column { key, decimals, .. } in columns {
        let cell = bounds(row, key).map_or_else(String::new, |(lo, hi)| format!("{lo:.decimals$}-{hi:.decimals$}"));
        let _ = write!(text, " {cell:>11}");
    }
    let _ = writeln!(text, "  95 % interval");
}

/// A number with so many decimals; what was published has at least as many as were published.
fn number(value: f64, decimals: usize, source: &Value) -> String {
    let rounded = format!("{value:.decimals$}");
    if source == "published" && rounded.parse() != Ok(value) { value.to_string() } else { rounded }
}

fn bounds(row: &Value, key: &str) -> Option<(f64, f64)> {
    let bound = |end: &str| row[format!("{key}_{end}")].as_f64();
    bound("lo").zip(bound("hi"))
}

/// How LocDiff-H compares with its parts, and how often it had nothing to say.
fn write_notes(text: &mut String, rows: &[Value], differences: &Value) {
    for row in differences.as_array().into_iter().flatten() {
        let less = row["less"].as_str().unwrap_or_default();
        let _ = write!(text, "LocDiff-H less {less}, paired:");
        for (km, key) in row.as_object().into_iter().flatten().filter_map(|(key, _)| {
            let km = key.strip_prefix("acc_")?.strip_suffix("km")?;
            Some((km, key))
        }) {
            let (lo, hi) = bounds(row, key).unwrap_or((f64::NAN, f64::NAN));
            let value = row[key].as_f64().unwrap_or(f64::NAN);
            let _ = write!(text, "  {km} km {value:+.1} ({lo:+.1} to {hi:+.1})");
        }
        let _ = writeln!(text);
    }
    let out_of_range = rows.iter().find_map(|row| row["out_of_range"].as_u64());
    if let Some(count) = out_of_range {
        let _ = writeln!(text, "LocDiff-H: in {count} rows no gallery point was in range and LocDiff's answer stands");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_numbers_keep_their_digits() {
        let (published, computed) = (json!("published"), json!("computed"));
        assert_eq!(number(0.05, 1, &published), "0.05");
        assert_eq!(number(28.0, 1, &published), "28.0");
        assert_eq!(number(0.05, 2, &computed), "0.05");
        assert_eq!(number(33.333_333, 1, &computed), "33.3");
    }

    #[test]
    fn predictions_that_were_matched_by_order_are_said_to_be() {
        let result = |matched_by: &str| json!({ "matched_by": matched_by, "data": { "rows": 2 }, "rows": [] });
        assert!(text(&result("order")).contains("matched by order"));
        assert!(!text(&result("id")).contains("matched by order"));
    }
}
