//! Tests of how commands choose a run, and of what they leave behind.

use std::path::PathBuf;
use std::process::Stdio;

use locdiff_core::exit_code::ExitCode;
use nix::sys::signal::Signal;

use crate::small_shards;
use crate::stage::{Ran, Stage, Worker, eventually, is_alive, signal, wait};

/// Settings for a model that trains in about a second.
const SMALL: &str = "--device cpu --json --workers 1 --set model.degree=8 --set loss.anchors=64 --set train.global_batch=64 \
    --set train.steps=8 --set train.warmup_steps=0 --set train.log_every=1 --set checkpoint.every=2 --set checkpoint.keep=9 \
    --set shards.train=shards/small --set shards.validation=\"\" --set shards.test=shards/small --set eval.after_train=false \
    --set eval.samples=2 --set eval.sampler_steps=2 --set eval.anchors=grid --set eval.grid_points=2000 --set retrieval.head=knn";

fn stage() -> Stage {
    let stage = Stage::new(Worker::Real);
    small_shards::build(&stage, "small", 0..128, 1, false);
    stage
}

/// The folders in `checkpoints`, sorted by name, hidden ones included.
fn folders(stage: &Stage) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(stage.path().join("checkpoints")).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    found.sort();
    found
}

#[test]
fn same_command_after_ctrl_c_resumes_the_run_and_new_starts_another() {
    let stage = stage();
    let line = format!("{SMALL} train");
    let mut launcher = stage
        .command(&format!("{line} --inject slow@rank=0,step=1,ms=600"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the launcher can be started");
    let has_checkpoint = || folders(&stage).iter().any(|run| run.join("step-00000002").exists());
    eventually("the run has a checkpoint", has_checkpoint);
    stage.run("--device cpu --json checkpoint list").stderr_has(" of 8 steps; it is being trained");
    signal(launcher.id(), Signal::SIGINT);
    assert_eq!(wait(&mut launcher), Some(130));
    let ran = stage.run("--device cpu --json --set eval.checkpoint=2 eval");
    ran.exits_with(ExitCode::Success)
        .stderr_has("  this run has done ")
        .stderr_has(" of 8 steps; `train` continues it");
    let status = stage.run("--json status").json();
    assert_eq!(status["runs"][0]["goodput"]["lost_s"], 0.0, "a clean stop lost steps: {status}");

    let resumed = stage.run(&line);
    let first = folders(&stage);
    assert_eq!(first.len(), 1, "{first:?}");
    let name = first[0].file_name().expect("a run has a name").to_string_lossy();
    assert!(name.starts_with("run-"), "a run on other data is named after the demo: {name}");
    resumed.exits_with(ExitCode::Success).stderr_has(&format!("resuming {name}, the newest unfinished run"));
    let result = resumed.json();
    assert!(result["from_step"].as_u64() >= Some(2) && result["step"] == 8, "{result}");

    // The run has ended, so the same command starts another run. Wait before each new run, because its name contains
    // the time in whole seconds.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    stage.run(&line).exits_with(ExitCode::Success);
    assert_eq!(folders(&stage).len(), 2, "the same command resumed the ended run");
    let failing = format!("{SMALL} --max-restarts 0 train");
    std::thread::sleep(std::time::Duration::from_millis(1100));
    stage.run(&format!("{failing} --inject exit@rank=0,step=5,code=3")).exits_with(ExitCode::WorkerFailed);
    assert_eq!(folders(&stage).len(), 3, "a command with another configuration resumed a run");
    std::thread::sleep(std::time::Duration::from_millis(1100));
    stage.run(&format!("{SMALL} --max-restarts 0 train --new")).exits_with(ExitCode::Success);
    assert_eq!(folders(&stage).len(), 4, "--new resumed a run");
}

#[test]
fn evaluation_stopped_by_ctrl_c_names_the_command_that_evaluates() {
    let stage = stage();
    let line = format!(
        "{SMALL} --run mine --set eval.after_train=true --set eval.sampler_steps=200 --set eval.samples=64 train"
    );
    let mut command = stage.command(&line);
    let launcher = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the launcher can be started");
    eventually("the run is being evaluated", || {
        assert!(is_alive(launcher.id()), "the launcher ended before the evaluation");
        let status = std::fs::read_to_string(stage.path().join("checkpoints/mine/status.json"));
        status.is_ok_and(|status| status.contains("\"evaluating\""))
    });
    signal(launcher.id(), Signal::SIGINT);
    let ran = Ran::from(launcher.wait_with_output().expect("the launcher is a child of the test"));
    ran.exits_with(ExitCode::Interrupted).stderr_has("mine is trained; the same command evaluates it");
}

#[test]
fn run_is_extended_with_its_own_configuration_listed_and_exported() {
    let stage = stage();
    stage.run("runs").exits_with(ExitCode::Success);
    stage.run(&format!("{SMALL} --run mine train")).exits_with(ExitCode::Success);
    let config = || std::fs::read_to_string(stage.path().join("checkpoints/mine/config.toml")).expect("it is a run");
    let before = config();

    let ran = stage.run("--device cpu --run mine train");
    ran.exits_with(ExitCode::Success);
    assert!(ran.stdout.contains("is at its last step, 8 of 8"), "{}", ran.stdout);
    let ran = stage.run("--device cpu --json --workers 2 --run mine train");
    assert_eq!(ran.exits_with(ExitCode::Success).json()["from_step"], 8, "workers were started");
    assert_eq!(
        folders(&stage)[0].join("logs").read_dir().expect("the run has logs").count(),
        1,
        "another attempt began"
    );
    let ran = stage.run("--device cpu --run mine --set train.steps=4 train");
    ran.exits_with(ExitCode::RunDiffers).stderr_has("has done 8 steps, more than train.steps = 4");
    stage.run("--device cpu --run mine train --new").exits_with(ExitCode::Exists).stderr_has("leave out --new");
    assert_eq!(config(), before, "a refused command changed the configuration");

    let ran = stage.run("--device cpu --json --run mine --set train.steps=1e1 train");
    let result = ran.exits_with(ExitCode::Success).json();
    assert_eq!((&result["from_step"], &result["step"]), (&8.into(), &10.into()), "{result}");

    // A run whose last checkpoint is gone trains the missing steps again.
    std::fs::remove_dir_all(stage.path().join("checkpoints/mine/step-00000010")).expect("the checkpoint exists");
    let result = stage.run("--device cpu --json --run mine train").exits_with(ExitCode::Success).json();
    assert_eq!((&result["from_step"], &result["step"]), (&8.into(), &10.into()), "{result}");

    let ran = stage.run("--json runs");
    assert_eq!((&ran.json()["runs"][0]["run"], &ran.json()["runs"][0]["step"]), (&"mine".into(), &10.into()));
    let ran = stage.run("runs");
    let (head, row) = ran.stdout.split_once('\n').expect("the list has rows");
    assert_eq!(head.split_whitespace().collect::<Vec<_>>(), ["run", "step", "GeoScore", "state", "age"]);
    assert!(row.starts_with("mine") && row.contains("10 of 10") && row.contains("ended"), "{row}");

    // The newest run has no checkpoint, so it is not the one to export or evaluate.
    let line = format!("{SMALL} --run mines --max-restarts 0 train --inject exit@rank=0,step=1,code=3");
    let ran = stage.run(&line);
    ran.exits_with(ExitCode::WorkerFailed).stderr_has("new run checkpoints/mines; runs with similar names: mine");
    stage.run("checkpoint export --out weights.safetensors").exits_with(ExitCode::Success);
    assert!(stage.path().join("weights.safetensors").exists());
    let ran = stage.run("checkpoint export --out none/weights.safetensors");
    ran.exits_with(ExitCode::NoData).stderr_has("--out: there is no folder none");
    assert!(!stage.path().join("none").exists(), "the refused export created the folder");

    let ran = stage.run("--device cpu --json --set eval.checkpoint=8 eval");
    let checkpoint = ran.exits_with(ExitCode::Success).json()["checkpoint"].clone();
    assert!(checkpoint.as_str().is_some_and(|path| path.ends_with("mine/step-00000008")), "{checkpoint}");
    let ran = stage.run("--device cpu --set eval.checkpoint=9 eval");
    ran.exits_with(ExitCode::NoData).stderr_has("no checkpoint of step 9").stderr_has("steps with a checkpoint: 2, ");
    let ran = stage.run("--run mine config show");
    assert!(ran.stdout.contains("train = \"shards/small\""), "this is not the run's configuration: {}", ran.stdout);
    small_shards::build(&stage, "other", 500..628, 1, false);
    let ran = stage.run("--device cpu --run mine --set shards.train=shards/other --set train.steps=12 train");
    ran.exits_with(ExitCode::DataChanged).stderr_has("train on this data in a new run (`--run NAME`)");
    assert!(!ran.stderr.contains("resume with"), "{}", ran.stderr);
    let ran = stage.run("--device cpu --set shards.train=shards/small train");
    let warning = "shards.train was set to shards/small, but shards.validation is still shards/demo/validation";
    ran.exits_with(ExitCode::NoData).stderr_has(warning);
    let ran = stage.run("--run mine config check --set shards.val=x --set model.dropout=1.5");
    ran.exits_with(ExitCode::Config).stderr_has("did you mean shards.validation?").stderr_has("model.dropout");
    stage.run("--set checkpoint.run=mine train --new").exits_with(ExitCode::Exists);
    let ran = stage.run("--device cpu --run mien eval");
    ran.exits_with(ExitCode::NoData).stderr_has("no run `mien` in checkpoints; did you mean mine or mines?");
}

#[test]
fn refused_start_leaves_no_run_and_removes_nothing_that_was_there() {
    let stage = stage();
    let bad = "--set train.global_batch=1000";
    let ran = stage.run(&format!("{SMALL} --run mine {bad} train"));
    assert!(ran.code.is_some_and(|code| code != 0), "{}", ran.stderr);
    assert_eq!(folders(&stage), Vec::<PathBuf>::new(), "{}", ran.stderr);
    std::fs::create_dir(stage.path().join("shards/cut")).expect("the test folder is writable");
    std::fs::write(stage.path().join("shards/cut/a.parquet"), "PAR1").expect("the test folder is writable");
    let ran = stage.run(&format!("{SMALL} --run mine --set shards.train=shards/cut train"));
    assert!(ran.code.is_some_and(|code| code != 0), "{}", ran.stderr);
    assert_eq!(folders(&stage), Vec::<PathBuf>::new(), "{}", ran.stderr);
    let own = stage.path().join("checkpoints/mine");
    std::fs::create_dir_all(&own).expect("the test folder is writable");
    std::fs::write(own.join("notes.txt"), "mine").expect("the test folder is writable");
    stage.run(&format!("{SMALL} --run mine {bad} train"));
    assert!(own.join("notes.txt").exists(), "an existing folder was removed");
    // Once the mistake is corrected, the same run can be trained.
    stage.run(&format!("{SMALL} --run mine train")).exits_with(ExitCode::Success);
}

#[test]
fn file_builds_on_its_preset_and_verbs_check_only_what_they_use() {
    let stage = stage();
    let write = |name: &str, text: &str| std::fs::write(stage.path().join(name), text).expect("the folder is writable");
    write("columns.toml", "[shards]\nlatitude_column = \"lat\"\n");
    write("named.toml", "preset = \"l23\"\n[train]\nsteps = 7\n");
    write("plain.toml", "preset = \"\"\n");
    let degree = |flags: &str| {
        let ran = stage.run(&format!("--device cpu --json {flags} config show"));
        ran.exits_with(ExitCode::Success).json()["model"]["degree"].clone()
    };
    assert_eq!(degree("--config columns.toml"), 15, "the file does not build on `demo`, the default without a GPU");
    assert_eq!(degree("--config named.toml"), 23);
    assert_eq!(degree("--config plain.toml"), 47);
    assert_eq!(degree("--config l23 --config columns.toml"), 23);
    let ran =
        stage.run("--device cpu --json --config named.toml --config columns.toml --set train.steps=2e3 config show");
    assert_eq!(ran.json()["train"]["steps"], 2000);
    for later in ["--config columns.toml --config named.toml", "--config columns.toml --config demo"] {
        let ran = stage.run(&format!("{later} config show"));
        ran.exits_with(ExitCode::Config).stderr_has("only the first --config may be or name a preset");
    }
    write("wrong.toml", "preset = \"dmeo\"\n");
    let ran = stage.run("--config wrong.toml config show");
    ran.exits_with(ExitCode::Config).stderr_has("preset: is \"dmeo\", wanted a preset: demo, l23");

    let bad = "--set train.learning_rate=-1 --set eval.samples=0";
    stage.run(&format!("--device cpu {bad} shards inspect shards/small")).exits_with(ExitCode::Success);
    stage.run(&format!("--device cpu {bad} --set train.steps=no runs")).exits_with(ExitCode::Config);
    stage.run(&format!("--device cpu {bad} train")).exits_with(ExitCode::Config).stderr_has("configuration: 2 errors");
}
