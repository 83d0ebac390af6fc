//! Tests of workers that hang, stop, panic or exit. The launcher must name the faulty worker as the root cause and
//! restart all workers. The fault must not change the results.

use std::time::Instant;

use locdiff_core::exit_code::ExitCode;

use super::support::{BASE, events, stage, trace, train};
use crate::stage::Ran;

/// Limits that end a hang soon, but leave a healthy worker enough time on a busy machine. The limit of the phase `data`
/// ends a hang in this phase. The other workers detect a hang in a step, because their collective operation times out
/// before the limit of the step.
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
        ("panicked", "panic@rank=1,step=7", "panicked at src/train/faults.rs"),
        ("left", "exit@rank=2,step=7,code=3", "(exit code 3)"),
    ] {
        let line = format!("{BASE} --run {run} {settings} {LIMITS} --max-restarts 1 train --inject {fault}");
        // Backtraces are off. On a busy machine, a panicked worker may take so long to print a backtrace that the
        // launcher stops waiting for the root cause and names another worker.
        let output = stage.command(&line).env("RUST_BACKTRACE", "0").output().expect("the launcher runs");
        let ran = Ran::from(output);
        ran.exits_with(ExitCode::Success);
        assert_eq!(ran.json()["restarts"], 1, "{run}: wrong number of restarts");
        let failures = events(&stage, run, "failed");
        let error = failures[0]["error"].as_str().expect("the event has an error text");
        let rank = &fault[fault.find("rank=").expect("the fault names a rank") + 5..][..1];
        let first = error.lines().next().expect("the report has a line");
        assert!(first.starts_with(&format!("worker rank {rank} (pid ")) && first.contains(named), "{run}: {error}");
        assert!(trace(&stage, run) == whole, "{run}: the fault changed the results");
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
    assert!(started.elapsed().as_secs() < 120, "the run took {:?}, wanted less than 2 min", started.elapsed());
}

#[test]
fn contradicting_limits_are_refused() {
    let stage = stage();
    let ran = train(&stage, "never", "--set supervise.step_timeout_s=5 --set supervise.collective_timeout_s=5");
    ran.exits_with(ExitCode::Config)
        .stderr_has("supervise.step_timeout_s: is 5, wanted more than supervise.collective");
}
