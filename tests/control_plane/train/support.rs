//! Support for tests that train a small model on small shards.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::small_shards;
use crate::stage::{Ran, Stage, Worker};

const ROWS: usize = 512;

/// Settings that all tests share: a small model with dropout, a constant learning rate, a report of every step, and ten
/// times the default weight of the KL loss. With the default weight, the gradient norms of different layouts differ by
/// up to 4e-5. The reason is that Adam's first steps depend only on the signs of the gradients, even if the gradients
/// are near 0. Each worker has one thread, because layouts are compared and tests run side by side.
pub(super) const BASE: &str = "--device cpu --json --set model.degree=11 --set model.dropout=0.2 --set loss.anchors=64 \
    --set loss.kl_weight=0.4 --set train.global_batch=240 --set train.warmup_steps=0 --set train.learning_rate=5e-4 --set train.log_every=1 \
    --set train.schedule=\"constant\" --set shards.train=shards/small --set shards.validation=\"\" --set shards.reader_threads=1 \
    --set train.threads=1";

/// A stage with shards of the default size.
pub(super) fn stage() -> Stage {
    stage_of(ROWS)
}

/// A stage with shards of `rows` rows.
pub(super) fn stage_of(rows: usize) -> Stage {
    let stage = Stage::new(Worker::Real);
    small_shards::build(&stage, "small", 0..rows, 1, false);
    stage
}

/// Runs `train` with the shared settings and those in `more`.
pub(super) fn train(stage: &Stage, run: &str, more: &str) -> Ran {
    stage.run(&format!("{BASE} --run {run} {more} train"))
}

pub(super) fn run_dir(stage: &Stage, run: &str) -> PathBuf {
    stage.path().join("checkpoints").join(run)
}

/// The events of one kind from the run's `events.jsonl`, in order. Ignores a last line that is not complete yet.
pub(super) fn events(stage: &Stage, run: &str, kind: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(run_dir(stage, run).join("events.jsonl")).expect("the run has events");
    let complete = text.rsplit_once('\n').map_or("", |(complete, _)| complete);
    let lines = complete.lines().map(|line| serde_json::from_str::<Value>(line).expect("each line is JSON"));
    lines.filter(|line| line["event"] == kind).collect()
}

/// The loss and gradient norm of every step. Fails if a step that was repeated after a restart has different numbers.
pub(super) fn trace(stage: &Stage, run: &str) -> BTreeMap<u64, [f64; 2]> {
    let mut trace: BTreeMap<u64, [f64; 2]> = BTreeMap::new();
    for (step, found) in reports(stage, run) {
        let before = trace.insert(step, found);
        assert!(
            before.is_none_or(|before| before == found),
            "step {step} gave {before:?} at first, but {found:?} when repeated"
        );
    }
    trace
}

/// The loss and gradient norm of every step. If a step was repeated after a restart, the result has the numbers of the
/// last repetition, because the earlier numbers may come from a model with a flipped bit.
pub(super) fn last_trace(stage: &Stage, run: &str) -> BTreeMap<u64, [f64; 2]> {
    reports(stage, run).into_iter().collect()
}

fn reports(stage: &Stage, run: &str) -> Vec<(u64, [f64; 2])> {
    let mut reports = Vec::new();
    for line in events(stage, run, "progress") {
        let number = |key: &str| line[key].as_f64().unwrap_or_else(|| panic!("no {key} in {line}"));
        let step = line["step"].as_u64().expect("a line has a step");
        reports.push((step, [number("loss"), number("gradient_norm")]));
    }
    reports
}

/// Checks that the losses of two runs agree within `tolerance`, and the gradient norms within twice as much.
#[track_caller]
pub(super) fn assert_close(got: &BTreeMap<u64, [f64; 2]>, want: &BTreeMap<u64, [f64; 2]>, tolerance: f64, what: &str) {
    assert_eq!(
        got.keys().collect::<Vec<_>>(),
        want.keys().collect::<Vec<_>>(),
        "{what}: the runs have different steps"
    );
    for (step, want) in want {
        // Gradient norms differ a little more than losses.
        for ((got, want), tolerance) in got[step].iter().zip(want).zip([tolerance, 2.0 * tolerance]) {
            let difference = (got - want).abs() / want.abs();
            assert!(difference <= tolerance, "{what}, step {step}: got {got}, wanted {want}, off by {difference:e}");
        }
    }
}

/// Checksums of the tensor files of the newest checkpoint, by file name.
pub(super) fn tensors(run_dir: &Path) -> BTreeMap<String, String> {
    let latest = std::fs::read_to_string(run_dir.join("latest")).expect("the run has a checkpoint");
    let path = run_dir.join(latest.trim()).join("manifest.json");
    let manifest = std::fs::read_to_string(path).expect("the checkpoint has a manifest");
    let manifest: Value = serde_json::from_str(&manifest).expect("the file is valid JSON");
    let files = manifest["files"].as_array().expect("a manifest lists files").iter();
    let text = |value: &Value| value.as_str().expect("the value is a string").to_owned();
    let named = files.map(|file| (text(&file["name"]), text(&file["xxh3"])));
    named.filter(|(name, _)| name.ends_with(".safetensors")).collect()
}
