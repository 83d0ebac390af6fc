//! Table 1 of the paper, from `table1.toml`.

use std::collections::BTreeMap;

use locdiff_core::metrics::THRESHOLDS_KM;
use serde::{Deserialize, Serialize, Serializer};

const TABLE1: &str = include_str!("table1.toml");

#[derive(Debug, Deserialize)]
struct Table1 {
    datasets: Vec<String>,
    rows: Vec<Table1Row>,
}

#[derive(Debug, Deserialize)]
struct Table1Row {
    method: String,
    /// For each data set, the percentages of photos located within the distances [`THRESHOLDS_KM`].
    #[serde(flatten)]
    percents: BTreeMap<String, [f64; 5]>,
}

/// The published numbers of a method on one data set.
#[derive(Debug, Serialize)]
pub(super) struct Published {
    pub(super) method: String,
    pub(super) dataset: String,
    source: &'static str,
    simulated: bool,
    #[serde(flatten, serialize_with = "accuracies")]
    percents: [f64; 5],
}

impl Published {
    /// The percentage of photos located within a distance. `None` if the paper does not report this distance.
    pub(super) fn within(&self, km: f64) -> Option<f64> {
        THRESHOLDS_KM.iter().position(|known| *known == km).map(|place| self.percents[place])
    }
}

fn accuracies<S: Serializer>(percents: &[f64; 5], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(THRESHOLDS_KM.iter().zip(percents).map(|(km, percent)| (format!("acc_{km}km"), percent)))
}

/// The rows of Table 1. If `thresholds_km` contains a distance that the paper does not report, logs a warning and
/// returns no rows.
pub(super) fn rows_for(thresholds_km: &[f64]) -> Vec<Published> {
    if thresholds_km.iter().all(|km| THRESHOLDS_KM.contains(km)) {
        return table1();
    }
    tracing::warn!(
        "published rows are left out: eval.thresholds_km is {thresholds_km:?}, but the paper reports only \
         {THRESHOLDS_KM:?}"
    );
    Vec::new()
}

/// One row for each combination of method and data set that the paper reports, ordered by data set.
fn table1() -> Vec<Published> {
    let table: Table1 = toml::from_str(TABLE1).expect("the embedded table is valid");
    let mut rows = Vec::new();
    for dataset in &table.datasets {
        for row in &table.rows {
            let Some(percents) = row.percents.get(dataset).copied() else { continue };
            let (method, dataset) = (row.method.clone(), dataset.clone());
            rows.push(Published { method, dataset, source: "published", simulated: false, percents });
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_of_the_paper_is_complete_and_increasing() {
        let rows = table1();
        let of = |dataset: &str| rows.iter().filter(|row| row.dataset == dataset).count();
        assert_eq!(["Im2GPS3k", "YFCC-26k", "GWS15k"].map(of), [10, 8, 7]);
        for row in &rows {
            let json = serde_json::to_value(row).expect("the row can be written as JSON");
            let accuracies: Vec<f64> =
                THRESHOLDS_KM.iter().map(|km| json[format!("acc_{km}km")].as_f64().expect("it is a number")).collect();
            assert!(accuracies.windows(2).all(|pair| pair[0] < pair[1]) && accuracies[4] < 100.0, "{json}");
            assert_eq!(row.within(200.0), Some(accuracies[2]));
        }
    }
}
