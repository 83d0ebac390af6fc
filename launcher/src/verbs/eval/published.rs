//! Published results, from `published.toml`. They stand beside the computed rows of a suite.

use std::collections::{BTreeMap, BTreeSet};

use locdiff_core::metrics::THRESHOLDS_KM;
use serde::{Deserialize, Serialize, Serializer};

use crate::cli::Suite;

const PUBLISHED: &str = include_str!("published.toml");

#[derive(Debug, Deserialize)]
struct PublishedFile {
    /// The data sets, in the order of the rows.
    datasets: Vec<String>,
    /// The results of each suite, by its name.
    #[serde(flatten)]
    suites: BTreeMap<String, Vec<PublishedEntry>>,
}

/// The published numbers of a method on one or more data sets.
#[derive(Debug, Deserialize)]
struct PublishedEntry {
    #[serde(flatten)]
    about: PublishedMethod,
    /// For each data set, the percentages of photos located within the distances [`THRESHOLDS_KM`], perhaps followed by
    /// density and coverage.
    #[serde(flatten)]
    numbers: BTreeMap<String, Vec<f64>>,
}

/// The method, and where its numbers come from.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct PublishedMethod {
    pub(super) method: String,
    #[serde(default)]
    pub(super) origin: PublishedIn,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) note: Option<String>,
    /// "gallery", which is GeoCLIP's gallery of MP16 places, or "grid".
    #[serde(skip_serializing_if = "Option::is_none")]
    gallery: Option<String>,
    /// Number of points of the gallery.
    #[serde(skip_serializing_if = "Option::is_none")]
    points: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    degree: Option<u32>,
}

/// Where numbers were published.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum PublishedIn {
    /// In the paper.
    #[default]
    Paper,
    /// In the paper, but the numbers look like shares of photos in the right city, region or country.
    PaperRegions,
    /// By the authors of the method.
    Elsewhere,
    /// By others, who quote the authors of the method.
    SecondHand,
}

impl PublishedIn {
    /// The mark of a row in the text.
    pub(super) fn mark(self) -> &'static str {
        match self {
            Self::Paper => "*",
            Self::PaperRegions => "*r",
            Self::Elsewhere => "**",
            Self::SecondHand => "***",
        }
    }

    fn meaning(self) -> &'static str {
        match self {
            Self::Paper => "published in the paper",
            Self::PaperRegions => {
                "published in the paper, but probably the share in the right city, region or country, not within a \
                 distance"
            }
            Self::Elsewhere => "published by its authors, not in the paper",
            Self::SecondHand => "not in the paper, and quoted second hand",
        }
    }
}

/// The published numbers of a method on one data set.
#[derive(Debug, Serialize)]
pub(super) struct Published {
    #[serde(flatten)]
    pub(super) about: PublishedMethod,
    pub(super) dataset: String,
    source: &'static str,
    simulated: bool,
    #[serde(flatten, serialize_with = "accuracies")]
    percents: [Option<f64>; 5],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) density: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) coverage: Option<f64>,
}

impl Published {
    /// The percentage of photos located within a distance. `None` if it was not published.
    pub(super) fn within(&self, km: f64) -> Option<f64> {
        THRESHOLDS_KM.iter().position(|known| *known == km).and_then(|place| self.percents[place])
    }
}

fn accuracies<S: Serializer>(percents: &[Option<f64>; 5], serializer: S) -> Result<S::Ok, S::Error> {
    let known = THRESHOLDS_KM.iter().zip(percents).filter_map(|(km, percent)| Some((km, (*percent)?)));
    serializer.collect_map(known.map(|(km, percent)| (format!("acc_{km}km"), percent)))
}

/// The lines below a table with published rows: what the marks mean, and the notes.
pub(super) fn footnotes(rows: &[&Published]) -> Vec<String> {
    let origins: BTreeSet<PublishedIn> = rows.iter().map(|row| row.about.origin).collect();
    let marks = origins.into_iter().map(|origin| format!("{} {}", origin.mark(), origin.meaning()));
    let note = |row: &&Published| Some(format!("{} {}: {}", row.about.method, row.dataset, row.about.note.as_ref()?));
    marks.chain(rows.iter().filter_map(note)).collect()
}

/// The published rows of a suite. If `thresholds_km` contains a distance at which no accuracies are published, logs a
/// warning and returns no rows.
pub(super) fn rows_for(suite: Suite, thresholds_km: &[f64]) -> Vec<Published> {
    if thresholds_km.iter().all(|km| THRESHOLDS_KM.contains(km)) {
        return rows(suite);
    }
    tracing::warn!(
        "published rows are left out: eval.thresholds_km is {thresholds_km:?}, but accuracies are published only for \
         {THRESHOLDS_KM:?}"
    );
    Vec::new()
}

/// One row for each combination of method and data set, ordered by data set.
fn rows(suite: Suite) -> Vec<Published> {
    let file: PublishedFile = toml::from_str(PUBLISHED).expect("the embedded file is valid");
    let entries = file.suites.get(suite.name()).map_or(&[][..], Vec::as_slice);
    let mut rows = Vec::new();
    for dataset in &file.datasets {
        for PublishedEntry { about, numbers } in entries {
            let Some(numbers) = numbers.get(dataset) else { continue };
            let number = |place: usize| numbers.get(place).copied().filter(|number| !number.is_nan());
            rows.push(Published {
                about: about.clone(),
                dataset: dataset.clone(),
                source: "published",
                simulated: false,
                percents: std::array::from_fn(number),
                density: number(5),
                coverage: number(6),
            });
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_tables_are_complete_and_increasing() {
        let of = |suite: Suite, dataset: &str| rows(suite).iter().filter(|row| row.dataset == dataset).count();
        assert_eq!(["Im2GPS3k", "YFCC-26k", "YFCC-4k", "GWS15k"].map(|set| of(Suite::Main, set)), [14, 8, 2, 7]);
        assert_eq!(["YFCC-4k", "OSV-5M"].map(|set| of(Suite::Generative, set)), [7, 6]);
        let others = [Suite::Generalizability, Suite::Losses, Suite::Degree];
        assert_eq!(others.map(|suite| of(suite, "Im2GPS3k")), [10, 4, 4]);
        for row in [Suite::Main, Suite::Generative].into_iter().chain(others).flat_map(rows) {
            let json = serde_json::to_value(&row).expect("the row can be written as JSON");
            let known: Vec<f64> = THRESHOLDS_KM.iter().filter_map(|km| row.within(*km)).collect();
            assert!(known.windows(2).all(|pair| pair[0] < pair[1]) && known.len() > 2 && known[2] < 100.0, "{json}");
            assert_eq!(json["acc_200km"].as_f64(), row.within(200.0), "{json}");
            assert_eq!(json.get("acc_1km").and_then(|found| found.as_f64()), row.within(1.0), "{json}");
        }
    }

    #[test]
    fn marks_tell_where_numbers_were_published() {
        let generative = rows(Suite::Generative);
        let regions = |row: &&Published| row.about.origin == PublishedIn::PaperRegions;
        assert!(generative.iter().filter(regions).all(|row| row.dataset == "OSV-5M"));
        let own = generative.iter().find(|row| row.dataset == "OSV-5M" && row.within(2500.0).is_some());
        let own = own.expect("the paper has its own row");
        assert_eq!((own.about.origin, own.density, own.coverage), (PublishedIn::Paper, Some(0.795), Some(0.572)));
        let main = rows(Suite::Main);
        let lines = footnotes(&main.iter().collect::<Vec<_>>());
        assert_eq!(lines[..3].iter().filter_map(|line| line.split(' ').next()).collect::<Vec<_>>(), ["*", "**", "***"]);
        assert!(lines.contains(&"GeoSearch 2026 Im2GPS3k: searches the web".to_owned()), "{lines:?}");
    }
}
