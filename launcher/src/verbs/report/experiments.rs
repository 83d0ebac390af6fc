//! The tables of the paper's experiments.

use serde_json::Value;

use super::content::thresholds_of;
use super::source::SuiteResult;
use super::tables::{TextCell, TextRow, TextTable, difference_row, difference_table, number, score_table};
use crate::cli::Suite;

/// A column of a table: its heading, the key of its values, and the number of decimal places.
type NumberColumn = (&'static str, &'static str, usize);

/// The table of the experiment, and the table of differences if there are any.
pub(super) fn experiment_tables(result: &SuiteResult) -> Vec<TextTable> {
    let title = match result.suite {
        Suite::Main => "Accuracy",
        Suite::Generative => "Density and coverage",
        Suite::Generalizability => "Gallery and grids",
        Suite::GalleryBias => "Gallery points near the test places",
        Suite::Perturbation => "Drift of a noisy code",
        Suite::Losses => "Training losses",
        Suite::Degree => "Degree",
        Suite::Time => "Time to locate an image",
    };
    let columns: &[NumberColumn] = match result.suite {
        Suite::GalleryBias => &[
            ("within km", "radius_km", 0),
            ("n", "min_count", 0),
            ("% with at least n", "percent_at_least", 2),
            ("% with more than n", "percent_more_than", 2),
            ("% counted as in the paper", "percent", 2),
        ],
        Suite::Perturbation => &[
            ("L", "degree", 0),
            ("drift, km", "drift_km", 2),
            ("in theory, km", "theory_km", 2),
            ("standard error, km", "standard_error_km", 2),
        ],
        Suite::Time => &[("steps", "steps", 0), ("s per image", "s_per_image", 6)],
        _ => return score_tables(result, title),
    };
    let first = |row: &Value| match result.suite {
        Suite::GalleryBias => row["points"].as_str().unwrap_or_default().to_owned(),
        Suite::Time => row["operation"].as_str().unwrap_or_default().to_owned(),
        _ => "LocDiff".to_owned(),
    };
    let row = |row: &Value| {
        let cells = columns.iter().map(|(_, key, decimals)| number(row, key, *decimals, false));
        TextRow::grouped(std::iter::once(TextCell::new(first(row))).chain(cells).collect(), row)
    };
    let headings = std::iter::once("").chain(columns.iter().map(|(heading, _, _)| *heading));
    vec![TextTable {
        title,
        note: String::new(),
        headings: headings.map(str::to_owned).collect(),
        rows: result.rows.iter().map(row).collect(),
        is_text: false,
    }]
}

fn score_tables(result: &SuiteResult, title: &'static str) -> Vec<TextTable> {
    let thresholds_km = result.rows.iter().map(thresholds_of).find(|found| !found.is_empty()).unwrap_or_default();
    let mut tables = vec![score_table(title, &result.rows, &thresholds_km)];
    let name_of = |method: &Value| {
        let row = result.rows.iter().find(|row| row["method"] == *method);
        row.and_then(|row| row["name"].as_str()).or(method.as_str()).unwrap_or_default().to_owned()
    };
    let name = |row: &Value| match row["points"].as_u64() {
        Some(points) => {
            format!("{}: grid of {points} points minus gallery", row["method"].as_str().unwrap_or_default())
        }
        None => format!("{} minus {}", name_of(&row["method"]), name_of(&row["less"])),
    };
    if !result.differences.is_empty() {
        let rows = result.differences.iter().map(|row| difference_row(&thresholds_km, name(row), row));
        tables.push(difference_table("Paired differences", &thresholds_km, rows.collect()));
    }
    tables
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::LaunchError;

    fn read(text: &str) -> Result<SuiteResult, LaunchError> {
        let folder = tempfile::tempdir().expect("there is a folder for temporary files");
        let path = folder.path().join("result.json");
        std::fs::write(&path, text).expect("the file can be written");
        SuiteResult::read(&path)
    }

    #[test]
    fn rows_become_tables_with_published_rows_apart() {
        let found = read(
            "a line before\n{\"suite\":\"time\",\"rows\":[{\"operation\":\"sampling\",\"steps\":20,\"s_per_image\":0.25,\
             \"source\":\"computed\"},{\"operation\":\"retrieval\",\"s_per_image\":0.5,\"source\":\"published\"}]}\n\n",
        );
        let tables = experiment_tables(&found.expect("the file is a result"));
        let cells = |row: usize| tables[0].rows[row].cells.iter().map(|cell| cell.text.clone()).collect::<Vec<_>>();
        assert_eq!(cells(0), ["sampling", "20", "0.250000"]);
        assert_eq!(cells(1), ["retrieval", "-", "0.500000"]);
        assert_ne!(tables[0].rows[0].group, tables[0].rows[1].group);
    }

    #[test]
    fn scores_and_differences_become_two_tables() {
        let found = read(
            "{\"suite\":\"generalizability\",\"rows\":[{\"method\":\"locdiff\",\"name\":\"LocDiff\",\"acc_1km\":1.5,\
             \"acc_25km\":2.5}],\"differences\":[{\"method\":\"locdiff\",\"points\":21000,\"less\":\"gallery\",\
             \"acc_1km\":-0.5,\"acc_25km\":0.25}]}",
        );
        let tables = experiment_tables(&found.expect("the file is a result"));
        assert_eq!(tables[0].headings[1..3], ["1 km", "25 km"]);
        assert_eq!(tables[1].rows[0].cells[0].text, "locdiff: grid of 21000 points minus gallery");
        assert_eq!(tables[1].rows[0].cells[1].text, "-0.5");
    }

    #[test]
    fn other_files_are_refused_with_the_reason() {
        for (text, reason) in [
            ("", "not JSON"),
            ("{\"rows\":[{}]}", "no known suite"),
            ("{\"suite\":\"unknown\",\"rows\":[{}]}", "no known suite"),
            ("{\"suite\":\"time\"}", "no rows"),
        ] {
            let error = read(text).expect_err("the file is not a result").to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
