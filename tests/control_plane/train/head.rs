//! Tests of `train.method = "geoclip"`, which trains GeoCLIP's image head, and of evaluations with the trained head.

use std::fmt::Write as _;

use locdiff_core::exit_code::ExitCode;

use super::support::{assert_close, run_dir, tensors, trace};
use crate::small_shards;
use crate::stage::{Ran, Stage};

/// Length of the embeddings that a head takes.
const WIDTH: usize = 768;

/// Settings that all runs share.
const BASE: &str = "--device cpu --json --set shards.train=shards/train --set shards.test=shards/test \
    --set shards.validation=\"\" --set shards.reader_threads=1 --set retrieval.gallery=gallery.csv \
    --set train.global_batch=38 --set train.warmup_steps=0 --set train.schedule=\"constant\" \
    --set train.learning_rate=1e-3 --set train.log_every=1 --set train.threads=1 \
    --set eval.after_train=false --set eval.every=0";

const HEAD: &str = "--set train.method=geoclip --set loss.negatives=48";

/// Settings of a LocDiff run that is trained and evaluated quickly.
const LOCDIFF: &str = "--workers 1 --set model.degree=4 --set loss.anchors=64 --set train.steps=2 --set eval.samples=2 \
    --set eval.sampler_steps=2";

/// A stage with training photos, and a gallery with their places and 100 other places.
fn stage() -> Stage {
    let stage = Stage::with_geoclip();
    small_shards::build_of_width(&stage, "train", 0..200, (2, true), WIDTH);
    let mut gallery = String::from("lat,lon\n");
    for (latitude, longitude) in (0..300).map(small_shards::place) {
        writeln!(gallery, "{latitude},{longitude}").expect("writing to a string cannot fail");
    }
    std::fs::write(stage.path().join("gallery.csv"), gallery).expect("the test folder is writable");
    stage
}

fn train(stage: &Stage, run: &str, more: &str) -> Ran {
    stage.run(&format!("{BASE} --run {run} {more} train"))
}

/// The answers of retrieval in the last evaluation of a run.
fn answers(stage: &Stage, run: &str) -> String {
    let path = run_dir(stage, run).join("eval/predictions-retrieval.csv");
    std::fs::read_to_string(path).expect("the run was evaluated with retrieval")
}

#[test]
fn head_does_not_depend_on_workers_micro_batches_checks_or_kills() {
    let stage = stage();
    train(&stage, "one", &format!("{HEAD} --workers 1 --set train.steps=8")).exits_with(ExitCode::Success);
    let one = trace(&stage, "one");
    assert!(one.len() == 8 && one[&8][0] < 0.9 * one[&1][0], "the loss did not fall by 10 % in 8 steps: {one:?}");
    let two = format!("{HEAD} --workers 2 --set train.steps=8 --set checkpoint.every=3");
    train(&stage, "two", &two).exits_with(ExitCode::Success);
    // The four workers have 9 or 10 rows, in three or four micro-batches.
    let checks = "--set train.micro_batch=3 --set train.replay_check_every=2 --set train.replica_check_every=2";
    train(&stage, "four", &format!("{HEAD} --workers 4 {checks} --set train.steps=8")).exits_with(ExitCode::Success);
    for run in ["two", "four"] {
        assert_close(&trace(&stage, run), &one, 1e-5, run);
    }
    let ran = stage.run(&format!("{BASE} --run killed {two} --max-restarts 1 train --inject kill@rank=1,step=5"));
    ran.exits_with(ExitCode::Success).stderr_has("was killed by SIGKILL");
    assert_eq!(trace(&stage, "killed"), trace(&stage, "two"));
    assert_eq!(tensors(&run_dir(&stage, "killed")), tensors(&run_dir(&stage, "two")));
    assert_eq!(tensors(&run_dir(&stage, "two")).len(), 4);
}

#[test]
fn evaluations_use_the_trained_head() {
    let stage = stage();
    for (name, rows) in [("test", 200..240), ("validation", 240..280)] {
        small_shards::build_of_width(&stage, name, rows, (2, true), WIDTH);
    }
    let validation = "--set shards.validation=shards/validation";
    let head = format!("{HEAD} --workers 1 --set train.steps=20 --set eval.after_train=true {validation}");
    let trained = train(&stage, "head", &head);
    let found = &trained.exits_with(ExitCode::Success).json()["eval"];
    let rows = found["rows"].as_array().expect("the result has rows");
    assert_eq!((rows.len(), &rows[0]["name"]), (2, &"GeoCLIP, trained head".into()), "{found}");
    assert_eq!(rows[1]["name"], "GeoCLIP, consensus", "{found}");
    assert_eq!(found["data"]["head"], "trained");
    // Random places have a median error of about 10,000 km.
    assert!(rows[0]["median_km"].as_f64().is_some_and(|median_km| median_km < 4000.0), "{found}");
    assert!(!trained.stderr.contains("tuned"), "{}", trained.stderr);
    let own = answers(&stage, "head");
    let photos = |run: &str| run_dir(&stage, run).join("eval/images.json").exists();
    assert!(!photos("head"), "a run without samples has a file of samples");
    stage
        .run("--run head eval --tune")
        .exits_with(ExitCode::Config)
        .stderr_has("checkpoints/head has trained an image head, so there is nothing to tune");

    train(&stage, "locdiff", &format!("{LOCDIFF} {validation}")).exits_with(ExitCode::Success);
    let hybrid = |more: &str| {
        let found =
            stage.run(&format!("--json --run locdiff {more} eval --hybrid")).exits_with(ExitCode::Success).json();
        assert_eq!((&found["data"]["head"], found["rows"].as_array().map(Vec::len)), (&"trained".into(), Some(4)));
        assert_eq!(answers(&stage, "locdiff"), own);
    };
    // Settings that were tuned for another head do not replace the head that the user asks for.
    let folder = run_dir(&stage, "locdiff").join("eval");
    std::fs::create_dir(&folder).expect("the run exists and was not evaluated");
    std::fs::write(folder.join("tuned.toml"), "[retrieval]\nhead = \"knn\"\n").expect("the folder is writable");
    hybrid("--set retrieval.run=head");
    assert!(photos("locdiff"));
    // Settings that were tuned for a trained head also name the run that trained the head.
    let line = "--run locdiff --set retrieval.run=checkpoints/head/step-00000020 eval --tune";
    let tuned = stage.run(line);
    tuned.exits_with(ExitCode::Success);
    assert!(!tuned.stderr.contains("mean_views"), "{}", tuned.stderr);
    hybrid("");
    // LocDiff and the head saw single views, but these photos are read as means of two.
    let other = "was trained with shards.mean_views = 1, but photos are now read with 2";
    let ran = stage.run("--run locdiff --set shards.mean_views=2 eval --hybrid");
    ran.exits_with(ExitCode::Success);
    for model in ["locdiff", "head"] {
        let warned = |line: &&str| line.contains(&format!("checkpoints/{model}/step-")) && line.contains(other);
        assert_eq!(ran.stderr.lines().filter(warned).count(), 1, "{model}: {}", ran.stderr);
    }
    exported_files_serve_instead_of_both_runs(&stage);
    for (settings, code, reason) in [
        (
            "retrieval.run=nowhere",
            ExitCode::NoData,
            "retrieval.run: checkpoints/nowhere is neither a run nor a checkpoint",
        ),
        ("retrieval.run=locdiff", ExitCode::Config, "has no image head; wanted a run with train.method = \"geoclip\""),
    ] {
        stage.run(&format!("--run locdiff --set {settings} eval --hybrid")).exits_with(code).stderr_has(reason);
    }
    refuses_what_it_cannot_train_or_use(&stage);
}

/// Exports the run `head` and the run `locdiff`, whose settings are tuned for this head.
fn exported_files_serve_instead_of_both_runs(stage: &Stage) {
    for run in ["head", "locdiff"] {
        stage.run(&format!("checkpoint export {run} --out {run}.safetensors")).exits_with(ExitCode::Success);
    }
    let predict = |model: &str| {
        let ran = stage.run(&format!("predict shards/test {model} --overwrite --out out.csv"));
        ran.exits_with(ExitCode::Success);
        (std::fs::read_to_string(stage.path().join("out.csv")).expect("the answers were written"), ran.stdout)
    };
    let (head, _) = predict("--run head");
    assert_eq!(predict("--model head.safetensors").0, head);
    let (hybrid, said) = predict("--run locdiff --hybrid");
    assert!(said.contains("settings:") && said.contains("tuned.toml"), "{said}");
    // The tuned settings are for the head of the run, which is also in the file.
    let (found, said) = predict("--model locdiff.safetensors --hybrid --set retrieval.run=head.safetensors");
    assert!(found == hybrid && said.contains("tuned.toml in locdiff.safetensors"), "{said}");
    let line = "predict shards/test --model locdiff.safetensors --hybrid --out out.csv --overwrite";
    let ran = stage.run(&format!("--set retrieval.run=locdiff.safetensors {line}"));
    ran.exits_with(ExitCode::Config).stderr_has("locdiff.safetensors has no image head");
    let ran = stage.run(&format!("--set retrieval.run=none.safetensors {line}"));
    ran.exits_with(ExitCode::Io).stderr_has("retrieval.run: no file at none.safetensors");
}

/// Checks what training a head and evaluating with it refuse. `stage` must have a run `head` and a run `locdiff`.
fn refuses_what_it_cannot_train_or_use(stage: &Stage) {
    let ran = train(stage, "headless", "--set retrieval.head=trained");
    ran.exits_with(ExitCode::Config)
        .stderr_has("retrieval.run: is empty, but retrieval.head = \"trained\" needs the run");
    small_shards::build(stage, "narrow", 0..50, 1, false);
    let ran = stage.run("--run head --set shards.test=shards/narrow eval");
    ran.exits_with(ExitCode::Config).stderr_has("its embeddings have width 12, but trained heads take width 768");
    for (run, more, code, reason) in [
        (
            "narrow",
            "--workers 1 --set shards.train=shards/narrow",
            ExitCode::Config,
            "the embeddings of shards/narrow have 12 numbers, wanted 768",
        ),
        ("split", "--workers 2 --tensor-parallel 2", ExitCode::Config, "set parallel.tensor = 1"),
        ("weightless", "--workers 2 --set retrieval.geoclip=nowhere", ExitCode::NoData, "geoclip import"),
    ] {
        train(stage, run, &format!("{HEAD} {more} --set train.steps=4")).exits_with(code).stderr_has(reason);
        assert!(!run_dir(stage, run).exists(), "the folder of the run {run} was kept");
    }
    let ran = train(stage, "locdiff", &format!("{LOCDIFF} {HEAD} --set train.steps=4"));
    ran.exits_with(ExitCode::RunDiffers).stderr_has("train.method").stderr_has("geoclip").stderr_has("locdiff");
}
