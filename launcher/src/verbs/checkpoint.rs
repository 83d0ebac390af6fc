//! `checkpoint list`, `verify` and `export`. They change nothing in the run's folder, so they need no lock.

use std::path::Path;

use locdiff_core::config::{self, Layer, ParallelConfig, Prior};
use locdiff_core::files::parent;
use locdiff_core::protocol::{CHECKPOINT_MANIFEST, ExportJob, Exported, Job, RunParts};
use serde_json::{Value, json};

use super::eval::{ModelFile, ModelSource, head_xxh3, radii};
use super::paths::require_new;
use super::runs::find_run;
use crate::cli::{CheckpointVerb, Global};
use crate::error::{LaunchError, refuse};
use crate::output::{Output, ok};
use crate::rendezvous::NodeWorkers;
use crate::run_folder::{self, CONFIG, CheckpointRow, Depth, WholeCheckpoint, is_run};
use crate::terminal::{width, wrapped};

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
    let (checkpoint, run, exported) = loop {
        let checkpoint = find_checkpoint(target, global, output)?;
        tries += 1;
        match export_one(&checkpoint, out, overwrite, global, output) {
            Ok((run, exported)) => break (checkpoint.path, run, exported),
            // The run is still training and has removed this checkpoint. Try again with a newer checkpoint.
            Err(_)
                if tries < EXPORT_TRIES && !checkpoint.path.exists() && Some(checkpoint.path.as_path()) != target => {}
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
    let parts = [
        ("the calibration of LocDiff", &run.calibration),
        ("the calibration of LocDiff-H", &run.calibration_hybrid),
        ("tuned settings of LocDiff-H", &run.tuned),
        ("tuned settings of LocDiff-H for eval.prior = \"even\"", &run.tuned_even),
    ];
    let carried: Vec<&str> = parts.into_iter().filter_map(|(name, part)| part.as_ref().map(|_| name)).collect();
    if !carried.is_empty() {
        output.print(&wrapped(&format!("also in the file: {}", carried.join(", ")), 2, width()));
    }
    if run.calibration.is_none() && run.calibration_hybrid.is_none() {
        output.print("the file has no calibration, so predictions have no radii");
    }
    let mut result = ok(&exported)?;
    result["calibrated"] = json!(run.calibration.is_some());
    result["calibrated_hybrid"] = json!(run.calibration_hybrid.is_some());
    Ok(result)
}

fn export_one(
    checkpoint: &WholeCheckpoint,
    out: &Path,
    overwrite: bool,
    global: &Global,
    output: Output,
) -> anyhow::Result<(RunParts, Exported)> {
    let run = parts_of_run(checkpoint, output)?;
    let job = ExportJob { run: run.clone(), checkpoint: checkpoint.path.clone(), out: out.to_owned(), overwrite };
    let job = Job::Export(Box::new(job));
    let exported = super::run_repeatable(
        &super::resolve_for(global, &["supervise", "network"])?,
        &NodeWorkers::one_cpu_worker(1),
        &job,
    )?;
    Ok((run, exported.first()?))
}

/// If `target` is a checkpoint, returns it, or fails if it is damaged. Otherwise, returns the newest whole checkpoint
/// of the run that [`find_run`] finds for `target`.
fn find_checkpoint(target: Option<&Path>, global: &Global, output: Output) -> anyhow::Result<WholeCheckpoint> {
    let target = match target.filter(|target| target.join(CHECKPOINT_MANIFEST).exists()) {
        Some(checkpoint) => checkpoint.to_owned(),
        None => find_run(target, global, output)?,
    };
    let (checkpoint, skipped) = run_folder::whole_checkpoint(&target)?;
    skipped.iter().for_each(|line| tracing::warn!("{line}"));
    Ok(checkpoint)
}

/// What to export from the folder of the run that has the checkpoint. It is empty if the checkpoint is not in the
/// folder of a run.
fn parts_of_run(checkpoint: &WholeCheckpoint, output: Output) -> Result<RunParts, LaunchError> {
    let folder = std::path::absolute(&checkpoint.path).ok().and_then(|path| Some(path.parent()?.to_owned()));
    let Some(folder) = folder.filter(|folder| is_run(folder)) else { return Ok(RunParts::default()) };
    let mut config = config::load(&[Layer::File(folder.join(CONFIG))])?.config;
    // The file may be used on a machine with other devices.
    config.parallel = ParallelConfig::default();
    let (model, source) = (ModelFile::of(checkpoint)?, ModelSource::Run(folder));
    let mut heads = vec![config.retrieval.run.clone()];
    let mut tuned = |prior| -> Result<Option<String>, LaunchError> {
        let Some(found) = source.tuned(prior)? else { return Ok(None) };
        // Settings of an older version may be invalid. They are not used.
        heads.extend(config::load(&[found.layer()]).ok().map(|tuned| tuned.config.retrieval.run));
        Ok(Some(found.text))
    };
    Ok(RunParts {
        config: Some(toml::to_string(&config).expect("a checked configuration can be written as TOML")),
        tuned: tuned(Prior::Training)?,
        tuned_even: tuned(Prior::Even)?,
        calibration: radii::to_export(&source, &model, false, output)?,
        calibration_hybrid: radii::to_export(&source, &model, true, output)?,
        heads: heads.into_iter().filter_map(|name| Some((name.clone(), head_xxh3(&config, &name)?))).collect(),
    })
}
