//! Tests that the results of a run do not depend on the number of workers, on restarts or on resumes.

use std::collections::BTreeMap;

use locdiff_core::exit_code::ExitCode;

use super::support::{BASE, assert_close, events, run_dir, stage, tensors, trace, train};

/// File with the losses and gradient norms that an earlier build of this program computed.
const SNAPSHOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/snapshots/train_trace.json");

/// Two runs count as equal if the relative difference of their losses is at most this, and that of their gradient norms
/// at most twice this. Adding f32 numbers in a different order changes the last bits of the sum. After fifty steps of
/// Adam, the losses differ by 2e-7 and the gradient norms by 4e-6, or by 1.1e-5 on another processor.
const SAME: f64 = 1e-5;

#[test]
fn number_of_workers_changes_neither_losses_nor_gradients() {
    let stage = stage();
    train(&stage, "one", "--workers 1 --set train.steps=50").exits_with(ExitCode::Success);
    let one = trace(&stage, "one");
    assert_eq!(one.len(), 50);
    assert!(one[&50][0] < 0.98 * one[&1][0], "the loss did not fall by 2 %: from {:?} to {:?}", one[&1], one[&50]);
    for (run, more) in [
        ("two", "--workers 2 --set train.steps=50"),
        ("seven-with-uneven-shares", "--workers 7 --set train.steps=50"),
        ("four", "--workers 4 --set train.steps=50"),
        ("split-in-two", "--workers 2 --tensor-parallel 2 --set train.steps=50"),
        ("split-in-four", "--workers 4 --tensor-parallel 4 --set train.steps=50"),
        ("two-of-two", "--workers 4 --tensor-parallel 2 --set train.steps=50"),
        ("micro", "--workers 2 --set train.steps=50 --set train.micro_batch=50"),
    ] {
        train(&stage, run, more).exits_with(ExitCode::Success);
        assert_close(&trace(&stage, run), &one, SAME, run);
    }
    // This program wrote the snapshot, so the comparison shows whether the numbers have changed, not whether they are
    // right. A commit that changes the numbers must explain why. LOCDIFF_WRITE_SNAPSHOT=1 writes a new snapshot.
    if std::env::var_os("LOCDIFF_WRITE_SNAPSHOT").is_some() {
        let text = serde_json::to_string_pretty(&one).expect("numbers can be written as JSON");
        std::fs::write(SNAPSHOT, text).expect("the snapshot file is writable");
    }
    let snapshot = std::fs::read_to_string(SNAPSHOT).expect("the snapshot file exists");
    let snapshot: BTreeMap<u64, [f64; 2]> = serde_json::from_str(&snapshot).expect("the snapshot is valid JSON");
    assert_close(&one, &snapshot, 1e-4, "snapshot");
}

#[test]
fn run_resumes_with_a_different_number_of_workers() {
    let stage = stage();
    // The dimensions that pass the low-pass filter are chosen once and stored in the checkpoint.
    let settings = "--set model.low_pass_dims=96 --set diffusion.condition_drop=0.1";
    train(&stage, "whole", &format!("{settings} --workers 1 --set train.steps=30")).exits_with(ExitCode::Success);
    for (workers, steps) in [(4, 10), (1, 20), (2, 30)] {
        let ran = train(&stage, "changing", &format!("{settings} --workers {workers} --set train.steps={steps}"));
        ran.exits_with(ExitCode::Success);
        assert_eq!(ran.json()["from_step"], steps - 10);
    }
    assert_close(&trace(&stage, "changing"), &trace(&stage, "whole"), SAME, "4, 1, 2 workers");
    // The layouts (data-parallel x tensor-parallel) are 4 x 1, 1 x 1, 1 x 2 and 2 x 2. If the moments of Adam were
    // split or joined wrongly, the following steps would change.
    for (workers, tensor, steps) in [(4, 1, 7), (1, 1, 14), (2, 2, 21), (4, 2, 30)] {
        let layout = format!("{settings} --workers {workers} --tensor-parallel {tensor} --set train.steps={steps}");
        let ran = train(&stage, "layouts", &layout);
        ran.exits_with(ExitCode::Success);
    }
    assert_close(&trace(&stage, "layouts"), &trace(&stage, "whole"), SAME, "other layouts");
    let last = stage.run("--json checkpoint verify checkpoints/layouts");
    last.exits_with(ExitCode::Success);
    assert_eq!(tensors(&run_dir(&stage, "layouts")).len(), 8, "wanted four kinds of tensors with two pieces each");
}

#[test]
fn killed_worker_is_replaced_without_changing_the_numbers() {
    let stage = stage();
    let settings = "--workers 2 --set train.steps=24 --set checkpoint.every=5";
    train(&stage, "undisturbed", settings).exits_with(ExitCode::Success);
    let faults = "--inject kill@rank=1,step=13 --inject kill@rank=0,step=3";
    let ran = stage.run(&format!("{BASE} --run killed {settings} --max-restarts 2 train {faults}"));
    ran.exits_with(ExitCode::Success)
        .stderr_has("was killed by SIGKILL")
        .stderr_has("restart 1 of at most 2 without progress");
    assert_eq!(ran.json()["restarts"], 2);
    assert_eq!(trace(&stage, "killed"), trace(&stage, "undisturbed"));
    assert_eq!(tensors(&run_dir(&stage, "killed")), tensors(&run_dir(&stage, "undisturbed")));
    assert_eq!(tensors(&run_dir(&stage, "undisturbed")).len(), 4);
}

#[test]
fn split_run_evaluates_exports_and_initialises_like_an_unsplit_one() {
    let stage = stage();
    let settings = "--set shards.validation=shards/small --set eval.quick_rows=64 --set eval.quick_samples=2 --set eval.every=6 \
        --set eval.sampler_steps=4 --set train.micro_batch=70 --set train.steps=12";
    train(&stage, "whole", &format!("--workers 1 {settings}")).exits_with(ExitCode::Success);
    train(&stage, "split", &format!("--workers 4 --tensor-parallel 2 {settings}")).exits_with(ExitCode::Success);
    assert_close(&trace(&stage, "split"), &trace(&stage, "whole"), SAME, "micro-batches");
    let score = |run: &str| events(&stage, run, "evaluated")[1]["score"].as_f64().expect("the event has a score");
    let (whole, split) = (score("whole"), score("split"));
    assert!((whole - split).abs() < 1e-3 * whole, "the score is {whole} for one worker, but {split} for a split model");
    // The header of a safetensors file lists names, types, shapes and offsets of all tensors.
    let header = |run: &str| {
        let export = format!("--json checkpoint export checkpoints/{run} --out {run}.safetensors");
        stage.run(&export).exits_with(ExitCode::Success);
        let bytes = std::fs::read(stage.path().join(format!("{run}.safetensors"))).expect("the exported file exists");
        let length = u64::from_le_bytes(bytes[..8].try_into().expect("the slice has eight bytes")) as usize;
        let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).expect("the header is JSON");
        header.as_object_mut().expect("the header is an object").remove("__metadata__");
        header
    };
    assert_eq!(header("split"), header("whole"));
    let from = "--workers 1 --set train.steps=2 --set train.init_from=checkpoints";
    train(&stage, "from-whole", &format!("{from}/whole")).exits_with(ExitCode::Success);
    train(&stage, "from-split", &format!("{from}/split")).exits_with(ExitCode::Success);
    // The size of Adam's first steps does not depend on the size of the gradient. So even a difference of 1e-6 between
    // the two runs grows, and the comparison needs a larger tolerance.
    assert_close(&trace(&stage, "from-split"), &trace(&stage, "from-whole"), 1e-4, "initialised from a split run");
}

#[test]
fn killed_rank_of_a_split_model_does_not_change_the_numbers() {
    let stage = stage();
    let settings = "--workers 2 --tensor-parallel 2 --set train.steps=16 --set checkpoint.every=5";
    train(&stage, "undisturbed", settings).exits_with(ExitCode::Success);
    let ran = stage.run(&format!("{BASE} --run killed {settings} --max-restarts 1 train --inject kill@rank=1,step=13"));
    ran.exits_with(ExitCode::Success).stderr_has("was killed by SIGKILL");
    assert_eq!(trace(&stage, "killed"), trace(&stage, "undisturbed"));
    assert_eq!(tensors(&run_dir(&stage, "killed")), tensors(&run_dir(&stage, "undisturbed")));
}

#[test]
fn repeated_command_on_a_finished_run_does_nothing() {
    let stage = stage();
    let settings = "--workers 2 --set train.steps=6";
    train(&stage, "again", settings).exits_with(ExitCode::Success);
    let before = tensors(&run_dir(&stage, "again"));
    let ran = train(&stage, "again", settings);
    ran.exits_with(ExitCode::Success);
    assert_eq!((&ran.json()["from_step"], &ran.json()["step"]), (&6.into(), &6.into()));
    assert_eq!(tensors(&run_dir(&stage, "again")), before);
}

#[test]
fn number_of_workers_does_not_change_the_quick_evaluation() {
    let stage = stage();
    train(&stage, "trained", "--workers 1 --set train.steps=30").exits_with(ExitCode::Success);
    let mut first = None;
    // The 130 rows form three blocks, and the last block has two rows. With four workers, one worker therefore has
    // nothing to do. If the number of rows in a matrix product depended on the number of workers, the score would
    // change by one part in a billion.
    for workers in 1..=4 {
        let run = format!("by-{workers}");
        // With this learning rate, updates are too small to change any weight, so every run evaluates the same network.
        let settings = "--set train.init_from=checkpoints/trained --set train.steps=1 --set train.learning_rate=1e-30 \
            --set shards.validation=shards/small --set eval.quick_rows=130 --set eval.quick_samples=1 --set eval.sampler_steps=4";
        train(&stage, &run, &format!("--workers {workers} {settings}")).exits_with(ExitCode::Success);
        let [found] = &events(&stage, &run, "evaluated")[..] else {
            panic!("{workers} workers: wanted one evaluation")
        };
        assert_eq!(found["rows"], 130);
        let found = ["score", "within_percent"].map(|key| found[key].clone());
        assert_eq!(
            first.get_or_insert_with(|| found.clone()),
            &found,
            "{workers} workers and one worker gave different results"
        );
    }
}

/// The number of threads is chosen when a run is created. A run that resumes on a machine with another number of cores
/// keeps its number of threads.
#[test]
fn automatic_threads_are_chosen_once_and_kept_on_resume() {
    let stage = stage();
    let cores = std::thread::available_parallelism().expect("the number of cores is known").get();
    let run = |name: &str, settings: &str| train(&stage, name, &format!("--set train.steps=4 {settings}"));
    let has_threads = |name: &str, threads: usize| {
        let text = std::fs::read_to_string(run_dir(&stage, name).join("config.toml")).expect("the run has a file");
        assert!(text.contains(&format!("\nthreads = {threads}\n")), "wanted {threads} threads:\n{text}");
    };
    for (name, workers) in [("one", 1), ("two", 2)] {
        run(name, &format!("--workers {workers} --set train.threads=auto")).exits_with(ExitCode::Success);
        has_threads(name, (cores / workers).max(1));
    }
    let elsewhere = cores + 1;
    run("moved", &format!("--workers 1 --set train.threads={elsewhere}")).exits_with(ExitCode::Success);
    let ran = run("moved", "--workers 1 --set train.threads=auto --set train.steps=8");
    ran.exits_with(ExitCode::Success).stderr_has(&format!(
        "each worker uses {elsewhere} threads, as when the run was created; a new run would use {cores}"
    ));
    has_threads("moved", elsewhere);
    let never = format!("--workers 1 --set train.threads={elsewhere} --set train.steps=8");
    run("never-moved", &never).exits_with(ExitCode::Success);
    assert_eq!(tensors(&run_dir(&stage, "moved")), tensors(&run_dir(&stage, "never-moved")));
}
