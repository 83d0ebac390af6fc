//! `eval --predictions`: anybody's predictions, scored by the code that scores ours. No worker is started where `eval.truth` has the
//! truth; that of `shards.test` is read by one.

use std::path::{Path, PathBuf};

use locdiff_core::config::RunConfig;
use locdiff_core::metrics::Bootstrap;
use locdiff_core::predictions::{MatchedBy, PredictionScores, Truth, score_predictions};
use locdiff_core::protocol::{Job, ShardsJob, TruthWritten};
use serde_json::{Value, json};

use super::phase::rows_are_there;
use super::table::{self, Computed, Row};
use crate::cli::Global;
use crate::error::LaunchError;
use crate::output::Output;
use crate::rendezvous::{World, cores};
use crate::supervisor::{Echo, Supervisor};
use crate::verbs::resolve;

/// Scores the file.
pub(super) fn run(file: &Path, global: &Global, output: Output) -> anyhow::Result<Value> {
    let resolved = resolve(global)?;
    let config = &resolved.config;
    let mut supervisor = Supervisor::new()?;
    let folder = tempfile::tempdir().map_err(LaunchError::at(std::env::temp_dir()))?;
    let mut written = None;
    if config.eval.truth.is_empty() {
        rows_are_there("shards.test", &config.shards.test)?;
        let out = folder.path().join("truth.parquet");
        let job = Job::Shards(Box::new(ShardsJob::Truth { out: out.clone(), config: Box::new(config.clone()) }));
        let world = World::one_cpu_worker(cores());
        let found = supervisor.run::<TruthWritten>(config, &world, job, 0, &mut Echo)?;
        written = Some((out, found.first()?));
    }
    let is_simulated = written.as_ref().is_some_and(|(_, truth)| truth.is_simulated);
    let (task_file, task_config) = (file.to_owned(), config.clone());
    let (source, PredictionScores { matched_by, rating }) =
        supervisor.compute(move || score(&task_file, &task_config, written.map(|(path, _)| path)))?;
    let words = format!("{} {} ({source})", rating.rows, table::photos(is_simulated));
    let data = json!({ "rows": rating.rows, "is_simulated": is_simulated, "source": source });
    let rows = [Row::Computed(Computed {
        method: file.display().to_string(),
        rating,
        name: None,
        dataset: source,
        simulated: is_simulated,
        source: "computed",
        out_of_range: None,
    })];
    let mut text = table::text(&words, &config.eval.thresholds_km, &rows);
    if matched_by == MatchedBy::Order {
        text.push_str("matched by order: the predictions have no ids, and row n is taken for row n of the truth\n");
    }
    output.people(&text);
    Ok(json!({ "ok": true, "matched_by": matched_by, "data": data, "rows": rows }))
}

/// What the predictions were compared with, and the scores. `written` is what a worker has written of the test shards, where
/// `eval.truth` is not set.
fn score(file: &Path, config: &RunConfig, written: Option<PathBuf>) -> anyhow::Result<(String, PredictionScores)> {
    let truth = match written {
        None => Truth::read(Path::new(&config.eval.truth)),
        Some(path) => Truth::read_as(config.shards.test.clone(), &path),
    };
    let truth = truth.map_err(LaunchError::reported)?;
    let bootstrap = Bootstrap { seed: config.train.seed, ..Bootstrap::default() };
    let found = score_predictions(file, &truth, &config.eval.thresholds_km, &bootstrap);
    Ok((truth.source, found.map_err(LaunchError::reported)?))
}
