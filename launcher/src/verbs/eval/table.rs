//! The table for people: a line of values and, where they are known, a line of intervals for each row.

use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::protocol::EvalSummary;

/// What was computed, with what it was computed on.
pub(super) fn computed(rows: &Value, summary: &EvalSummary, dataset: &str) -> Vec<Value> {
    let mut found = rows.as_array().cloned().unwrap_or_default();
    for row in &mut found {
        row["dataset"] = json!(dataset);
        row["simulated"] = json!(summary.is_simulated);
        row["source"] = json!("computed");
    }
    found
}

/// Columns: heading, key, decimals.
fn columns(rows: &[Value]) -> Vec<(String, String, usize)> {
    let keys = rows.first().and_then(Value::as_object).into_iter().flatten().map(|(key, _)| key.clone());
    let is_accuracy = |key: &String| key.starts_with("acc_") && key.ends_with("km");
    let mut found: Vec<_> = keys
        .filter(is_accuracy)
        .map(|key| {
            let km = key.trim_start_matches("acc_").trim_end_matches("km");
            (format!("{km} km %"), key.clone(), 1)
        })
        .collect();
    let more = [("median km", "median_km", 1), ("mean km", "mean_km", 0), ("GeoScore", "geo_score", 0)];
    found.extend(more.map(|(heading, key, decimals)| (heading.to_owned(), key.to_owned(), decimals)));
    found.extend(
        [("density", "density", 3), ("coverage", "coverage", 3)].map(|(a, b, c)| (a.to_owned(), b.to_owned(), c)),
    );
    found
}

/// The whole result as people read it.
pub(super) fn text(result: &Value) -> String {
    let rows = result["rows"].as_array().cloned().unwrap_or_default();
    let columns = columns(&rows);
    let mut text = heading(&result["data"]);
    let _ = write!(text, "{:<28}", "method");
    for (heading, _, _) in &columns {
        let _ = write!(text, " {heading:>11}");
    }
    let _ = writeln!(text, "  source");
    for row in &rows {
        write_row(&mut text, row, &columns);
    }
    text
}

fn heading(data: &Value) -> String {
    let kind = if data["is_simulated"] == true { "simulated photos" } else { "photos" };
    let source = data["source"].as_str().map_or_else(String::new, |source| format!(" ({source})"));
    let skipped = match data["skipped_rows"].as_u64().unwrap_or_default() {
        0 => String::new(),
        skipped => format!("; {skipped} rows that cannot be used are left out"),
    };
    format!("{} {kind} of {} views{source}{skipped}\n", data["rows"], data["views"])
}

fn write_row(text: &mut String, row: &Value, columns: &[(String, String, usize)]) {
    let dataset = if row["source"] == "published" { row["dataset"].as_str().unwrap_or_default() } else { "" };
    let name = format!("{} {dataset}", row["method"].as_str().unwrap_or_default());
    let _ = write!(text, "{name:<28}");
    for (_, key, decimals) in columns {
        let cell = row[key].as_f64().map_or_else(|| "-".to_owned(), |value| format!("{value:.decimals$}"));
        let _ = write!(text, " {cell:>11}");
    }
    let simulated = if row["simulated"] == true { ", simulated" } else { "" };
    let _ = writeln!(text, "  {}{simulated}", row["source"].as_str().unwrap_or_default());
    let bound = |key: &str, end: &str| row[format!("{key}_{end}")].as_f64();
    if columns.iter().all(|(_, key, _)| bound(key, "lo").is_none()) {
        return;
    }
    let _ = write!(text, "{:<28}", "");
    for (_, key, decimals) in columns {
        let cell = match (bound(key, "lo"), bound(key, "hi")) {
            (Some(lo), Some(hi)) => format!("{lo:.decimals$}-{hi:.decimals$}"),
            _ => String::new(),
        };
        let _ = write!(text, " {cell:>11}");
    }
    let _ = writeln!(text, "  95 %");
}
