//! `eval --predictions`: scores a file of predictions with the code that also scores LocDiff. The truth comes from the
//! file `eval.truth`. If `eval.truth` is empty, a worker reads the truth from `shards.test`.

use std::path::{Path, PathBuf};

use locdiff_core::config::RunConfig;
use locdiff_core::metrics::Bootstrap;
use locdiff_core::predictions::{MatchedBy, PredictionScores, Truth, score_predictions};
use locdiff_core::protocol::{Job, ShardsJob, TruthWritten};
use serde_json::{Value, json};

use super::table::{self, Computed, Row};
use crate::cli::Global;
use crate::error::LaunchError;
use crate::output::Output;
use crate::rendezvous::{NodeWorkers, cores};
use crate::supervisor::{Echo, Supervisor};
use crate::terminal::{width, wrapped};
use crate::verbs::locations::require_shards;
use crate::verbs::paths::require_file;
use crate::verbs::resolve;

/// Scores the predictions in `file` and prints the table.
pub(super) fn run(file: &Path, global: &Global, output: Output) -> anyhow::Result<Value> {
    let resolved = resolve(global)?;
    let config = &resolved.config;
    require_file("--predictions", file)?;
    if !config.eval.truth.is_empty() {
        require_file("eval.truth", Path::new(&config.eval.truth))?;
    }
    let mut supervisor = Supervisor::new()?;
    let folder = tempfile::tempdir().map_err(LaunchError::at(std::env::temp_dir()))?;
    let mut written = None;
    if config.eval.truth.is_empty() {
        require_shards("shards.test", &config.shards.test)?;
        let out = folder.path().join("truth.parquet");
        let job = Job::Shards(Box::new(ShardsJob::Truth { out: out.clone(), config: Box::new(config.clone()) }));
        let world = NodeWorkers::one_cpu_worker(cores());
        let found = supervisor.run::<TruthWritten>(config, &world, job, 0, &mut Echo)?;
        written = Some((out, found.first()?));
    }
    let is_simulated = written.as_ref().is_some_and(|(_, truth)| truth.is_simulated);
    let (task_file, task_config) = (file.to_owned(), config.clone());
    let (source, PredictionScores { matched_by, rating }) =
        supervisor.compute(move || score(&task_file, &task_config, written.map(|(path, _)| path)))?;
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
    })];
    output.print(&table::text(&data_line, &config.eval.thresholds_km, &rows, width()));
    if matched_by == MatchedBy::Order {
        let line = "matched by order: the predictions have no ids, so row n is compared with row n of the truth";
        output.print(&wrapped(line, 2, width()));
    }
    Ok(json!({ "ok": true, "matched_by": matched_by, "data": data, "rows": rows }))
}

/// Returns the source of the truth (a file or the location of shards), and the scores. `written` is the file to which a
/// worker wrote the truth of the test shards. It is `None` if `eval.truth` is set.
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
