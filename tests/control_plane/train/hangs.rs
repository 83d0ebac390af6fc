//! Workers that hang, stop, panic or exit: each is found, named as the root cause and replaced, and leaves no trace in the numbers.

use std::time::Instant;

use locdiff_core::exit_code::ExitCode;

use super::support::{BASE, events, stage, trace, train};
use crate::stage::Ran;

/// Limits that end a hang soon, but leave a healthy worker enough time on a busy machine. A hang in a phase of data is found by
/// its own limit, a hang in a step by the peers, whose collective times out first.
const LIMITS: &str = "--set supervise.data_timeout_s=6 --set supervise.step_timeout_s=8 --set supervise.collective_timeout_s=7 \
    --set supervise.checkpoint_timeout_s=6 --set supervise.stop_timeout_s=1";

#[test]
fn stuck_worker_is_named_and_replaced_without_a_trace_in_the_numbers() {
    let stage = stage();
    let settings = "--set train.steps=9 --set checkpoint.every=3 --workers 3";
    train(&stage, "whole", settings).exits_with(ExitCode::Success);
    let whole = trace(&stage, "whole");
    for (run, fault, named) in [
        ("data", "hang@rank=1,step=7,phase=data", "in phase data of step 7"),
        ("step", "hang@rank=2,step=7", "in phase step of step 7"),
        ("stopped", "stop@rank=0,step=7", "no progress for"),
        ("panicked", "panic@rank=1,step=7", "(exit code 101)"),
        ("left", "exit@rank=2,step=7,code=3", "(exit code 3)"),
    ] {
        let line = format!("{BASE} --run {run} {settings} {LIMITS} --max-restarts 1 train --inject {fault}");
        // On a busy machine, a backtrace may take longer than the launcher waits for the root cause.
        let output = stage.command(&line).env("RUST_BACKTRACE", "0").output().expect("the launcher runs");
        let ran = Ran::from(output);
        ran.exits_with(ExitCode::Success);
        assert_eq!(ran.json()["restarts"], 1, "{run}");
        let failures = events(&stage, run, "failed");
        let error = failures[0]["error"].as_str().expect("a report");
        let rank = &fault[fault.find("rank=").expect("a rank") + 5..][..1];
        let first = error.lines().next().expect("a line");
        assert!(first.starts_with(&format!("worker rank {rank} (pid ")) && first.contains(named), "{run}: {error}");
        assert!(trace(&stage, run) == whole, "{run} changed the numbers");
    }
}

#[test]
fn only_worker_of_a_run_that_hangs_is_replaced() {
    let stage = stage();
    let settings = "--set train.steps=6 --set checkpoint.every=3 --workers 1";
    let started = Instant::now();
    let fault = "--inject hang@rank=0,step=5,phase=data";
    let ran = stage.run(&format!("{BASE} --run alone {settings} {LIMITS} --max-restarts 1 train {fault}"));
    ran.exits_with(ExitCode::Success).stderr_has("no progress for").stderr_has("supervise.data_timeout_s allows 6.0 s");
    assert_eq!((ran.json()["restarts"].as_u64(), trace(&stage, "alone").len()), (Some(1), 6));
    assert!(started.elapsed().as_secs() < 120, "{:?}", started.elapsed());
}

#[test]
fn contradicting_limits_are_refused() {
    let stage = stage();
    let ran = train(&stage, "never", "--set supervise.step_timeout_s=5 --set supervise.collective_timeout_s=5");
    ran.exits_with(ExitCode::Config)
        .stderr_has("supervise.step_timeout_s: is 5, wanted more than supervise.collective");
}
