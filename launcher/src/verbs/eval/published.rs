//! What the paper's Table 1 says, from `table1.toml`.

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
    /// By data set, for each of [`THRESHOLDS_KM`].
    #[serde(flatten)]
    percents: BTreeMap<String, [f64; 5]>,
}

/// A method's numbers for one data set, as the paper has them.
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
    /// Percent within a distance, where the paper reports it.
    pub(super) fn within(&self, km: f64) -> Option<f64> {
        THRESHOLDS_KM.iter().position(|known| *known == km).map(|place| self.percents[place])
    }
}

fn accuracies<S: Serializer>(percents: &[f64; 5], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(THRESHOLDS_KM.iter().zip(percents).map(|(km, percent)| (format!("acc_{km}km"), percent)))
}

/// The paper's rows, or a line about why there are none: at distances that the paper does not report it has nothing to compare.
pub(super) fn beside(thresholds_km: &[f64]) -> Vec<Published> {
    if thresholds_km.iter().all(|km| THRESHOLDS_KM.contains(km)) {
        return table1();
    }
    tracing::warn!(
        "no published rows: eval.thresholds_km is {thresholds_km:?}, the paper reports {THRESHOLDS_KM:?} alone"
    );
    Vec::new()
}

/// One row for each method and data set that the paper reports, data set after data set.
fn table1() -> Vec<Published> {
    let table: Table1 = toml::from_str(TABLE1).expect("the file that is built in is TOML of this shape");
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
    fn table_of_the_paper_is_whole() {
        let rows = table1();
        let of = |dataset: &str| rows.iter().filter(|row| row.dataset == dataset).count();
        assert_eq!(["Im2GPS3k", "YFCC-26k", "GWS15k"].map(of), [10, 8, 7]);
        for row in &rows {
            let json = serde_json::to_value(row).expect("JSON");
            let accuracies: Vec<f64> =
                THRESHOLDS_KM.iter().map(|km| json[format!("acc_{km}km")].as_f64().expect("a number")).collect();
            assert!(accuracies.windows(2).all(|pair| pair[0] < pair[1]) && accuracies[4] < 100.0, "{json}");
            assert_eq!(row.within(200.0), Some(accuracies[2]));
        }
    }
}
