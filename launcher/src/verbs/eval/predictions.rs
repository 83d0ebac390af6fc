//! `eval --predictions`: scores a file of predictions with the code that also scores LocDiff.

use std::path::Path;

use locdiff_core::config::RunConfig;
use locdiff_core::metrics::Bootstrap;
use locdiff_core::predictions::{MatchedBy, PredictionScores, Truth, score_predictions};
use serde_json::{Value, json};

use super::table::{self, Computed, Row};
use super::truth::TestPlaces;
use crate::cli::Global;
use crate::error::LaunchError;
use crate::output::Output;
use crate::supervisor::Supervisor;
use crate::terminal::{width, wrapped};
use crate::verbs::paths::require_file;
use crate::verbs::resolve;

/// Scores the predictions in `file` and prints the table.
pub(super) fn run(file: &Path, global: &Global, output: Output) -> anyhow::Result<Value> {
    let resolved = resolve(global)?;
    let config = &resolved.config;
    require_file("--predictions", file)?;
    let mut supervisor = Supervisor::new()?;
    let TestPlaces { truth, is_simulated } = TestPlaces::read(config, &mut supervisor)?;
    let (source, task_file, task_config) = (truth.source.clone(), file.to_owned(), config.clone());
    let PredictionScores { matched_by, rating } =
        supervisor.compute(move || score(&task_file, &task_config, &truth))?;
    let data_line = format!("{} {} at {} places", rating.rows, table::photo_kind(is_simulated), rating.places);
    let data = json!({ "rows": rating.rows, "is_simulated": is_simulated, "source": source });
    output.print(&format!("predictions:\n  {}\ntruth:\n  {source}", file.display()));
    let rows = [Row::Computed(Computed {
        method: file.display().to_string(),
        rating,
        name: None,
        dataset: source,
        simulated: is_simulated,
        source: "computed",
        out_of_range: None,
        labels: serde_json::Map::new(),
    })];
    output.print(&table::text(&data_line, &config.eval.thresholds_km, &rows, width()));
    if matched_by == MatchedBy::Order {
        let line = "matched by order: the predictions have no ids, so row n is compared with row n of the truth";
        output.print(&wrapped(line, 2, width()));
    }
    Ok(json!({ "ok": true, "matched_by": matched_by, "data": data, "rows": rows }))
}

fn score(file: &Path, config: &RunConfig, truth: &Truth) -> anyhow::Result<PredictionScores> {
    let bootstrap = Bootstrap { seed: config.train.seed, ..Bootstrap::default() };
    let found = score_predictions(file, truth, &config.eval.thresholds_km, &bootstrap);
    Ok(found.map_err(LaunchError::reported)?)
}
