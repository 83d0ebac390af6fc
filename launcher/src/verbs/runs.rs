//! `runs`: lists the runs in `checkpoint.dir`, the newest last. Finds the run that a command names.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use locdiff_core::text::duration_text;
use serde::Serialize;
use serde_json::{Value, json};

use crate::cli::Global;
use crate::error::{LaunchError, refuse};
use crate::output::Output;
use crate::run_folder::{
    CONFIG, Depth, RunState, RunStatus, WholeCheckpoint, checkpoints, exact_unix_s, is_run, named_run, newest_run,
    runs, whole_checkpoint,
};
use crate::terminal::width;

/// Width of all columns except the name of the run, including the spaces between columns.
const OTHER_COLUMNS: usize = 49;

/// One row of the list.
#[derive(Debug, Serialize)]
struct RunRow {
    run: String,
    /// Steps done; `None` if the run has neither a status nor a checkpoint.
    step: Option<u64>,
    steps: Option<u64>,
    /// Highest validation score (mean GeoScore) of the run's checkpoints.
    score: Option<f64>,
    state: &'static str,
    /// Seconds since the status was written or, without a status, since the newest checkpoint was committed.
    age_s: Option<f64>,
}

/// Runs `runs`.
pub(super) fn run(global: &Global, output: Output) -> anyhow::Result<Value> {
    let config = super::resolve_for(global, &["checkpoint"])?.config.checkpoint;
    let dir = Path::new(&config.dir);
    let mut rows = runs(dir)?.iter().map(|folder| row(folder)).collect::<Result<Vec<_>, _>>()?;
    rows.sort_by(|left, right| right.age_s.unwrap_or(f64::MAX).total_cmp(&left.age_s.unwrap_or(f64::MAX)));
    if rows.is_empty() {
        output.print(&format!("no runs in {}; create one with `locdiff-launch train`", dir.display()));
    } else {
        let longest = rows.iter().map(|row| row.run.chars().count()).max().unwrap_or_default();
        let name_width = longest.clamp(4, width().saturating_sub(OTHER_COLUMNS).max(4));
        let heading = ["step", "GeoScore", "state", "age"].map(str::to_owned);
        output.print(&line("run", heading, name_width));
        rows.iter().for_each(|row| output.print(&line(&row.run, cells(row), name_width)));
    }
    Ok(json!({ "ok": true, "dir": dir, "runs": rows }))
}

fn row(folder: &Path) -> Result<RunRow, LaunchError> {
    let now = SystemTime::now();
    let status = RunStatus::current(folder);
    let kept = checkpoints(folder, Depth::Lengths)?;
    let newest = kept.iter().rfind(|row| row.state == "present");
    let committed_s = newest.and_then(|row| row.committed_unix_s).map(|at| exact_unix_s(now) - at as f64);
    Ok(RunRow {
        run: folder.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        step: status.as_ref().map(|status| status.step).or(newest.map(|row| row.step)),
        steps: status.as_ref().map(|status| status.steps),
        score: kept.iter().filter_map(|row| row.score).reduce(f64::max),
        state: status.as_ref().map_or("unknown", |status| status.state.name()),
        age_s: status.as_ref().map(|status| status.age_s(now)).or(committed_s),
    })
}

/// The cells of a row, without the name of the run.
fn cells(row: &RunRow) -> [String; 4] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let step = match (row.step, row.steps) {
        (Some(step), Some(steps)) => format!("{step} of {steps}"),
        (step, _) => or_dash(step.map(|step| step.to_string())),
    };
    let score = or_dash(row.score.map(|score| format!("{score:.1}")));
    [step, score, row.state.to_owned(), or_dash(row.age_s.map(duration_text))]
}

/// One line of the list. A name that is wider than `name_width` has a line of its own.
fn line(name: &str, [step, score, state, age]: [String; 4], name_width: usize) -> String {
    let break_after = if name.chars().count() > name_width { format!("\n{:name_width$}", "") } else { String::new() };
    format!("{name:<name_width$}{break_after}  {step:>15}  {score:>8}  {state:<11}  {age:>7}")
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
pub(super) fn checkpoint_at(key: &str, from: &Path, dir: &str) -> Result<WholeCheckpoint, LaunchError> {
    if !from.is_dir() {
        refuse!(
            NoData,
            "{key}: {} is neither a run nor a checkpoint; `locdiff-launch runs` lists the runs in {dir}",
            from.display()
        );
    }
    let (checkpoint, skipped) = whole_checkpoint(from).map_err(|error| error.about(key))?;
    skipped.iter().for_each(|line| tracing::warn!("{line}"));
    Ok(checkpoint)
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
