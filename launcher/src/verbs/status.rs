//! `status`: shows what the runs in `checkpoint.dir` are doing. It only reads the folders of the runs, so it also works
//! on another machine that can read these folders.

use std::path::Path;
use std::time::SystemTime;

use locdiff_core::text::duration_text;
use serde_json::{Value, json};

use crate::cli::Global;
use crate::output::Output;
use crate::run_folder::{RunState, RunStatus, StepTimes, WorkerStatus, named_run, runs};
use crate::terminal::{width, wrapped};

/// Runs `status`.
pub(super) fn run(global: &Global, output: Output) -> anyhow::Result<Value> {
    let config = super::resolve_for(global, &["checkpoint"])?.config.checkpoint;
    let dir = Path::new(&config.dir);
    let folders = if config.run.is_empty() { runs(dir)? } else { vec![named_run(dir, &config.run)?] };
    if folders.is_empty() {
        output.print(&format!("no runs in {}; create one with `locdiff-launch train`", dir.display()));
    }
    let rows: Vec<Value> = folders.iter().map(|folder| show(folder, output)).collect();
    Ok(json!({ "ok": true, "runs": rows }))
}

/// Prints the status of a run and returns it as JSON.
fn show(folder: &Path, output: Output) -> Value {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let Some(status) = RunStatus::current(folder) else {
        output.print(&format!("{name}: unknown, because it has no readable status.json"));
        return json!({ "run": name, "state": "unknown" });
    };
    let now = SystemTime::now();
    output.print(&text(&status, now));
    let mut row = json!(status);
    row["age_s"] = json!(status.age_s(now));
    row["goodput_percent"] = json!(status.goodput.percent());
    row
}

/// One line about the parts of a step. For each part, the line gives the smallest, median and largest time of all
/// ranks, and names the slowest rank. `None` if the times of some rank are not known yet.
fn step_times(workers: &[WorkerStatus]) -> Option<String> {
    let part = |name: &str, of: fn(&StepTimes) -> f64| {
        let timed = workers.iter().map(|worker| Some((of(&worker.times?), worker.rank)));
        let mut times = timed.collect::<Option<Vec<(f64, u32)>>>()?;
        times.sort_by(|left, right| left.0.total_cmp(&right.0));
        let (least, median, most) = (times.first()?, times[(times.len() - 1) / 2], times.last()?);
        Some(format!("{name} {:.1} / {:.1} / {:.1} (rank {})", least.0, median.0, most.0, most.1))
    };
    let parts = [
        part("step", |times| times.step_ms)?,
        part("data", |times| times.data_ms)?,
        part("waiting for others", |times| times.collective_ms)?,
    ];
    Some(format!("least / median / most ms per step: {}", parts.join(", ")))
}

/// What each worker does. With several nodes, the workers of a node that are in the same phase of the same step are named
/// together.
fn workers_text(workers: &[WorkerStatus]) -> String {
    let mut texts: Vec<String> = Vec::new();
    for of_node in workers.chunk_by(|one, other| one.node == other.node) {
        let same = of_node.chunk_by(|one, other| (one.phase, one.step) == (other.phase, other.step));
        let same = same.map(|same| {
            let (first, last) = (&same[0], &same[same.len() - 1]);
            let ranks = match same.len() {
                1 => format!("rank {}", first.rank),
                _ => format!("ranks {} to {}", first.rank, last.rank),
            };
            format!("{ranks} in phase {} of step {}", first.phase, first.step)
        });
        let is_alone = workers.iter().all(|worker| worker.node == of_node[0].node);
        let node = if is_alone { String::new() } else { format!("node {} ({}): ", of_node[0].node, of_node[0].host) };
        texts.push(format!("{node}{}", same.collect::<Vec<_>>().join(", ")));
    }
    texts.join("; ")
}

fn text(status: &RunStatus, now: SystemTime) -> String {
    let mut head = vec![format!("step {} of {}", status.step, status.steps)];
    head.extend(status.loss.map(|loss| format!("loss {loss:.4}")));
    let mut lines = Vec::new();
    if status.state == RunState::Running {
        head.extend(status.samples_per_s.map(|speed| format!("{speed:.0} samples/s")));
        head.extend(status.seconds_left.map(|seconds| format!("{} left", duration_text(seconds))));
        lines.push(format!("pid {} on {}; {}", status.pid, status.host, workers_text(&status.workers)));
        lines.extend(step_times(&status.workers));
        if status.is_stale(now) {
            lines.push(format!("not updated for {}", duration_text(status.age_s(now))));
        }
    }
    let checkpoint = match status.checkpoint_step {
        Some(step) => format!("last checkpoint at step {step}"),
        None => "no checkpoint".to_owned(),
    };
    lines.push(format!("{}, {} restarts, {checkpoint}", status.goodput.summary(), status.restarts));
    lines.extend(status.failure.as_ref().map(|failure| format!("last failure: {failure}")));
    let head = wrapped(&format!("{}: {}, {}", status.run, status.state.name(), head.join(", ")), 2, width());
    let lines: Vec<String> = lines.iter().map(|line| wrapped(line, 4, width() - 2)).collect();
    format!("{head}\n  {}", lines.join("\n  "))
}
