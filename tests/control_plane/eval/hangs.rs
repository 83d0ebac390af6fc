//! A test of an evaluation whose worker is stopped by SIGSTOP.

use std::process::Stdio;

use locdiff_core::exit_code::ExitCode;
use nix::sys::signal::Signal;

use super::support::stage;
use crate::stage::{Ran, eventually, has_thread, signal, workers_of};

#[test]
fn stopped_worker_of_an_evaluation_is_named_and_replaced() {
    let stage = stage();
    // The evaluation must last long enough for the test to stop its worker.
    let settings = "--json --workers 1 --set eval.samples=16 --set eval.sampler_steps=50";
    let whole = stage.run(&format!("{settings} eval")).exits_with(ExitCode::Success).json();
    // These limits apply while the worker starts, opens the data, and evaluates.
    let limits =
        "--set supervise.start_timeout_s=10 --set supervise.data_timeout_s=4 --set supervise.evaluation_timeout_s=4";
    let mut command = stage.command(&format!("{settings} {limits} eval"));
    let launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the launcher can be started");
    let worker = || workers_of(launcher.id()).into_iter().find(|pid| has_thread(*pid, "heartbeat"));
    eventually("the worker has begun its job", || worker().is_some());
    signal(worker().expect("the worker is running"), Signal::SIGSTOP);
    let ran = Ran::from(launcher.wait_with_output().expect("the launcher is a child of the test"));
    ran.exits_with(ExitCode::Success).stderr_has("is stuck in `eval`").stderr_has("starting again");
    assert_eq!(ran.json()["rows"], whole["rows"], "the restart changed the scores");
}
