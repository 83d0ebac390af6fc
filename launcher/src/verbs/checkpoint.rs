//! `checkpoint list`, `verify` and `export`. They read, whoever holds the run, and rename nothing.

use std::path::{Path, PathBuf};

use locdiff_core::config::{self, Layer, RunConfig};
use locdiff_core::protocol::{CHECKPOINT_MANIFEST, ExportJob, Exported, Job};
use serde_json::{Value, json};

use crate::cli::{CheckpointVerb, Global};
use crate::error::{LaunchError, refuse, reported};
use crate::output::{Output, ok};
use crate::rendezvous::World;
use crate::run_folder::{self, CONFIG, CheckpointRow, Depth};

/// `checkpoint VERB`.
pub(super) fn run(verb: &CheckpointVerb, global: &Global, output: Output) -> anyhow::Result<Value> {
    match verb {
        CheckpointVerb::List { run_dir } => list(run_dir.as_deref(), global, output),
        CheckpointVerb::Verify { run_dir } => verify(run_dir.as_deref(), global, output),
        CheckpointVerb::Export { run_dir, out, overwrite } => export(run_dir, out, *overwrite, global, output),
    }
}

fn list(run_dir: Option<&Path>, global: &Global, output: Output) -> anyhow::Result<Value> {
    let run = find_run(run_dir, global, output)?;
    let rows = run_folder::checkpoints(&run, Depth::Lengths)?;
    show(&rows, output);
    Ok(json!({ "run": run, "rows": rows }))
}

/// Every checksum; each that differs on a line of its own.
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
        return output.people("no checkpoints");
    }
    output.people(&format!("{:<28} {:>10} {:>9}  {:<19}  state", "checkpoint", "MiB", "score", "committed (UTC)"));
    for row in rows {
        let score = row.score.map_or_else(|| "-".to_owned(), |score| format!("{score:.1}"));
        let committed = row.committed_unix_s.map_or_else(|| "-".to_owned(), run_folder::utc_text);
        let mib = row.bytes as f64 / f64::from(1 << 20);
        let best = if row.best { ", best" } else { "" };
        let reason = row.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
        output
            .people(&format!("{:<28} {mib:>10.1} {score:>9}  {committed:<19}  {}{best}{reason}", row.name, row.state));
    }
}

/// How often the newest checkpoint is looked for anew where the run removes it under our hands.
const EXPORT_TRIES: u32 = 5;

/// One file of averaged weights; a worker makes it.
fn export(target: &Path, out: &Path, overwrite: bool, global: &Global, output: Output) -> anyhow::Result<Value> {
    if !overwrite && out.symlink_metadata().is_ok() {
        refuse!(Exists, "{} exists; say --overwrite to replace it", out.display());
    }
    let mut tries = 0;
    let (checkpoint, exported) = loop {
        let checkpoint = find_checkpoint(target, global, output)?;
        tries += 1;
        match export_one(&checkpoint, out, overwrite, global) {
            Ok(exported) => break (checkpoint, exported),
            // The run goes on, and has removed it meanwhile: there is a newer one.
            Err(_) if tries < EXPORT_TRIES && !checkpoint.exists() && checkpoint != target => {}
            Err(error) => return Err(error),
        }
    };
    output.people(&format!(
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
    super::run_gang(&super::resolve(global)?, &World::one_cpu_worker(1), job)?.first()
}

/// A folder that is a checkpoint itself, or the newest whole one of a run.
fn find_checkpoint(target: &Path, global: &Global, output: Output) -> anyhow::Result<PathBuf> {
    let target = match target.join(CHECKPOINT_MANIFEST).exists() {
        true => target.to_owned(),
        false => find_run(Some(target), global, output)?,
    };
    let (checkpoint, passed_over) = run_folder::whole_checkpoint(&target)?;
    passed_over.iter().for_each(|line| tracing::warn!("{line}"));
    Ok(checkpoint.path)
}

/// The run that was named by its folder or its name, else that of the configuration, else the newest; said where it was
/// not named by its folder.
pub(super) fn find_run(named: Option<&Path>, global: &Global, output: Output) -> anyhow::Result<PathBuf> {
    if let Some(folder) = named.filter(|folder| is_run(folder)) {
        return Ok(folder.to_owned());
    }
    let config = super::resolve(global)?.config.checkpoint;
    let dir = Path::new(&config.dir);
    let run = match named {
        Some(name) if name.components().count() == 1 && is_run(&dir.join(name)) => dir.join(name),
        Some(name) => return Err(no_run(name).into()),
        None if config.run.is_empty() => run_folder::newest_run(dir)?,
        None if is_run(&dir.join(&config.run)) => dir.join(&config.run),
        None => return Err(no_run(&dir.join(&config.run)).into()),
    };
    output.people(&format!("run {}", run.display()));
    Ok(run)
}

fn is_run(folder: &Path) -> bool {
    folder.join(CONFIG).exists()
}

fn no_run(path: &Path) -> LaunchError {
    reported!(NoData, "{} is no run: it has no {CONFIG}", path.display())
}

/// The configuration of the run that a checkpoint lies in; the defaults where it lies elsewhere.
fn config_of(checkpoint: &Path) -> Result<RunConfig, LaunchError> {
    let path = std::path::absolute(checkpoint).ok().and_then(|path| Some(path.parent()?.join(CONFIG)));
    match path.filter(|path| path.exists()) {
        Some(path) => Ok(config::load(&[Layer::File(path)])?.config),
        None => Ok(RunConfig::default()),
    }
}
