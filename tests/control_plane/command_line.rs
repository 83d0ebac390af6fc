//! Tests of messages and exit codes for common user errors.

use locdiff_core::exit_code::ExitCode;

use crate::stage::{Ran, Stage, Worker};

#[test]
fn missing_gpus_are_an_error_that_suggests_cpu_workers() {
    let stage = Stage::new(Worker::None);
    // An empty list hides all GPUs that the machine may have.
    let output =
        stage.command("--gpus 4 train").env("CUDA_VISIBLE_DEVICES", "").output().expect("the launcher can be started");
    let ran = crate::stage::Ran::from(output);
    ran.exits_with(ExitCode::Device).stderr_has("4 GPU(s) requested").stderr_has("`--workers 4 --device cpu`");
}

#[test]
fn unknown_field_is_named_with_the_closest_match() {
    let stage = Stage::new(Worker::None);
    std::fs::write(stage.path().join("my.toml"), "[train]\nsteps = 10\nwarmup_steps = 0\nglobal_bach = 8\n")
        .expect("the test folder is writable");
    let ran = stage.run("--config my.toml config check");
    ran.exits_with(ExitCode::Config).stderr_has("train.global_bach: unknown field; did you mean train.global_batch?");
    ran.stderr_has("my.toml:4");
    stage.run("--set model.degre=3 train").exits_with(ExitCode::Config).stderr_has("did you mean model.degree?");
}

#[test]
fn malformed_toml_is_reported_with_file_and_line() {
    let stage = Stage::new(Worker::None);
    std::fs::write(stage.path().join("my.toml"), "[train]\nsteps = = 10\n").expect("the test folder is writable");
    stage.run("--config my.toml train").exits_with(ExitCode::Config).stderr_has("my.toml:2: malformed TOML");
    stage.run("--config none.toml train").exits_with(ExitCode::Config).stderr_has("none.toml: No such file");
}

#[test]
fn missing_worker_is_reported_with_its_path() {
    let stage = Stage::new(Worker::None);
    let ran = stage.run("--device cpu self-check");
    ran.exits_with(ExitCode::WorkerMissing).stderr_has("locdiff-worker: No such file").stderr_has("make build");
    std::fs::write(stage.path().join("locdiff-worker"), "text").expect("the test folder is writable");
    stage.run("--device cpu self-check").exits_with(ExitCode::WorkerMissing).stderr_has("not an executable file");
}

#[test]
fn unimplemented_verb_has_its_own_exit_code() {
    let stage = Stage::new(Worker::None);
    let ran = stage.run("--device cpu shards embed photos --out x");
    ran.exits_with(ExitCode::NotYet).stderr_has("is not implemented in this version");
}

#[test]
fn options_for_several_nodes_are_checked() {
    let stage = Stage::new(Worker::None);
    for address in ["host", ":1234", "host:0", "host:port"] {
        let ran = stage.run(&format!("--device cpu --rendezvous {address} config check"));
        ran.exits_with(ExitCode::Config).stderr_has("--rendezvous").stderr_has("wanted HOST:PORT");
    }
    stage.run("--device cpu --nnodes 2 --node-rank 2 config check").exits_with(ExitCode::Config);
    stage.run("--device cpu --nnodes 2 status").exits_with(ExitCode::Usage).stderr_has("run on several nodes");
    stage.run("--device cpu --node-rank 1 self-check").exits_with(ExitCode::Usage).stderr_has("--nnodes");
    stage.run("--device cpu --nnodes 2 self-check").exits_with(ExitCode::Usage).stderr_has("token");
    // A scheduler may number processes that do not work together.
    let output = stage.command("--device cpu config check").env("JOB_COMPLETION_INDEX", "3").output();
    Ran::from(output.expect("the launcher can be started")).exits_with(ExitCode::Success);
}

#[test]
fn invalid_command_line_is_a_usage_error() {
    let stage = Stage::new(Worker::None);
    stage.run("trian").exits_with(ExitCode::Usage);
    stage.run("--gpus 2 --device cpu train").exits_with(ExitCode::Usage).stderr_has("--workers N --device cpu");
    stage.run("--json").exits_with(ExitCode::Usage).stderr_has("no verb given");
}

#[test]
fn json_result_is_one_object_on_the_last_line_even_for_errors() {
    let stage = Stage::new(Worker::None);
    let ran = stage.run("--json --set model.degree=0 train");
    ran.exits_with(ExitCode::Config);
    let json = ran.json();
    assert_eq!((json["ok"].as_bool(), json["exit_code"].as_i64()), (Some(false), Some(10)), "{json}");
    assert_eq!(ran.stdout.lines().count(), 1, "{}", ran.stdout);
    for line in ["--json", "--json --nope", "--json --workers abc train", "train --json --gpus 4 --workers 3"] {
        let ran = stage.run(line);
        ran.exits_with(ExitCode::Usage);
        assert_eq!(ran.json()["exit_code"], 2, "{line}");
    }
    let shown = stage.run("--json --device cpu config show").json();
    assert_eq!(shown["model"]["degree"], 15, "the degree does not come from the preset `demo`: {shown}");
}

#[test]
fn flags_override_set_and_set_overrides_the_file() {
    let stage = Stage::new(Worker::None);
    let text = "[parallel]\nworkers = 2\ntensor = 2\n";
    std::fs::write(stage.path().join("my.toml"), text).expect("the test folder is writable");
    let line = "config show --config my.toml --set parallel.workers=4 --set parallel.tensor=4 --workers 8 --device cpu";
    let text = stage.run(line).stdout;
    let value_of = |key: &str| {
        let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_else(|| panic!("no {key} in:\n{text}"));
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(value_of("workers"), "workers = 8 # --workers");
    assert_eq!(value_of("tensor "), "tensor = 4 # --set");
    assert_eq!(value_of("threads"), "threads = \"auto\" # default");
}

#[test]
fn launcher_does_not_link_libtorch() {
    let stage = Stage::new(Worker::None);
    let output =
        std::process::Command::new("ldd").arg(stage.path().join("locdiff-launch")).output().expect("ldd is installed");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("libc.so") && !text.contains("torch") && !text.contains("cuda"), "{text}");
}

#[test]
fn completions_include_the_verbs() {
    let stage = Stage::new(Worker::None);
    for shell in ["bash", "zsh", "fish"] {
        let ran = stage.run(&format!("completions {shell}"));
        ran.exits_with(ExitCode::Success);
        assert!(ran.stdout.contains("doctor") && ran.stdout.contains("tensor-parallel"), "{shell}");
    }
}

#[test]
fn unwritable_stdout_is_an_error() {
    let stage = Stage::new(Worker::None);
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("Linux has /dev/full");
    let output = stage.command("config schema").stdout(full).output().expect("the launcher can be started");
    assert_eq!(output.status.code(), Some(ExitCode::Io.code().into()));
}

#[test]
fn closed_stdout_pipe_does_not_panic() {
    let stage = Stage::new(Worker::None);
    let launcher = stage.path().join("locdiff-launch");
    let line = format!("{} config schema | true", launcher.display());
    let output = std::process::Command::new("sh").args(["-c", &line]).output().expect("the launcher can be started");
    assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"));
}
