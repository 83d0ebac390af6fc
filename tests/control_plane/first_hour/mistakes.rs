//! Tests of mistakes that users make in the first hour. Each message says in plain words, and only once, what is wrong
//! and what to do next.

use std::path::Path;

use locdiff_core::config::RunConfig;
use locdiff_core::exit_code::ExitCode;
use locdiff_core::files::Files;
use locdiff_launch::run_folder::RunFolder;

use crate::run_folder::save;
use crate::stage::{Ran, Stage, Worker};

/// A command line, its exit code, and two parts of its message: what is wrong, and the next step.
type Mistake = (&'static str, ExitCode, &'static str, &'static str);

const COMMAND_LINE: [Mistake; 10] = [
    ("trian", ExitCode::Usage, "unrecognized subcommand 'trian'", "'train'"),
    ("--worker 2 train", ExitCode::Usage, "unexpected argument '--worker'", "'--workers'"),
    ("--workers two train", ExitCode::Usage, "'--workers <N>': wanted a whole number", "--help"),
    ("--max-restarts=-1 train", ExitCode::Usage, "'--max-restarts <N>': wanted 0 or above", "--help"),
    ("shards simulate --views 0 --out y", ExitCode::Usage, "'--views <V>': wanted 1 to 256", "--help"),
    ("--gpus 4 train", ExitCode::Device, "4 GPU(s) requested", "`--workers 4 --device cpu`"),
    (
        "--gpus 2 --device cpu train",
        ExitCode::Usage,
        "--gpus cannot be combined with --device cpu",
        "--workers N --device cpu",
    ),
    (
        "--set train.seed=1 train --set train.steps=2",
        ExitCode::Usage,
        "give all --set and --config on the same side of the verb",
        "before it or after it",
    ),
    ("eval --suite mian", ExitCode::Usage, "invalid value 'mian' for '--suite <NAME>'", "similar value exists: 'main'"),
    ("--json", ExitCode::Usage, "no verb given", "--help lists the verbs"),
];

const CONFIGURATION: [Mistake; 14] = [
    ("--set train.stepz=5 train", ExitCode::Config, "train.stepz: unknown field", "did you mean train.steps?"),
    (
        "--set train.steps=many train",
        ExitCode::Config,
        "train.steps: got \"many\"",
        "wanted a whole number (from --set)",
    ),
    ("--set checkpoint.every=0 train", ExitCode::Config, "checkpoint.every: is 0", "wanted 1 or above (from --set)"),
    ("--set parallel.device=gpu train", ExitCode::Config, "parallel.device: got \"gpu\"", "\"cpu\" or \"cuda\""),
    (
        "--set train.steps=10 --set train.warmup_steps=500 train",
        ExitCode::Config,
        "train.warmup_steps: is 500",
        "more than train.steps = 10",
    ),
    (
        "--set shards.density_alpha=1.5 train",
        ExitCode::Config,
        "shards.density_alpha: is 1.5",
        "wanted 0 to 1 (from --set)",
    ),
    (
        "--set shards.density_cell_degrees=0 train",
        ExitCode::Config,
        "shards.density_cell_degrees: is 0",
        "wanted 0.001 to 90 (from --set)",
    ),
    ("--set shards.mean_views=0 train", ExitCode::Config, "shards.mean_views: is 0", "wanted 1 to 1024 (from --set)"),
    ("--set steps train", ExitCode::Config, "steps: wanted key=value", "--set"),
    ("--config none.toml train", ExitCode::Config, "none.toml: No such file", "presets: demo, l23"),
    ("--config bad.toml train", ExitCode::Config, "bad.toml:2: malformed TOML", "`locdiff-launch config show`"),
    ("--config preset.toml train", ExitCode::Config, "preset: is \"dmeo\"", "wanted a preset: demo, l23"),
    ("--run a/b train", ExitCode::Config, "checkpoint.run: is \"a/b\"", "checkpoint.dir names the folder of all runs"),
    (
        "--workers 7 --set train.global_batch=5 --set shards.train=shards/mp16 --set eval.every=0 train",
        ExitCode::Config,
        "train.global_batch: is 5, which is too few for 7 data-parallel ranks",
        "wanted 7 or more",
    ),
];

const FILES: [Mistake; 11] = [
    ("train", ExitCode::NoData, "shards/demo/train", "locdiff-launch demo"),
    (
        "shards build --table coords.csv --embeddings embeddings.npy --out x",
        ExitCode::Io,
        "--table: no file at coords.csv",
        "did you mean coordinates.csv?",
    ),
    (
        "shards build --table coordinates.csv --embeddings embedding.npy --out x",
        ExitCode::Io,
        "--embeddings: no file at embedding.npy",
        "did you mean embeddings.npy?",
    ),
    (
        "shards build --table coordinates.csv --embeddings embeddings.npy --out shards/mp16",
        ExitCode::Exists,
        "--out: shards/mp16 exists",
        "--overwrite",
    ),
    (
        "shards build --table coordinates.csv --embeddings embeddings.npy --out coordinates.csv/x",
        ExitCode::Io,
        "coordinates.csv is not a folder",
        "choose another folder",
    ),
    (
        "shards simulate --coordinates far/places.csv --out y",
        ExitCode::Io,
        "--coordinates: no file at far/places.csv",
        "check the path; there is no folder",
    ),
    ("geoclip import --wheel zzz --out z", ExitCode::Io, "--wheel: no file at zzz", "check the name; the folder is"),
    (
        "--set eval.truth=coordinates.csv eval --predictions mine",
        ExitCode::Io,
        "--predictions: no file at mine",
        "check the name",
    ),
    (
        "--set eval.truth=truth eval --predictions coordinates.csv",
        ExitCode::Io,
        "eval.truth: no file at truth",
        "check the name",
    ),
    (
        "--set checkpoint.dir=coordinates.csv --set shards.train=shards/mp16 --set eval.every=0 train",
        ExitCode::Io,
        "checkpoint.dir: coordinates.csv",
        "Not a directory",
    ),
    (
        "checkpoint export first --out none/model.safetensors",
        ExitCode::NoData,
        "--out: there is no folder none",
        "create it first",
    ),
];

const RUNS: [Mistake; 8] = [
    ("--set checkpoint.dir=empty eval", ExitCode::NoData, "no runs in empty", "`locdiff-launch train`"),
    ("--run frist eval", ExitCode::NoData, "no run `frist` in checkpoints", "did you mean first?"),
    ("checkpoint list far/away", ExitCode::NoData, "far/away is not a run", "`locdiff-launch runs`"),
    (
        "--run first --set eval.checkpoint=77 eval",
        ExitCode::NoData,
        "no checkpoint of step 77 (eval.checkpoint)",
        "steps with a checkpoint: 10, 20, 30",
    ),
    (
        "--run first --set shards.test=shards/mp16 --set retrieval.gallery=zzz eval --hybrid",
        ExitCode::Io,
        "retrieval.gallery: no file at zzz",
        "check the name",
    ),
    ("--run first --set train.steps=5 train", ExitCode::RunDiffers, "has done 30 steps", "`--run NAME`"),
    ("--run held train", ExitCode::RunHeld, "checkpoints/held is held by another launcher", "`train --new`"),
    (
        "--run new --set train.init_from=zzz --set shards.train=shards/mp16 --set eval.every=0 train",
        ExitCode::NoData,
        "train.init_from: zzz is neither a run nor a checkpoint",
        "`locdiff-launch runs`",
    ),
];

/// Texts that must not occur in messages: words that only Rust programmers understand, and the beginnings of log lines
/// that would show the error a second time.
const NEVER: [&str; 9] =
    ["u64", "u32", "..=", "Some(", "unit variant", "invalid type", "invalid digit", "[rank 0] ERROR", "INFO  ERROR"];

/// Runs a command that sees no GPUs.
fn run(stage: &Stage, line: &str) -> Ran {
    let output = stage.command(line).env("CUDA_VISIBLE_DEVICES", "").output();
    Ran::from(output.expect("the launcher can be started"))
}

/// Creates a run with checkpoints at steps 10, 20 and 30.
fn run_in(checkpoints: &Path, name: &str) -> RunFolder {
    let mut config = RunConfig::default();
    config.checkpoint.keep = 5;
    let opened = RunFolder::open(Files::real(), checkpoints, name, &config).expect("the run can be opened");
    let mut folder = opened.folder;
    folder.begin_attempt(1).expect("an attempt can begin");
    for step in [10, 20, 30] {
        save(&Files::real(), &folder, step, None).expect("the checkpoint can be committed");
    }
    folder
}

/// Panics if a line of more than 40 characters also occurs within another line.
#[track_caller]
fn assert_nothing_twice(text: &str) {
    let stripped = |line: &'_ str| line.trim().trim_start_matches("error: ").to_owned();
    let lines: Vec<String> = text.lines().map(stripped).filter(|line| line.len() > 40).collect();
    for (at, line) in lines.iter().enumerate() {
        let is_twice = lines.iter().enumerate().any(|(other, text)| other != at && text.contains(line.as_str()));
        assert!(!is_twice, "{line:?} occurs twice in:\n{text}");
    }
}

#[test]
fn message_of_each_mistake_names_the_next_step() {
    let stage = Stage::new(Worker::None);
    for (name, text) in [
        ("bad.toml", "[train]\nsteps = = 10\n"),
        ("preset.toml", "preset = \"dmeo\"\n"),
        ("coordinates.csv", "id,lat,lon\na,1,2\n"),
        ("embeddings.npy", ""),
        ("shards/mp16/a.parquet", ""),
    ] {
        let path = stage.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a file has a parent")).expect("the test folder is writable");
        std::fs::write(path, text).expect("the test folder is writable");
    }
    let checkpoints = stage.path().join("checkpoints");
    drop(run_in(&checkpoints, "first"));
    let _held = run_in(&checkpoints, "held");
    for (line, code, wrong, next) in [&COMMAND_LINE[..], &CONFIGURATION, &FILES, &RUNS].concat() {
        let ran = run(&stage, line);
        assert_eq!(ran.code, Some(code.code().into()), "{line}: {}", ran.stderr);
        for part in [wrong, next] {
            assert!(ran.stderr.contains(part), "{line}: missing {part:?} in:\n{}", ran.stderr);
        }
        for word in NEVER {
            assert!(!ran.stderr.contains(word), "{line}: {word:?} in:\n{}", ran.stderr);
        }
        assert_nothing_twice(&ran.stderr);
    }
    assert!(!checkpoints.join("new").exists(), "a refused run left a folder");
}

#[test]
fn bare_call_prints_help_and_verbs_without_a_run_name_the_next_command() {
    let stage = Stage::new(Worker::None);
    let ran = run(&stage, "");
    ran.exits_with(ExitCode::Success);
    assert!(ran.stdout.contains("Usage: locdiff-launch") && ran.stderr.is_empty(), "{}{}", ran.stdout, ran.stderr);
    for verb in ["status", "runs"] {
        let ran = run(&stage, verb);
        ran.exits_with(ExitCode::Success);
        assert_eq!(ran.stdout, "no runs in checkpoints; create one with `locdiff-launch train`\n", "{verb}");
    }
    for verb in ["checkpoint list", "checkpoint verify", "checkpoint export --out x", "eval", "eval --tune"] {
        let ran = run(&stage, verb);
        ran.exits_with(ExitCode::NoData).stderr_has("no runs in checkpoints; create one with `locdiff-launch train`");
    }
    let ran = run(&stage, "--run first status");
    ran.exits_with(ExitCode::NoData).stderr_has("no run `first` in checkpoints").stderr_has("`locdiff-launch train`");
}

#[test]
fn doctor_names_what_is_missing_and_the_next_command() {
    let stage = Stage::new(Worker::Real);
    let doctor = |next: &str| {
        let ran = run(&stage, "--device cpu doctor");
        ran.exits_with(ExitCode::Success);
        assert!(ran.stdout.ends_with(&format!("next: locdiff-launch --device cpu {next}\n")), "{}", ran.stdout);
        ran.stdout
    };
    let make = |name: &str| {
        let path = stage.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a file has a parent")).expect("the test folder is writable");
        std::fs::write(path, "").expect("the test folder is writable");
    };
    let text = doctor("demo");
    for part in ["warning shards.train ", "ok      GeoCLIP ", "none in checkpoints", "training needs shards"] {
        assert!(text.contains(part), "missing {part:?} in:\n{text}");
    }
    make("shards/demo/train/a.parquet");
    let text = doctor("train");
    assert!(text.contains("ok      shards.train ") && text.contains("warning shards.test "), "{text}");
    let text = run(&stage, "--device cpu --set retrieval.head=geoclip doctor").stdout;
    assert!(text.contains("warning GeoCLIP ") && text.contains("geoclip import"), "{text}");
    make("shards/geoclip/manifest.json");
    doctor("train");
    drop(run_in(&stage.path().join("checkpoints"), "first"));
    make("shards/demo/test/a.parquet");
    let text = doctor("eval --hybrid");
    assert!(text.contains("first in checkpoints") && text.contains("training can start here"), "{text}");
    let json = run(&stage, "--device cpu --json --set shards.train=mine doctor").exits_with(ExitCode::Success).json();
    let next =
        "locdiff-launch --device cpu --set shards.train=mine shards build --table FILE --embeddings FILE --out mine";
    assert_eq!((&json["ok"], &json["next"]), (&true.into(), &next.into()), "{json}");
}
