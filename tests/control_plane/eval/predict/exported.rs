//! Tests of `predict` and `serve` with an exported file instead of a run.

use std::path::Path;
use std::process::Stdio;

use locdiff_core::exit_code::ExitCode;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::super::serve::{Service, numbers};
use super::super::support::{BASE, stage};
use crate::small_shards;
use crate::stage::{Ran, Stage, eventually, signal, wait};

/// Runs a command in a folder of the stage.
fn run_in(stage: &Stage, folder: &str, line: &str) -> Ran {
    let output = stage.command(line).current_dir(stage.path().join(folder)).output();
    Ran::from(output.expect("the launcher can be started"))
}

fn bytes(stage: &Stage, name: &str) -> Vec<u8> {
    std::fs::read(stage.path().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn write(stage: &Stage, name: &str, bytes: impl AsRef<[u8]>) {
    std::fs::write(stage.path().join(name), bytes).expect("the test folder is writable");
}

/// Changes the calibration of a run.
fn edit_calibration(stage: &Stage, run: &str, edit: impl FnOnce(&mut Value)) {
    let name = format!("checkpoints/{run}/eval/calibration.json");
    let mut saved: Value = serde_json::from_slice(&bytes(stage, &name)).expect("the calibration is JSON");
    edit(&mut saved["settings"]);
    write(stage, &name, saved.to_string());
}

#[test]
fn exported_file_gives_the_answers_of_its_run_without_the_run() {
    let stage = stage();
    small_shards::build(&stage, "validation", 4000..4400, 1, false);
    let validation = "--set shards.validation=shards/validation eval";
    for line in ["--calibrate", "--tune", "--calibrate --hybrid"] {
        stage.run(&format!("{validation} {line}")).exits_with(ExitCode::Success);
    }
    let photos: String = (1000..1030).map(|row| numbers(row) + "\n").collect();
    write(&stage, "photos.txt", photos);
    for (flag, name) in [("--density cells.parquet", "locdiff"), ("--hybrid", "hybrid")] {
        let ran = stage.run(&format!("--json predict shards/test --samples {flag} --out {name}.csv"));
        assert_eq!(ran.exits_with(ExitCode::Success).json()["calibrated"], true, "{name}");
    }
    let found = stage.run("checkpoint export --out model.safetensors --json").exits_with(ExitCode::Success).json();
    assert_eq!((&found["calibrated"], &found["calibrated_hybrid"]), (&true.into(), &true.into()), "{found}");
    // The file alone, in another folder: the run is gone.
    std::fs::create_dir(stage.path().join("else")).expect("the test folder is writable");
    std::fs::rename(stage.path().join("model.safetensors"), stage.path().join("else/moved.safetensors"))
        .expect("the file was written");
    std::fs::remove_dir_all(stage.path().join("checkpoints")).expect("the run exists");
    let (file, train) = ("--model moved.safetensors", "--set shards.train=../shards/train");
    for (flag, name) in [("--density cells.parquet", "locdiff"), ("--hybrid", "hybrid")] {
        let line = format!("--json {train} predict {file} ../shards/test --samples {flag} --out {name}.csv");
        let ran = run_in(&stage, "else", &line);
        let found = ran.exits_with(ExitCode::Success).json();
        assert_eq!((&found["calibrated"], &found["run"]), (&true.into(), &Value::Null), "{found}");
        assert_eq!(bytes(&stage, &format!("else/{name}.csv")), bytes(&stage, &format!("{name}.csv")), "{name}");
        assert_eq!(ran.stderr.contains("tuned.toml in moved.safetensors"), flag == "--hybrid", "{}", ran.stderr);
    }
    assert_eq!(bytes(&stage, "else/cells.parquet"), bytes(&stage, "cells.parquet"));
    // Settings override those of the file, and radii belong to their settings.
    let ran = run_in(&stage, "else", &format!("--json --set eval.samples=5 predict {file} ../shards/test --out x.csv"));
    assert_eq!(ran.exits_with(ExitCode::Success).stderr_has("export it again").json()["calibrated"], false);
    let ran = run_in(&stage, "else", &format!("predict {file} ../shards/test --hybrid --out x.csv --overwrite"));
    ran.exits_with(ExitCode::NoData).stderr_has("shards/train (shards.train)");
    serves_the_answers_of_predict(&stage, file);
    refusals_name_the_file_and_the_way_out(&stage, file);
}

fn serves_the_answers_of_predict(stage: &Stage, file: &str) {
    std::fs::copy(stage.path().join("else/moved.safetensors"), stage.path().join("moved.safetensors"))
        .expect("the file can be copied");
    let mut command = stage.command(&format!("predict {file} -"));
    let photos = std::fs::File::open(stage.path().join("photos.txt")).expect("the file was written");
    let ran = Ran::from(command.stdin(photos).output().expect("the launcher can be started"));
    let lines: Vec<&str> = ran.exits_with(ExitCode::Success).stdout.lines().collect();
    assert!(lines.len() == 30 && !lines[0].contains("\"radius_50_km\":null"), "{lines:?}");
    let service = Service::start(stage, file);
    let embeddings: Vec<String> = (1000..1030).map(numbers).collect();
    let body = format!("{{\"embeddings\": [{}]}}", embeddings.join(","));
    assert_eq!(service.post(&body), (200, format!("{{\"rows\":[{}]}}\n", lines.join(","))));
    assert_eq!(service.end(Signal::SIGINT), Some(ExitCode::Interrupted.code().into()));
}

fn refusals_name_the_file_and_the_way_out(stage: &Stage, file: &str) {
    let predict = |file: &str| stage.run(&format!("predict --model {file} shards/test --out refused.csv"));
    let whole = bytes(stage, "moved.safetensors");
    let mut flipped = whole.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 4;
    write(stage, "flipped.safetensors", flipped);
    predict("flipped.safetensors")
        .exits_with(ExitCode::Corrupt)
        .stderr_has("--model: flipped.safetensors: the file is damaged or cut short")
        .stderr_has("export the run again");
    write(stage, "short.safetensors", &whole[..whole.len() - 1]);
    predict("short.safetensors").exits_with(ExitCode::Corrupt).stderr_has("short.safetensors");
    let header = r#"{"__metadata__":{"format":"locdiff-export-1"}}"#;
    write(stage, "old.safetensors", [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat());
    predict("old.safetensors")
        .exits_with(ExitCode::BadData)
        .stderr_has("old.safetensors: this export is from an older version")
        .stderr_has("checkpoint export RUN --out FILE");
    predict("photos.txt").exits_with(ExitCode::Corrupt).stderr_has("photos.txt: not a safetensors file, or cut short");
    predict("move.safetensors").exits_with(ExitCode::Io).stderr_has("did you mean moved.safetensors?");
    predict("shards").exits_with(ExitCode::Usage).stderr_has("for a run, use --run NAME instead");
    for (line, part) in [
        (format!("--run small predict {file} shards/test"), "checkpoint.run names a run, but --model names a file"),
        (
            format!("--set eval.checkpoint=40 predict {file} shards/test"),
            "eval.checkpoint names a checkpoint of a run, but",
        ),
        (format!("eval {file}"), "`predict --model moved.safetensors SHARDS --out answers.csv`"),
    ] {
        stage.run(&line).exits_with(ExitCode::Usage).stderr_has(part);
    }
    assert!(!stage.path().join("refused.csv").exists() && !stage.path().join("refused.csv.partial").exists());
}

#[test]
fn interrupted_predictions_go_on_with_the_same_model_only() {
    let stage = stage();
    let other = BASE.replace("--run small", "--run other --workers 1 --set train.seed=7");
    stage.run(&format!("{other} --set eval.after_train=false train")).exits_with(ExitCode::Success);
    small_shards::build(&stage, "many", 1000..3000, 1, false);
    for run in ["small", "other"] {
        let ran = stage.run(&format!("checkpoint export {run} --out {run}.safetensors"));
        ran.exits_with(ExitCode::Success);
        assert!(ran.stdout.contains("no calibration, so predictions have no radii"), "{}", ran.stdout);
    }
    let predict = |model: &str, out: &str| format!("--workers 2 predict {model} shards/many --out {out}.parquet");
    stage.run(&predict("--run small", "whole")).exits_with(ExitCode::Success);
    let file = |name: &str| stage.path().join(name);
    std::fs::copy(file("small.safetensors"), file("model.safetensors")).expect("the file was written");
    let mut command = stage.command(&predict("--model model.safetensors", "out"));
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the launcher can start");
    eventually("a piece is complete", || {
        let entries = std::fs::read_dir(file("out.parquet.partial")).into_iter().flatten().flatten();
        entries.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with("piece-"))
    });
    signal(child.id(), Signal::SIGKILL);
    wait(&mut child);
    // Another model under the same name, and the same model under another name.
    std::fs::copy(file("other.safetensors"), file("model.safetensors")).expect("the file was written");
    let ran = stage.run(&predict("--model model.safetensors", "out"));
    ran.exits_with(ExitCode::Exists).stderr_has("another value of `checkpoint`");
    let ran = stage.run(&predict("--model small.safetensors", "out"));
    ran.exits_with(ExitCode::Success);
    assert!(ran.stdout.contains("resuming: "), "{}", ran.stdout);
    assert_eq!(bytes(&stage, "out.parquet"), bytes(&stage, "whole.parquet"));
    calibrations_belong_to_their_checkpoint(&stage);
}

/// `stage` has two runs with a checkpoint of the same step.
fn calibrations_belong_to_their_checkpoint(stage: &Stage) {
    small_shards::build(stage, "validation", 4000..4400, 1, false);
    let calibrate = "--run small --set shards.validation=shards/validation eval --calibrate";
    stage.run(calibrate).exits_with(ExitCode::Success);
    let folder = stage.path().join("checkpoints/other/eval");
    std::fs::create_dir_all(&folder).expect("the run exists");
    let own = stage.path().join("checkpoints/small/eval/calibration.json");
    std::fs::copy(own, folder.join("calibration.json")).expect("the run is calibrated");
    let of_other = |part: &str| {
        let ran = stage.run("--json --run other predict shards/test --out x.csv --overwrite");
        let said = unwrapped(&ran.exits_with(ExitCode::Success).stderr);
        assert!(said.contains(part) && said.contains("`eval --calibrate` measures the radii"), "{said}");
        assert_eq!(ran.json()["calibrated"], false);
        let ran = stage.run("checkpoint export other --out x.safetensors --overwrite --json");
        let said = unwrapped(&ran.exits_with(ExitCode::Success).stderr);
        assert!(said.contains("not exported: ") && said.contains(part), "{said}");
        assert_eq!(ran.json()["calibrated"], false);
    };
    of_other("was measured with another checkpoint of the same step");
    // Older versions recorded only the step.
    edit_calibration(stage, "other", |settings| drop(settings.as_object_mut().map(|all| all.remove("checkpoint"))));
    of_other("is from an older version, which did not record the checkpoint");
    edit_calibration(stage, "other", |settings| settings["step"] = json!(39));
    of_other("was measured with another value of `step`");
    assert!(Path::new(&stage.path().join("x.safetensors")).exists());
}

/// Text without the line breaks of the terminal.
fn unwrapped(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
