//! Support for tests that evaluate a small trained model on small shards.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::UNIX_EPOCH;

use locdiff_core::exit_code::ExitCode;
use serde_json::Value;

use crate::small_shards;
use crate::stage::{LAUNCHER, Ran, Stage, Worker};

/// Number of training rows.
const TRAIN_ROWS: usize = 512;

/// Settings for a model that trains in about a second. Retrieval searches the training rows, so GeoCLIP is not needed.
pub(super) const BASE: &str = "--device cpu --json --run small --set model.degree=8 --set model.dropout=0 --set loss.anchors=64 \
    --set train.steps=40 --set train.global_batch=256 --set train.warmup_steps=0 --set train.learning_rate=1e-3 \
    --set shards.train=shards/train --set shards.test=shards/test --set shards.validation=\"\" --set eval.samples=4 \
    --set eval.sampler_steps=4 --set eval.anchors=grid --set eval.grid_points=2000 --set eval.every=0 --set retrieval.head=knn \
    --set retrieval.radius_km=2000";

/// Exit status of `browse.py` if there is no browser.
const NO_BROWSER: i32 = 77;

/// The names of the accuracies in a JSON result.
pub(super) const ACCURACIES: [&str; 5] = ["acc_1km", "acc_25km", "acc_200km", "acc_750km", "acc_2500km"];

/// A stage with shards and a trained run, and the output of `train`. `more` has additional flags for `train`.
pub(super) fn trained(more: &str) -> (Stage, Ran) {
    let stage = Stage::new(Worker::Real);
    small_shards::build(&stage, "train", 0..TRAIN_ROWS, 1, false);
    small_shards::build(&stage, "test", 1000..1150, 2, true);
    let ran = train(&stage, more);
    ran.exits_with(ExitCode::Success);
    (stage, ran)
}

/// Trains on the shards that the stage already has. `more` has additional flags for `train`.
pub(super) fn train(stage: &Stage, more: &str) -> Ran {
    stage.run(&format!("{BASE} --workers 1 {more} train"))
}

/// A stage with shards and a run that was trained without a final evaluation.
pub(super) fn stage() -> Stage {
    let stage = Stage::new(Worker::Real);
    copy(&kept_run(), stage.path());
    stage
}

/// A folder with the shards and the run of [`stage`]. The first test of a build makes it.
fn kept_run() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("small-run-{}", build_time()));
    if !folder.exists() {
        let (stage, _) = trained("--set eval.after_train=false");
        let copied = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder can be created");
        copy(stage.path(), copied.path());
        // This fails if another test has made the folder in the meantime.
        let _ = std::fs::rename(copied.path(), &folder);
    }
    folder
}

/// When the newest of the programs and this test was built, in nanoseconds.
fn build_time() -> u128 {
    let test = std::env::current_exe().expect("the test has a path");
    let built = |path: &Path| path.metadata().and_then(|file| file.modified()).expect("the program was built");
    let times = [LAUNCHER.as_ref(), &*Path::new(LAUNCHER).with_file_name("locdiff-worker"), &test].map(built);
    let newest = times.into_iter().max().expect("there are three times");
    newest.duration_since(UNIX_EPOCH).expect("the clock is right").as_nanos()
}

fn copy(from: &Path, to: &Path) {
    let folders = ["shards", "checkpoints"].map(|name| from.join(name));
    let status = Command::new("cp").arg("-r").args(folders).arg(to).status().expect("cp starts");
    assert!(status.success(), "cp failed: {status}");
}

pub(super) fn folder(stage: &Stage) -> PathBuf {
    stage.path().join("checkpoints/small/eval")
}

pub(super) fn read(stage: &Stage, name: &str) -> String {
    std::fs::read_to_string(folder(stage).join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The row of a method in a JSON result.
#[track_caller]
pub(super) fn row<'a>(result: &'a Value, method: &str) -> &'a Value {
    let rows = result["rows"].as_array().expect("the result has rows");
    rows.iter().find(|row| row["method"] == method).unwrap_or_else(|| panic!("no {method} in {result}"))
}

/// Opens a page, a file or a URL of this machine, in a browser without network, does the steps, and returns what `browse.py` prints. `None` if there is no
/// browser.
pub(super) fn browse(stage: &Stage, page: impl AsRef<OsStr>, steps: &Value) -> Option<Value> {
    let list = stage.path().join("steps.json");
    std::fs::write(&list, steps.to_string()).expect("the test folder is writable");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/browse.py");
    let output = Command::new("python3").arg("-B").arg(script).arg(page).arg(list).output().expect("python3 starts");
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    if output.status.code() == Some(NO_BROWSER) {
        #[expect(clippy::print_stderr, reason = "the message of a skipped test")]
        {
            eprintln!("skipped: {err}");
        }
        return None;
    }
    assert!(output.status.success(), "browse.py failed: {}\n{out}{err}", output.status);
    Some(serde_json::from_str(&out).unwrap_or_else(|error| panic!("browse.py printed no JSON ({error}): {out}{err}")))
}
