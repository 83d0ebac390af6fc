//! Compares the configuration of an existing run with the configuration that is given when the run is started again.
//!
//! The fields that must not change define the model, the diffusion process, how rows are read and ordered, the
//! precision, or the number of threads. Other fields may change, and each change is reported.

use locdiff_core::config::{AutoOr, RunConfig};
use toml::{Table, Value};

/// Sections that must not change within a run.
const FIXED_SECTIONS: [&str; 2] = ["model", "diffusion"];

/// Fields outside [`FIXED_SECTIONS`] that must not change within a run. [`is_fixed`] adds the fields that name the
/// columns of the shards.
const FIXED_FIELDS: [&str; 11] = [
    "train.method",
    "train.seed",
    "train.global_batch",
    "train.threads",
    "train.precision",
    "shards.mean_views",
    "shards.tail",
    "shards.shuffle_row_groups",
    "shards.density_alpha",
    "shards.density_cell_degrees",
    "shards.on_bad_rows",
];

/// Differences between two configurations, one line per field.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Differences {
    /// Fields that must not change but did, each with the new value and the value of the run.
    pub(super) refused: Vec<String>,
    /// Fields that changed and are allowed to, each with the previous and the new value.
    pub(super) allowed: Vec<String>,
}

impl Differences {
    /// Whether the configurations are equal.
    pub(super) fn is_empty(&self) -> bool {
        self.refused.is_empty() && self.allowed.is_empty()
    }
}

/// Compares two configurations field by field. If `train.threads` is "auto" in one of them, the number of threads does
/// not count as a difference.
pub(super) fn compare(was: &RunConfig, is: &RunConfig) -> Differences {
    let mut is = is.clone();
    if [was.train.threads, is.train.threads].contains(&AutoOr::Auto) {
        is.train.threads = was.train.threads;
    }
    let mut found = Differences::default();
    for (key, was, is) in different_fields(was, &is) {
        if is_fixed(&key) && !is_automatic_width(&key, [&was, &is]) {
            found.refused.push(format!("{key} is {is}, but the run has {was}"));
        } else {
            found.allowed.push(format!("{key} changed from {was} to {is}"));
        }
    }
    found
}

/// The fields in which two configurations differ: the key, and both values.
pub fn different_fields(one: &RunConfig, other: &RunConfig) -> Vec<(String, Value, Value)> {
    let both = leaves(one).into_iter().zip(leaves(other));
    both.filter(|((_, one), (_, other))| one != other).map(|((key, one), (_, other))| (key, one, other)).collect()
}

fn is_fixed(key: &str) -> bool {
    let section = key.split('.').next().unwrap_or_default();
    let column = section == "shards" && key.ends_with("_column");
    column || FIXED_SECTIONS.contains(&section) || FIXED_FIELDS.contains(&key)
}

/// Whether the field is `model.embedding_width` and one of the values is "auto", which stands for the width of the
/// shards. Such a change is allowed, because the two widths may be equal. If they are not, loading the weights fails.
fn is_automatic_width(key: &str, values: [&Value; 2]) -> bool {
    key == "model.embedding_width" && values.iter().any(|value| value.as_str() == Some("auto"))
}

/// The dotted key and the value of every field, in the order in which the structs define the fields. If
/// `train.warmup_steps` is "auto", the resulting number of warm-up steps takes its place.
fn leaves(config: &RunConfig) -> Vec<(String, Value)> {
    let mut config = config.clone();
    config.train.warmup_steps = AutoOr::Value(config.train.warmup_steps());
    let table = Table::try_from(&config).expect("a checked configuration contains only plain TOML values");
    let mut found = Vec::new();
    for (section, fields) in table {
        for (field, value) in fields.as_table().cloned().unwrap_or_default() {
            found.push((format!("{section}.{field}"), value));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_model_order_or_bits_are_refused_and_others_reported() {
        let mut was = RunConfig::default();
        was.train.threads = AutoOr::Value(1);
        assert_eq!(compare(&was, &was), Differences::default());
        let mut is = was.clone();
        is.model.degree = 23;
        is.train.threads = AutoOr::Value(2);
        is.shards.latitude_column = "latitude".into();
        is.shards.mean_views = 3;
        is.train.learning_rate = 5e-4;
        is.parallel.workers = AutoOr::Value(8);
        let found = compare(&was, &is);
        let refused = [
            "model.degree is 23, but the run has 47",
            "train.threads is 2, but the run has 1",
            "shards.latitude_column is \"latitude\", but the run has \"lat\"",
            "shards.mean_views is 3, but the run has 1",
        ];
        assert_eq!(found.refused, refused);
        assert_eq!(found.allowed[0], "train.learning_rate changed from 0.0008 to 0.0005");
        assert_eq!(found.allowed.len(), 2, "{:?}", found.allowed);
    }

    #[test]
    fn automatic_threads_match_the_number_of_the_run() {
        let (mut was, is) = (RunConfig::default(), RunConfig::default());
        was.train.threads = AutoOr::Value(3);
        assert_eq!(compare(&was, &is), Differences::default());
    }

    #[test]
    fn automatic_warm_up_equals_its_number_of_steps() {
        let (mut was, is) = (RunConfig::default(), RunConfig::default());
        was.train.warmup_steps = AutoOr::Value(500);
        assert_eq!(compare(&was, &is), Differences::default());
        was.train.warmup_steps = AutoOr::Value(100);
        assert_eq!(compare(&was, &is).allowed, ["train.warmup_steps changed from 100 to 500"]);
    }

    #[test]
    fn fixed_fields_exist() {
        let keys: Vec<String> = leaves(&RunConfig::default()).into_iter().map(|(key, _)| key).collect();
        for key in FIXED_FIELDS {
            assert!(keys.iter().any(|known| known == key), "{key}");
        }
        assert_eq!(keys.iter().filter(|key| key.ends_with("_column") && is_fixed(key)).count(), 4);
    }

    #[test]
    fn automatic_width_matches_any_width() {
        let mut was = RunConfig::default();
        let mut is = was.clone();
        is.model.embedding_width = AutoOr::Value(512);
        assert_eq!(compare(&was, &is).refused, Vec::<String>::new());
        was.model.embedding_width = AutoOr::Value(768);
        assert_eq!(compare(&was, &is).refused, ["model.embedding_width is 512, but the run has 768"]);
    }
}
