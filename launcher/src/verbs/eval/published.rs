//! What the paper's Table 1 says, from `table1.toml`.

use serde::Deserialize;
use serde_json::{Value, json};

/// Distances of the paper's columns, km.
pub(super) const THRESHOLDS_KM: [f64; 5] = [1.0, 25.0, 200.0, 750.0, 2500.0];

const TABLE1: &str = include_str!("table1.toml");

#[derive(Debug, Deserialize)]
struct Table1 {
    datasets: Vec<String>,
    rows: Vec<toml::Table>,
}

/// The paper's rows, or a line about why there are none: at distances that the paper does not report it has nothing to compare.
pub(super) fn beside(thresholds_km: &[f64]) -> Vec<Value> {
    if thresholds_km.iter().all(|km| THRESHOLDS_KM.contains(km)) {
        return table1();
    }
    tracing::warn!(
        "no published rows: eval.thresholds_km is {thresholds_km:?}, the paper reports {THRESHOLDS_KM:?} alone"
    );
    Vec::new()
}

/// One row for each method and data set that the paper reports, data set after data set.
fn table1() -> Vec<Value> {
    let table: Table1 = toml::from_str(TABLE1).expect("the file that is built in is TOML of this shape");
    let mut rows = Vec::new();
    for dataset in &table.datasets {
        for row in &table.rows {
            let Some(numbers) = row.get(dataset).and_then(toml::Value::as_array) else { continue };
            let method = row["method"].as_str().unwrap_or_default();
            let mut published =
                json!({ "method": method, "dataset": dataset, "source": "published", "simulated": false });
            for (threshold_km, percent) in THRESHOLDS_KM.iter().zip(numbers) {
                published[format!("acc_{threshold_km}km")] = json!(percent.as_float());
            }
            rows.push(published);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_of_the_paper_is_whole() {
        let rows = table1();
        let of = |dataset: &str| rows.iter().filter(|row| row["dataset"] == dataset).count();
        assert_eq!(["Im2GPS3k", "YFCC-26k", "GWS15k"].map(of), [10, 8, 7]);
        for row in &rows {
            let accuracies: Vec<f64> =
                THRESHOLDS_KM.iter().map(|km| row[format!("acc_{km}km")].as_f64().expect("a number")).collect();
            assert!(accuracies.windows(2).all(|pair| pair[0] < pair[1]) && accuracies[4] < 100.0, "{row}");
        }
    }
}
