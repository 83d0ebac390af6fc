//! Tests of silent corruption, damaged checkpoints and slow disks. A run must notice these faults. If the run recovers,
//! its losses and weights must equal those of an undisturbed run.

use locdiff_core::exit_code::ExitCode;

use super::support::{BASE, events, last_trace, run_dir, stage, tensors, trace, train};

const SETTINGS: &str = "--workers 4 --set train.steps=12 --set checkpoint.every=4";

#[test]
fn flipped_bit_is_blamed_on_its_rank_and_never_committed() {
    let stage = stage();
    train(&stage, "whole", SETTINGS).exits_with(ExitCode::Success);
    for (run, fault, more, named) in [
        ("weight", "flip@rank=2,step=6,in=weight", "", "step 8: the state of the model of rank 2 differs"),
        (
            "often",
            "flip@rank=1,step=6,in=weight",
            "--set train.replica_check_every=1",
            "step 6: the state of the model of rank 1",
        ),
        (
            "gradient",
            "flip@rank=3,step=6,in=gradient",
            "--set train.replay_check_every=2",
            "the gradient of rank 3 differs",
        ),
    ] {
        let ran = stage.run(&format!("{BASE} --run {run} {SETTINGS} {more} train --inject {fault}"));
        ran.exits_with(ExitCode::Success);
        let failures = events(&stage, run, "failed");
        let error = failures[0]["error"].as_str().expect("the event has an error text");
        assert!(failures.len() == 1 && error.lines().next().is_some_and(|first| first.contains(named)), "{error}");
        assert_eq!(last_trace(&stage, run), trace(&stage, "whole"), "{run}: the losses differ");
        assert_eq!(tensors(&run_dir(&stage, run)), tensors(&run_dir(&stage, "whole")), "{run}: the weights differ");
    }
}

#[test]
fn rank_that_corrupts_twice_ends_the_run() {
    let stage = stage();
    let faults = "--inject flip@rank=2,step=6,in=weight --inject flip@rank=2,step=7,in=weight";
    let ran = stage.run(&format!("{BASE} --run twice {SETTINGS} --set train.replica_check_every=1 train {faults}"));
    ran.exits_with(ExitCode::Corrupt).stderr_has("rank 2");
    assert_eq!(events(&stage, "twice", "checkpoint").len(), 1, "a checkpoint was committed after the first flip");
}

/// A run with checks must give the same bits as a run without checks, both in the checked steps and in the steps
/// between them.
#[test]
fn checks_do_not_change_the_numbers() {
    let stage = stage();
    for (run, layout) in [("flat", "--workers 2"), ("split", "--workers 4 --tensor-parallel 2")] {
        let settings = format!("{layout} --set train.steps=7 --set checkpoint.every=4 --set train.micro_batch=50");
        let checks = "--set train.replica_check_every=1 --set train.replay_check_every=3";
        let plain = format!("{run}-plain");
        train(&stage, &plain, &settings).exits_with(ExitCode::Success);
        train(&stage, run, &format!("{settings} {checks}")).exits_with(ExitCode::Success);
        assert_eq!(trace(&stage, run), trace(&stage, &plain), "{run}: the losses differ");
        assert_eq!(tensors(&run_dir(&stage, run)), tensors(&run_dir(&stage, &plain)), "{run}: the weights differ");
    }
}

#[test]
fn damaged_checkpoint_is_set_aside_and_the_run_goes_on_from_the_one_before() {
    let stage = stage();
    train(&stage, "whole", SETTINGS).exits_with(ExitCode::Success);
    let faults = "--inject corrupt-checkpoint@rank=0,step=6 --inject kill@rank=1,step=10";
    let ran = stage.run(&format!("{BASE} --run damaged {SETTINGS} train {faults}"));
    ran.exits_with(ExitCode::Success).stderr_has("step-00000008");
    let attempts = events(&stage, "damaged", "attempt");
    assert_eq!(attempts.last().expect("there was an attempt")["step"], 4, "wrong checkpoint: {attempts:?}");
    assert_eq!(trace(&stage, "damaged"), trace(&stage, "whole"), "the losses differ");
    assert_eq!(tensors(&run_dir(&stage, "damaged")), tensors(&run_dir(&stage, "whole")), "the weights differ");
}

/// Writing a checkpoint takes longer than the timeout of a collective. The run must put off the next checkpoint and
/// must not blame any worker.
#[test]
fn slow_disk_delays_a_checkpoint_and_nothing_else() {
    let stage = stage();
    let settings = "--workers 2 --set model.degree=5 --set train.steps=150 --set checkpoint.every=4 --set supervise.collective_timeout_s=1 \
        --set supervise.step_timeout_s=3";
    let fault = "--inject slow-disk@rank=1,step=3,seconds=2";
    let ran = stage.run(&format!("{BASE} --run slow {settings} train {fault}"));
    ran.exits_with(ExitCode::Success).stderr_has("is put off");
    assert_eq!(ran.json()["restarts"], 0, "the slow disk led to a restart");
    assert!(events(&stage, "slow", "checkpoint").len() > 1);
}

/// If a checkpoint write takes longer than `supervise.checkpoint_timeout_s`, the run must end with a report instead of
/// hanging.
#[test]
fn stuck_checkpoint_write_is_reported_by_its_own_limit() {
    let stage = stage();
    let settings = "--workers 2 --set train.steps=100000 --set checkpoint.every=4 --set supervise.checkpoint_timeout_s=2 \
        --max-restarts 0";
    let fault = "--inject slow-disk@rank=1,step=3,seconds=600";
    let ran = stage.run(&format!("{BASE} --run stuck {settings} train {fault}"));
    ran.exits_with(ExitCode::Io).stderr_has("the checkpoint of step 4 is still not written after 2 s");
}

/// A full disk ends the run. After a failed read or an out-of-memory kill, the run is tried again. The report names the
/// fault.
#[test]
fn faults_of_disk_and_memory_are_told_apart() {
    let stage = stage();
    let settings = "--workers 2 --set train.steps=8 --set checkpoint.every=4";
    let ran = stage.run(&format!("{BASE} --run full {settings} train --inject enospc@rank=1,step=2"));
    ran.exits_with(ExitCode::Io).stderr_has("No space left on device").stderr_has("resume with:");
    assert_eq!(events(&stage, "full", "attempt").len(), 1, "the run was restarted");
    let ran = stage.run(&format!("{BASE} --run unread {settings} train --inject eio@rank=1,step=6"));
    ran.exits_with(ExitCode::Success).stderr_has("Input/output error").stderr_has("rank 1: ");
    let events_file = stage.path().join("memory.events");
    std::fs::write(&events_file, "oom_kill 3\n").expect("the test folder is writable");
    let mut command = stage.command(&format!("{BASE} --run killed {settings} train --inject oom@rank=0,step=6"));
    let output = command.env("LOCDIFF_MEMORY_EVENTS", &events_file).output().expect("the launcher can be started");
    let ran = crate::stage::Ran::from(output);
    ran.exits_with(ExitCode::Success).stderr_has("OOM killer");
    for run in ["unread", "killed"] {
        assert_eq!(events(&stage, run, "attempt").len(), 2, "{run}: wrong number of attempts");
    }
}
