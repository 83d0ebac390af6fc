//! The results of the paper's experiments, from files with the output of `eval --suite NAME --json`.

use std::path::Path;

use clap::ValueEnum as _;
use serde::Serialize;
use serde_json::Value;

use super::content::thresholds_of;
use super::tables::{TextCell, TextRow, TextTable, difference_row, difference_table, number, score_table};
use crate::cli::Suite;
use crate::error::{LaunchError, reported};

/// The result of an experiment.
#[derive(Debug, Serialize)]
pub(super) struct SuiteResult {
    #[serde(serialize_with = "as_name")]
    suite: Suite,
    rows: Vec<Value>,
    differences: Vec<Value>,
}

fn as_name<S: serde::Serializer>(suite: &Suite, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(suite.name())
}

/// A column of a table: its heading, the key of its values, and the number of decimal places.
type NumberColumn = (&'static str, &'static str, usize);

impl SuiteResult {
    /// Reads the last line of a file, which is the JSON result of the command.
    pub(super) fn read(path: &Path) -> Result<Self, LaunchError> {
        let text = std::fs::read_to_string(path).map_err(LaunchError::at(path))?;
        let line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        let wanted = "wanted the output of `eval --suite NAME --json`";
        let bad = |reason: String| reported!(BadData, "--experiment {}: {reason}; {wanted}", path.display());
        let found: Value =
            serde_json::from_str(line).map_err(|error| bad(format!("its last line is not JSON ({error})")))?;
        let suite = found["suite"].as_str().and_then(|name| Suite::from_str(name, false).ok());
        let suite = suite.ok_or_else(|| bad("it names no known suite".to_owned()))?;
        let list = |key: &str| found[key].as_array().cloned().unwrap_or_default();
        let (rows, differences) = (list("rows"), list("differences"));
        if rows.is_empty() {
            return Err(bad("it has no rows".to_owned()));
        }
        Ok(Self { suite, rows, differences })
    }

    /// The table of the experiment, and the table of differences if there are any.
    pub(super) fn tables(&self) -> Vec<TextTable> {
        let title = match self.suite {
            Suite::Main => "Accuracy",
            Suite::Generative => "Density and coverage",
            Suite::Generalizability => "Gallery and grids",
            Suite::GalleryBias => "Gallery points near the test places",
            Suite::Perturbation => "Drift of a noisy code",
            Suite::Losses => "Training losses",
            Suite::Degree => "Degree",
            Suite::Time => "Time to locate an image",
        };
        let columns: &[NumberColumn] = match self.suite {
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
            _ => return self.score_tables(title),
        };
        let first = |row: &Value| match self.suite {
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
            rows: self.rows.iter().map(row).collect(),
            is_text: false,
        }]
    }

    fn score_tables(&self, title: &'static str) -> Vec<TextTable> {
        let thresholds_km = self.rows.iter().map(thresholds_of).find(|found| !found.is_empty()).unwrap_or_default();
        let mut tables = vec![score_table(title, &self.rows, &thresholds_km)];
        let name_of = |method: &Value| {
            let row = self.rows.iter().find(|row| row["method"] == *method);
            row.and_then(|row| row["name"].as_str()).or(method.as_str()).unwrap_or_default().to_owned()
        };
        let name = |row: &Value| match row["points"].as_u64() {
            Some(points) => {
                format!("{}: grid of {points} points minus gallery", row["method"].as_str().unwrap_or_default())
            }
            None => format!("{} minus {}", name_of(&row["method"]), name_of(&row["less"])),
        };
        if !self.differences.is_empty() {
            let rows = self.differences.iter().map(|row| difference_row(&thresholds_km, name(row), row));
            tables.push(difference_table("Paired differences", &thresholds_km, rows.collect()));
        }
        tables
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let tables = found.expect("the file is a result").tables();
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
        let tables = found.expect("the file is a result").tables();
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
