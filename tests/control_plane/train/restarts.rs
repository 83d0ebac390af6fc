//! The tests check which failures lead to a restart, and what the report about a failure says. The rules are in
//! docs/OPERATIONS.md.

use std::process::Stdio;
use std::time::{Duration, Instant};

use locdiff_core::exit_code::ExitCode;
use nix::sys::signal::Signal;
use serde_json::Value;

use super::support::{BASE, events, run_dir, stage, trace};
use crate::stage::{Ran, Stage, Worker, eventually, signal, wait};

/// A stage with fake workers that behave as `mode` says. They read no shards, so the only shard is an empty file.
fn fake(mode: &'static str) -> Stage {
    let stage = Stage::new(Worker::Fake(mode));
    std::fs::create_dir_all(stage.path().join("shards/small")).expect("the test folder is writable");
    std::fs::write(stage.path().join("shards/small/a.parquet"), "").expect("the test folder is writable");
    stage
}

fn line(more: &str) -> String {
    format!("{BASE} --run run --workers 2 --set eval.after_train=false {more} train")
}

fn failure(stage: &Stage) -> Value {
    let text = std::fs::read_to_string(run_dir(stage, "run").join("failure.json")).expect("the run failed");
    serde_json::from_str(&text).expect("the file is valid JSON")
}

#[test]
fn outage_is_tried_again_without_using_up_the_restarts() {
    let stage = fake("outage-twice@0");
    let ran = stage.run(&line("--max-restarts 1"));
    ran.exits_with(ExitCode::Success).stderr_has("the outage has lasted 0 s of the 1800 s").stderr_has("after 1 s");
    assert_eq!(ran.json()["restarts"], 2);
    let kinds: Vec<Value> = events(&stage, "run", "failed").into_iter().map(|event| event["kind"].clone()).collect();
    assert_eq!(kinds, ["outage", "outage"]);
}

#[test]
fn outage_that_lasts_ends_the_run_with_its_exit_code() {
    let stage = fake("outage@0");
    let ran = stage.run(&line("--set supervise.outage_patience_s=0.5"));
    ran.exits_with(ExitCode::Io).stderr_has("Input/output error").stderr_has("not restarted: the outage has lasted");
    assert_eq!((&failure(&stage)["kind"], &failure(&stage)["exit_code"]), (&"outage".into(), &16.into()));
}

#[test]
fn full_disk_is_final() {
    let stage = fake("full-disk@0");
    stage.run(&line("")).exits_with(ExitCode::Io).stderr_has("No space left").stderr_has("resume with: ");
    assert_eq!((&failure(&stage)["restarts"], &failure(&stage)["kind"]), (&0.into(), &"final".into()));
}

#[test]
fn crash_at_the_same_step_twice_is_final() {
    let stage = fake("crash@1");
    let ran = stage.run(&line("--max-restarts 9"));
    ran.exits_with(ExitCode::WorkerFailed)
        .stderr_has("was killed by SIGSEGV, an invalid memory access")
        .stderr_has("not restarted: SIGSEGV at step 0 for the second time");
    assert_eq!(failure(&stage)["restarts"], 1);
}

#[test]
fn interrupt_ends_the_wait_before_a_restart() {
    let stage = fake("outage@0");
    let mut launcher = stage.command(&line("")).stderr(Stdio::null()).spawn().expect("the launcher can be started");
    eventually("the launcher begins its wait of two seconds", || {
        run_dir(&stage, "run").join("events.jsonl").exists() && events(&stage, "run", "failed").len() >= 3
    });
    let interrupted = Instant::now();
    signal(launcher.id(), Signal::SIGINT);
    assert_eq!(wait(&mut launcher), Some(ExitCode::Interrupted.code().into()));
    assert!(interrupted.elapsed() < Duration::from_millis(1900), "the wait lasted {:?}", interrupted.elapsed());
}

#[test]
fn checkpoint_refills_the_restarts() {
    let stage = stage();
    let settings = "--set train.steps=9 --set checkpoint.every=2 --workers 2 --max-restarts 1";
    let faults = "--inject kill@rank=1,step=3 --inject kill@rank=0,step=5 --inject kill@rank=1,step=9";
    let ran = stage.run(&format!("{BASE} --run run {settings} train {faults}"));
    ran.exits_with(ExitCode::Success).stderr_has("restart 1 of at most 1 without progress");
    assert_eq!((ran.json()["restarts"].as_u64(), trace(&stage, "run").len()), (Some(3), 9));
}

#[test]
fn report_has_every_rank_and_the_command_that_resumes() {
    let stage = stage();
    let fault = "kill@rank=1,step=3";
    let ran =
        stage.run(&format!("{BASE} --run run --set train.steps=4 --workers 3 --max-restarts 0 train --inject {fault}"));
    ran.exits_with(ExitCode::WorkerFailed)
        .stderr_has("error: worker rank 1 (pid ")
        .stderr_has("was killed by SIGKILL during `train`")
        .stderr_has("\n  rank 0: ")
        .stderr_has("\n  rank 2: ")
        .stderr_has("cpu, phase ");
    let resume = ran.stderr.lines().find_map(|line| line.strip_prefix("  resume with: ")).expect("the line exists");
    assert!(resume.contains("--run run") && resume.ends_with("train") && !resume.contains("--inject"), "{resume}");
    let failure = failure(&stage);
    let ranks = failure["ranks"].as_array().expect("the failure lists the ranks");
    assert_eq!((ranks.len(), &ranks[1]["end"], &failure["kind"]), (3, &"killed by SIGKILL".into(), &"lost".into()));
    assert!(failure["first_cause"].as_str().is_some_and(|text| text.starts_with("worker rank 1 ")), "{failure}");
    // A shell must be able to run the command as it is printed.
    let again = std::process::Command::new("sh").args(["-c", resume]).current_dir(stage.path()).output();
    Ran::from(again.expect("the shell can be started")).exits_with(ExitCode::Success);
}

#[test]
fn unwritable_tensorboard_files_do_not_end_training() {
    let stage = stage();
    let run = run_dir(&stage, "run");
    std::fs::create_dir_all(&run).expect("the test folder is writable");
    std::fs::write(run.join("tensorboard"), "a file in place of the folder").expect("the test folder is writable");
    let ran = stage.run(&format!("{BASE} --run run --set train.steps=4 --workers 2 train"));
    ran.exits_with(ExitCode::Success).stderr_has("training continues without them");
    assert_eq!(ran.stderr.matches("cannot write TensorBoard's files").count(), 1, "{}", ran.stderr);
    assert_eq!((ran.json()["restarts"].as_u64(), trace(&stage, "run").len()), (Some(0), 4));
}

#[test]
fn unwritable_events_do_not_end_training() {
    let stage = fake("good");
    std::fs::create_dir_all(run_dir(&stage, "run").join("events.jsonl")).expect("the test folder is writable");
    let ran = stage.run(&line(""));
    ran.exits_with(ExitCode::Success);
    assert_eq!(ran.stderr.matches("cannot record an event").count(), 1, "{}", ran.stderr);
}
