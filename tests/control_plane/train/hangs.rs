//! Tests of workers that hang, stop, panic or exit. The launcher must name the faulty worker as the root cause and
//! restart all workers. The fault must not change the results.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use locdiff_core::exit_code::ExitCode;
use nix::sys::signal::Signal;

use super::support::{BASE, events, run_dir, stage, tensors, trace, train};
use crate::stage::{Ran, eventually, signal, wait};

/// Limits that end a hang soon, but leave a healthy worker enough time on a busy machine. If a worker hangs in phase
/// `data`, the limit of this phase ends the hang. If a worker hangs in a step, the other workers detect the hang,
/// because their collective operation times out before the limit of the step.
const LIMITS: &str = "--set supervise.data_timeout_s=4 --set supervise.step_timeout_s=5 --set supervise.collective_timeout_s=4 \
    --set supervise.checkpoint_timeout_s=6 --set supervise.stop_timeout_s=1";

#[test]
fn stuck_worker_is_named_and_replaced_without_a_trace_in_the_numbers() {
    let stage = stage();
    let settings = "--set train.steps=9 --set checkpoint.every=3 --workers 3";
    train(&stage, "whole", settings).exits_with(ExitCode::Success);
    let whole = trace(&stage, "whole");
    for (run, fault, named) in [
        ("step", "hang@rank=2,step=7", "in phase step of step 7"),
        ("collective", "hang@rank=1,step=7,phase=collective", "in phase collective of step 7"),
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
    ran.exits_with(ExitCode::Success).stderr_has("no progress for").stderr_has("supervise.data_timeout_s allows 4.0 s");
    assert_eq!((ran.json()["restarts"].as_u64(), trace(&stage, "alone").len()), (Some(1), 6));
    assert!(started.elapsed().as_secs() < 120, "the run took {:?}, wanted less than 2 min", started.elapsed());
}

/// The shard is a pipe without a writer. Opening the pipe blocks forever, like opening a file on a server that does not
/// respond.
#[test]
fn rank_that_cannot_open_its_data_is_named() {
    let stage = stage();
    std::fs::create_dir(stage.path().join("shards/pipe")).expect("the test folder is writable");
    let made = Command::new("mkfifo").arg(stage.path().join("shards/pipe/a.parquet")).status();
    assert!(made.is_ok_and(|status| status.success()), "mkfifo failed");
    let settings = format!("--workers 2 --set shards.train=shards/pipe {LIMITS} --set supervise.data_timeout_s=2");
    let ran = train(&stage, "stuck", &format!("{settings} --max-restarts 1"));
    ran.exits_with(ExitCode::WorkerFailed)
        .stderr_has("worker rank 0 (pid ")
        .stderr_has("in phase data, while others wait in broadcast of group world")
        .stderr_has("stuck at:");
    assert_eq!(events(&stage, "stuck", "attempt").len(), 2, "wrong number of attempts");
    // A job that belongs to no run, such as `shards inspect`, is restarted too.
    let limits = "--set supervise.data_timeout_s=2 --set supervise.stop_timeout_s=1 --max-restarts 1";
    stage
        .run(&format!("--device cpu {limits} shards inspect shards/pipe"))
        .exits_with(ExitCode::WorkerFailed)
        .stderr_has("is stuck in `shards inspect`: no progress for 2.0 s in phase data")
        .stderr_has("starting again (restart 1 of at most 1 without progress)")
        .stderr_has("not restarted: 1 restarts without progress");
}

#[test]
fn contradicting_limits_are_refused() {
    let stage = stage();
    let ran = train(&stage, "never", "--set supervise.step_timeout_s=5 --set supervise.collective_timeout_s=5");
    ran.exits_with(ExitCode::Config)
        .stderr_has("supervise.step_timeout_s: is 5, wanted more than supervise.collective");
    train(&stage, "never", "--set supervise.heartbeat_s=50 --set supervise.collective_timeout_s=50")
        .exits_with(ExitCode::Config)
        .stderr_has("supervise.heartbeat_s: is 50, wanted less than the shortest phase timeout");
}

/// Each run has four ranks and one fault: a stop, a hang or a panic, at a random rank and step. `LOCDIFF_TRIES` sets
/// the number of runs for each of the three faults. If the variable is set, the machine must be idle, because each
/// failure must then be reported at most two seconds after its time limit.
#[test]
#[allow(clippy::print_stdout, reason = "the test prints what it measured")]
fn first_cause_is_named_in_time_at_any_moment() {
    let tries = std::env::var("LOCDIFF_TRIES").ok().and_then(|text| text.parse::<u64>().ok());
    let slack_s = if tries.is_some() { 2.0 } else { 15.0 };
    let stage = stage();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("the clock is after 1970");
    let mut state = now.as_secs();
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let limits =
        "--set supervise.data_timeout_s=4 --set supervise.step_timeout_s=4 --set supervise.collective_timeout_s=3.9";
    for attempt in 0..3 * tries.unwrap_or(1) {
        let (rank, step) = (draw(4), 2 + draw(40));
        let kind = ["stop", "hang", "panic"][(attempt % 3) as usize];
        let (more, limit_s) = match kind {
            // Without `LOCDIFF_TRIES`, the rank hangs only in phase `data`. Another test covers hangs in phase `step`.
            "hang" if tries.is_none() => (",phase=data", 4.0),
            "hang" => ([",phase=data", ",phase=step"][draw(2) as usize], 4.0),
            "stop" => ("", 4.0),
            _ => ("", 0.0),
        };
        let run = format!("try-{attempt}");
        let fault = format!("{kind}@rank={rank},step={step}{more}");
        let line = format!(
            "{BASE} --run {run} --workers 4 --set model.degree=5 --set train.steps=1000 {limits} --max-restarts 0 train"
        );
        let mut command = stage.command(&format!("{line} --inject {fault}"));
        let mut launcher =
            command.env("RUST_BACKTRACE", "0").stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
        let has = |event: &str| {
            run_dir(&stage, &run).join("events.jsonl").exists() && !events(&stage, &run, event).is_empty()
        };
        eventually("the fault has occurred", || has("injected"));
        let occurred = Instant::now();
        eventually("the failure is reported", || has("failed"));
        let took_s = occurred.elapsed().as_secs_f64();
        wait(&mut launcher);
        let failures = events(&stage, &run, "failed");
        let error = failures[0]["error"].as_str().expect("the event has an error text");
        assert!(error.starts_with(&format!("worker rank {rank} (pid ")), "{fault}: {error}");
        assert!(
            took_s <= limit_s + slack_s,
            "{fault}: reported after {took_s:.1} s, wanted at most {limit_s} + {slack_s} s"
        );
        println!("{fault}: reported after {took_s:.2} s");
    }
}

/// While the launcher is stopped, it does not read the reports of the workers. The workers must go on training.
/// `LOCDIFF_PAUSE_S` is the duration of the stop in seconds.
#[test]
fn launcher_that_was_stopped_for_a_while_restarts_nothing() {
    let pause_s = std::env::var("LOCDIFF_PAUSE_S").ok().and_then(|text| text.parse().ok()).unwrap_or(5);
    let stage = stage();
    // With the slow rank that is injected below (50 ms per step), this many steps take longer than the pause.
    let settings =
        format!("--workers 4 --set model.degree=5 --set train.steps={} --set checkpoint.every=50", 24 * pause_s);
    train(&stage, "whole", &settings).exits_with(ExitCode::Success);
    let limits =
        "--set supervise.data_timeout_s=4 --set supervise.step_timeout_s=4 --set supervise.collective_timeout_s=3.9";
    let mut command =
        stage.command(&format!("{BASE} --run paused {settings} {limits} train --inject slow@rank=0,step=1,ms=50"));
    let mut launcher =
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the launcher can be started");
    let path = run_dir(&stage, "paused").join("events.jsonl");
    eventually("the run has begun", || path.exists() && events(&stage, "paused", "progress").len() > 5);
    signal(launcher.id(), Signal::SIGSTOP);
    std::thread::sleep(Duration::from_secs(pause_s));
    signal(launcher.id(), Signal::SIGCONT);
    assert_eq!(wait(&mut launcher), Some(0));
    assert_eq!(events(&stage, "paused", "attempt").len(), 1, "the pause led to a restart");
    assert_eq!(trace(&stage, "paused"), trace(&stage, "whole"), "the losses differ");
    assert_eq!(tensors(&run_dir(&stage, "paused")), tensors(&run_dir(&stage, "whole")), "the weights differ");
}
