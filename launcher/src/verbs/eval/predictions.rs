//! `eval --predictions`: anybody's predictions, scored by the code that scores ours. No worker is started where `eval.truth` has the
//! truth; that of `shards.test` is read by one.

use std::path::{Path, PathBuf};

use locdiff_core::config::RunConfig;
use locdiff_core::metrics::Bootstrap;
use locdiff_core::predictions::{MatchedBy, PredictionScores, Truth, score_predictions};
use locdiff_core::protocol::{Job, ShardsJob, TruthWritten};
use serde::Serialize;
use serde_json::Value;

use super::phase::rows_are_there;
use super::table::{self, Computed, Row};
use crate::cli::Global;
use crate::error::LaunchError;
use crate::output::Output;
use crate::rendezvous::{World, cores};
use crate::supervisor::{Echo, Supervisor};
use crate::verbs::{resolve, run_attempt};

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Found {
    ok: bool,
    matched_by: MatchedBy,
    data: Data,
    rows: [Row; 1],
}

/// What the predictions were compared with.
#[derive(Debug, Serialize)]
struct Data {
    rows: usize,
    is_simulated: bool,
    source: String,
}

/// Scores the file.
pub(super) fn run(file: &Path, global: &Global, output: Output) -> anyhow::Result<Value> {
    let resolved = resolve(global)?;
    let config = &resolved.config;
    let mut supervisor = Supervisor::new()?;
    let folder = tempfile::tempdir().map_err(|error| LaunchError::Io { path: std::env::temp_dir(), error })?;
    let mut written = None;
    if config.eval.truth.is_empty() {
        rows_are_there("shards.test", &config.shards.test)?;
        let out = folder.path().join("truth.parquet");
        let job = Job::Shards(Box::new(ShardsJob::Truth { out: out.clone(), config: config.clone() }));
        let world = World::one_cpu_worker(cores());
        let found = run_attempt::<TruthWritten>(&mut supervisor, &resolved, &world, job, 0, &mut Echo)?;
        written = Some((out, found.first()?));
    }
    let is_simulated = written.as_ref().is_some_and(|(_, truth)| truth.is_simulated);
    let task = Task { file: file.to_owned(), config: config.clone(), written: written.map(|(path, _)| path) };
    let (source, PredictionScores { matched_by, rating }) = supervisor.compute(move || task.run())?;
    let data = Data { rows: rating.rows, is_simulated, source: source.clone() };
    let row = Row::Computed(Computed {
        method: file.display().to_string(),
        rating,
        name: None,
        dataset: source,
        simulated: is_simulated,
        source: "computed",
        out_of_range: None,
    });
    let words = format!("{} {} ({})", data.rows, table::photos(is_simulated), data.source);
    let found = Found { ok: true, matched_by, data, rows: [row] };
    let mut text = table::text(&words, &config.eval.thresholds_km, &found.rows);
    if matched_by == MatchedBy::Order {
        text.push_str("matched by order: the predictions have no ids, and row n is taken for row n of the truth\n");
    }
    output.people(&text);
    Ok(serde_json::to_value(found)?)
}

/// What to score.
struct Task {
    file: PathBuf,
    config: RunConfig,
    /// What a worker has written of the test shards, where `eval.truth` is not set.
    written: Option<PathBuf>,
}

impl Task {
    /// The scores, and what the predictions were compared with.
    fn run(&self) -> anyhow::Result<(String, PredictionScores)> {
        let Self { file, config, written } = self;
        let truth = match written {
            None => Truth::read(Path::new(&config.eval.truth)),
            Some(path) => Truth::read_as(config.shards.test.clone(), path),
        };
        let truth = truth.map_err(LaunchError::reported)?;
        let bootstrap = Bootstrap { seed: config.train.seed, ..Bootstrap::default() };
        let found = score_predictions(file, &truth, &config.eval.thresholds_km, &bootstrap);
        Ok((truth.source, found.map_err(LaunchError::reported)?))
    }
}
