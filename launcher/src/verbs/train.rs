//! `train`: chooses and opens the run.
//!
//! - `held_run`: starts workers from the run's newest checkpoint, and restarts all workers when one of them fails.
//! - `attempt_observer`: writes logs and events, shows progress, and commits checkpoints.
//! - `ending`: the commands that are printed after training.
//! - `forecast`: estimates how long training takes.
//! - `metrics`: numbers for Prometheus.
//! - `record`: the description of a failure that is written to the run folder.

mod attempt_observer;
mod ending;
mod forecast;
mod held_run;
mod metrics;
mod record;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::SystemTime;

use locdiff_core::config::{AutoOr, Resolved, RunConfig, ValueOrigin};
use locdiff_core::files::Files;
use locdiff_core::text::nearest;
use serde_json::{Value, json};

use super::locations::require_shards;
use super::restarts::RestartPolicy;
use crate::cli::Global;
use crate::error::{LaunchError, refuse};
use crate::gpus;
use crate::output::Output;
use crate::rendezvous::NodeWorkers;
use crate::run_folder::{
    RunFolder, RunStatus, StatusKeeper, has_ended, is_run, new_run_name, runs, threads_of, unfinished_run,
};
use crate::supervisor::{Injection, Supervisor, hold_signals, parse_fault};
use ending::next_commands;
use held_run::HeldRun;

pub(super) use record::{RESUME_HINT, quoted};

/// Runs `train`.
pub(super) fn run(inject: &[String], is_new: bool, global: &Global, output: Output) -> anyhow::Result<Value> {
    hold_signals()?;
    if is_new {
        refuse_existing(global)?;
    }
    let resolved = super::resolve_with_run(global)?;
    warn_of_mixed_data(&resolved);
    let world = super::workers(global, &resolved)?;
    let faults = inject.iter().map(|text| parse_fault(text, world.slots.len())).collect::<Result<Vec<_>, _>>()?;
    let run = RunChoice { prefix: run_name_prefix(global, &resolved), is_new };
    run_resolved(&resolved, &world, faults, &run, output)
}

/// Fails if `--new` is given together with the name of an existing run.
fn refuse_existing(global: &Global) -> Result<(), LaunchError> {
    if let Some((_, folder)) = super::named_run_folder(global).filter(|(_, folder)| is_run(folder)) {
        refuse!(
            Exists,
            "--new: the run {} exists; give another name, or leave out --new to resume it",
            folder.display()
        );
    }
    Ok(())
}

/// Warns if the user set the training data, but left the validation or test data that the training uses at its default.
fn warn_of_mixed_data(resolved: &Resolved) {
    let is_chosen = |key: &str| match resolved.origin(key) {
        ValueOrigin::Default => false,
        ValueOrigin::Line { source, .. } => !source.starts_with("preset "),
        ValueOrigin::Set | ValueOrigin::Flag(_) => true,
    };
    let (shards, eval) = (&resolved.config.shards, &resolved.config.eval);
    // Without test shards, training ends with a warning of its own.
    let tests = eval.after_train && require_shards("shards.test", &shards.test).is_ok();
    let others = [("shards.validation", &shards.validation, eval.every > 0), ("shards.test", &shards.test, tests)];
    for (key, value, is_used) in others {
        if is_used && !value.is_empty() && is_chosen("shards.train") && !is_chosen(key) {
            let train = &shards.train;
            tracing::warn!("shards.train was set to {train}, but {key} is still {value}; set {key} too");
        }
    }
}

/// Which run to train if `checkpoint.run` does not name one.
#[derive(Debug)]
pub(super) struct RunChoice {
    /// The name of a new run begins with this text.
    pub(super) prefix: String,
    /// Whether to start a new run even if there is an unfinished one with the same configuration.
    pub(super) is_new: bool,
}

impl RunChoice {
    /// The name of the run.
    fn name(&self, config: &RunConfig) -> Result<String, LaunchError> {
        if !config.checkpoint.run.is_empty() {
            return Ok(config.checkpoint.run.clone());
        }
        let unfinished = match self.is_new {
            true => None,
            false => unfinished_run(Path::new(&config.checkpoint.dir), config)?,
        };
        let Some(found) = unfinished else { return Ok(new_run_name(&self.prefix, SystemTime::now())) };
        let name = found.file_name().unwrap_or_default().to_string_lossy().into_owned();
        tracing::info!(
            "resuming {name}, the newest unfinished run with this configuration; `--new` starts another run"
        );
        Ok(name)
    }
}

/// `name` may be misspelt, so this note names the runs with similar names. The note is empty if no run has a similar
/// name, or if `name` is empty.
fn similar_runs(dir: &Path, name: &str) -> String {
    let folders = if name.is_empty() { Vec::new() } else { runs(dir).unwrap_or_default() };
    let others: Vec<String> =
        folders.iter().filter_map(|run| Some(run.file_name()?.to_string_lossy().into_owned())).collect();
    let similar = nearest(name, others.iter().map(String::as_str).filter(|other| *other != name));
    if similar.is_empty() { String::new() } else { format!("; runs with similar names: {}", similar.join(", ")) }
}

/// Replaces "auto" in `train.threads` with a number. An existing run keeps its number of threads, because the last bits
/// of results depend on this number. A new run gets the number of threads in `world`.
fn with_threads(resolved: &Resolved, world: &NodeWorkers, run: &Path) -> (Resolved, NodeWorkers) {
    let mut resolved = resolved.clone();
    let here = world.threads();
    let threads = match resolved.config.train.threads {
        AutoOr::Value(threads) => threads,
        AutoOr::Auto => threads_of(run).unwrap_or(here),
    };
    if threads != here {
        tracing::info!("each worker uses {threads} threads, as when the run was created; a new run would use {here}");
    }
    resolved.config.train.threads = AutoOr::Value(threads);
    (resolved, world.clone().with_threads(threads))
}

/// Trains with a resolved configuration.
pub(super) fn run_resolved(
    resolved: &Resolved,
    world: &NodeWorkers,
    injections: Vec<Injection>,
    choice: &RunChoice,
    output: Output,
) -> anyhow::Result<Value> {
    let config = &resolved.config;
    world.check_division(config)?;
    require_shards("shards.train", &config.shards.train)?;
    if !config.shards.validation.is_empty() && config.eval.every > 0 {
        require_shards("shards.validation", &config.shards.validation)?;
    }
    let dir = Path::new(&config.checkpoint.dir);
    let mut supervisor = Supervisor::new()?;
    let name = choice.name(config)?;
    let (resolved, world) = with_threads(resolved, world, &dir.join(&name));
    let resolved = &resolved;
    let config = &resolved.config;
    let metrics = metrics::listen(&config.network.metrics)?;
    let opened = RunFolder::open(Files::real(), dir, &name, config)?;
    let folder = opened.folder.path().display();
    match opened.is_new {
        true => tracing::info!("new run {folder}{}", similar_runs(dir, &config.checkpoint.run)),
        false => tracing::info!("run {folder} (existing)"),
    }
    opened.changes.iter().for_each(|line| tracing::info!("{line}"));
    let mut faults = Vec::new();
    for injection in injections {
        match injection {
            Injection::Planned(fault) => faults.push(fault),
            Injection::Random(random) => supervisor.inject_at_random(random),
        }
    }
    let policy = RestartPolicy::new(&config.supervise);
    let (run, is_created) = (opened.folder, opened.is_created);
    if has_ended(run.path(), config.train.steps) {
        return Ok(at_last_step(&run, config, output)?);
    }
    let (status, vanished) = StatusKeeper::new(run.path(), config.train.steps, config.train.global_batch);
    if let Some(RunStatus { pid, host, step, .. }) = vanished {
        tracing::warn!("the previous launcher (pid {pid} on {host}) was killed or crashed after step {step}");
        run.note("vanished", &json!({ "pid": pid, "host": host, "step": step }));
    }
    if let Some(listener) = metrics {
        metrics::serve(listener, run.path())?;
    }
    let may_shrink = world.cluster.as_ref().is_some_and(|cluster| cluster.may_shrink());
    let workers_max = if may_shrink { run.workers_max()? as usize } else { 0 };
    let training = HeldRun {
        resolved,
        world,
        run,
        is_created,
        supervisor,
        faults,
        restarts: 0,
        failing_launcher: None,
        trained: BTreeSet::new(),
        workers_max,
        policy,
        status,
    };
    training.run_to_end(output)
}

/// The result of `train` for a run that has nothing left to do.
fn at_last_step(run: &RunFolder, config: &RunConfig, output: Output) -> Result<Value, LaunchError> {
    let (name, step) = (run.path().file_name().unwrap_or_default().to_string_lossy(), run.newest_step()?);
    output.print(&format!(
        "run {} is at its last step, {} of {}",
        run.path().display(),
        step.unwrap_or_default(),
        config.train.steps,
    ));
    output.print(&next_commands(&name, config, true));
    let latest = run.checkpoints()?.last().map(|row| run.path().join(&row.name));
    let spent = RunStatus::current(run.path()).map(|status| status.goodput).unwrap_or_default();
    Ok(json!({
        "ok": true, "run": run.path(), "step": step, "from_step": step, "loss": null, "skipped_steps": 0,
        "restarts": 0, "checkpoint": latest, "evaluation": null, "eval": null,
        "goodput_percent": spent.percent(), "goodput": spent,
    }))
}

/// The prefix of a new run's name: the name of the preset, or the name of the configuration file without its extension.
/// If `--config` is not given and `--set` names the training data, the prefix is "run".
fn run_name_prefix(global: &Global, resolved: &Resolved) -> String {
    match global.config.last() {
        Some(path) => path.file_stem().map_or_else(|| "run".into(), |stem| stem.to_string_lossy().into_owned()),
        None if matches!(resolved.origin("shards.train"), ValueOrigin::Set) => "run".into(),
        None => super::default_preset(global, &gpus::inventory()).to_owned(),
    }
}
