//! `checkpoint list`, `verify` and `export`. They change nothing in the run's folder, so they need no lock.

use std::path::{Path, PathBuf};

use locdiff_core::config::{self, Layer, RunConfig};
use locdiff_core::files::parent;
use locdiff_core::protocol::{CHECKPOINT_MANIFEST, ExportJob, Exported, Job};
use serde_json::{Value, json};

use super::paths::require_new;
use crate::cli::{CheckpointVerb, Global};
use crate::error::{LaunchError, refuse};
use crate::output::{Output, ok};
use crate::rendezvous::NodeWorkers;
use crate::run_folder::{
    self, CONFIG, CheckpointRow, Depth, RunState, RunStatus, is_run, named_run, newest_run, whole_checkpoint,
};

/// Runs `checkpoint VERB`.
pub(super) fn run(verb: &CheckpointVerb, global: &Global, output: Output) -> anyhow::Result<Value> {
    match verb {
        CheckpointVerb::List { run_dir } => list(run_dir.as_deref(), global, output),
        CheckpointVerb::Verify { run_dir } => verify(run_dir.as_deref(), global, output),
        CheckpointVerb::Export { run_dir, out, overwrite } => {
            export(run_dir.as_deref(), out, *overwrite, global, output)
        }
    }
}

fn list(run_dir: Option<&Path>, global: &Global, output: Output) -> anyhow::Result<Value> {
    let run = find_run(run_dir, global, output)?;
    let rows = run_folder::checkpoints(&run, Depth::Lengths)?;
    show(&rows, output);
    Ok(json!({ "run": run, "rows": rows }))
}

/// Verifies the checksums of all files of all checkpoints. The error has one line for each damaged checkpoint.
fn verify(run_dir: Option<&Path>, global: &Global, output: Output) -> anyhow::Result<Value> {
    let run = find_run(run_dir, global, output)?;
    let rows = run_folder::checkpoints(&run, Depth::Checksums)?;
    show(&rows, output);
    let damaged: Vec<String> = rows
        .iter()
        .filter(|row| row.state == "damaged")
        .map(|row| format!("{}: {}", run.join(&row.name).display(), row.reason.as_deref().unwrap_or_default()))
        .collect();
    if !damaged.is_empty() {
        refuse!(Corrupt, "{} of {} checkpoints are damaged:\n  {}", damaged.len(), rows.len(), damaged.join("\n  "));
    }
    Ok(json!({ "ok": true, "run": run, "rows": rows }))
}

fn show(rows: &[CheckpointRow], output: Output) {
    if rows.is_empty() {
        return output.print("no checkpoints");
    }
    let width = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or_default().max("checkpoint".len());
    output.print(&format!("{:<width$} {:>8} {:>8}  {:<19}  state", "checkpoint", "MiB", "GeoScore", "committed (UTC)"));
    for row in rows {
        let score = row.score.map_or_else(|| "-".to_owned(), |score| format!("{score:.1}"));
        let committed = row.committed_unix_s.map_or_else(|| "-".to_owned(), run_folder::utc_text);
        let mib = row.bytes as f64 / f64::from(1 << 20);
        let best = if row.best { ", best" } else { "" };
        let reason = row.reason.as_ref().map(|reason| format!("\n  {reason}")).unwrap_or_default();
        let (name, state) = (&row.name, &row.state);
        output.print(&format!("{name:<width$} {mib:>8.1} {score:>8}  {committed:<19}  {state}{best}{reason}"));
    }
}

/// Number of times that an export is tried. An export can fail because a run that is still training removes the chosen
/// checkpoint.
const EXPORT_TRIES: u32 = 5;

/// Exports the averaged weights of a checkpoint. A worker writes the file `out`.
fn export(
    target: Option<&Path>,
    out: &Path,
    overwrite: bool,
    global: &Global,
    output: Output,
) -> anyhow::Result<Value> {
    require_new("--out", out, overwrite)?;
    let folder = parent(out);
    if !folder.is_dir() {
        refuse!(NoData, "--out: there is no folder {}; create it first", folder.display());
    }
    let mut tries = 0;
    let (checkpoint, exported) = loop {
        let checkpoint = find_checkpoint(target, global, output)?;
        tries += 1;
        match export_one(&checkpoint, out, overwrite, global) {
            Ok(exported) => break (checkpoint, exported),
            // The run is still training and has removed this checkpoint. Try again with a newer checkpoint.
            Err(_) if tries < EXPORT_TRIES && !checkpoint.exists() && Some(checkpoint.as_path()) != target => {}
            Err(error) => return Err(error),
        }
    };
    output.print(&format!(
        "{}: {} tensors, {} numbers, {} bytes, averaged weights of step {} ({})",
        out.display(),
        exported.tensors,
        exported.numbers,
        exported.bytes,
        exported.step,
        checkpoint.display()
    ));
    ok(&exported)
}

fn export_one(checkpoint: &Path, out: &Path, overwrite: bool, global: &Global) -> anyhow::Result<Exported> {
    let config = config_of(checkpoint)?;
    let job = ExportJob { config, checkpoint: checkpoint.to_owned(), out: out.to_owned(), overwrite };
    let job = Job::Export(Box::new(job));
    super::run_repeatable(
        &super::resolve_for(global, &["supervise", "network"])?,
        &NodeWorkers::one_cpu_worker(1),
        &job,
    )?
    .first()
}

/// If `target` is a checkpoint, returns it, or fails if it is damaged. Otherwise, returns the newest whole checkpoint
/// of the run that [`find_run`] finds for `target`.
fn find_checkpoint(target: Option<&Path>, global: &Global, output: Output) -> anyhow::Result<PathBuf> {
    let target = match target.filter(|target| target.join(CHECKPOINT_MANIFEST).exists()) {
        Some(checkpoint) => checkpoint.to_owned(),
        None => find_run(target, global, output)?,
    };
    let (checkpoint, skipped) = run_folder::whole_checkpoint(&target)?;
    skipped.iter().for_each(|line| tracing::warn!("{line}"));
    Ok(checkpoint.path)
}

/// Finds the run whose folder or name is `named`. If `named` is `None`, returns the run that `checkpoint.run` names or,
/// if this field is empty, the newest run with a checkpoint. Prints the folder of the run, unless `named` is the folder.
pub(super) fn find_run(named: Option<&Path>, global: &Global, output: Output) -> anyhow::Result<PathBuf> {
    if let Some(folder) = named.filter(|folder| is_run(folder)) {
        hint_if_unfinished(folder, output);
        return Ok(folder.to_owned());
    }
    let config = super::resolve_for(global, &["checkpoint"])?.config.checkpoint;
    let dir = Path::new(&config.dir);
    let run = match named.map(|name| (name, name.to_str())) {
        Some((path, Some(name))) if path.components().count() == 1 => named_run(dir, name)?,
        Some((path, _)) => refuse!(
            NoData,
            "{} is not a run: it has no {CONFIG}; `locdiff-launch runs` lists the runs in {}",
            path.display(),
            dir.display()
        ),
        None if config.run.is_empty() => newest_run(dir)?,
        None => named_run(dir, &config.run)?,
    };
    output.print(&format!("run {}", run.display()));
    hint_if_unfinished(&run, output);
    Ok(run)
}

/// The checkpoint in the folder `from`, which must be a checkpoint or a run. The newest whole checkpoint of a run is
/// used. `key` is the configuration field that names the folder, and `dir` is the folder of all runs.
pub(super) fn checkpoint_at(key: &str, from: &Path, dir: &str) -> Result<PathBuf, LaunchError> {
    if !from.is_dir() {
        refuse!(
            NoData,
            "{key}: {} is neither a run nor a checkpoint; `locdiff-launch runs` lists the runs in {dir}",
            from.display()
        );
    }
    let (checkpoint, skipped) = whole_checkpoint(from).map_err(|error| error.about(key))?;
    skipped.iter().for_each(|line| tracing::warn!("{line}"));
    Ok(checkpoint.path)
}

/// Prints a hint if the run is not at its last step.
fn hint_if_unfinished(run: &Path, output: Output) {
    if let Some(RunStatus { step, steps, state, .. }) =
        RunStatus::current(run).filter(|status| status.step < status.steps)
    {
        let next = if state == RunState::Running { "it is being trained" } else { "`train` continues it" };
        output.print(&format!("  this run has done {step} of {steps} steps; {next}"));
    }
}

/// Returns the configuration of the run whose folder contains the checkpoint. If the checkpoint is not in the folder of
/// a run, returns the default configuration.
fn config_of(checkpoint: &Path) -> Result<RunConfig, LaunchError> {
    let path = std::path::absolute(checkpoint).ok().and_then(|path| Some(path.parent()?.join(CONFIG)));
    match path.filter(|path| path.exists()) {
        Some(path) => Ok(config::load(&[Layer::File(path)])?.config),
        None => Ok(RunConfig::default()),
    }
}
