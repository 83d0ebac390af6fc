//! A test of an evaluation that runs while the same run is being trained.

use std::process::Stdio;

use locdiff_core::exit_code::ExitCode;
use nix::sys::signal::Signal;

use super::support::{BASE, stage, train};
use crate::stage::{Ran, eventually, signal};

#[test]
fn evaluation_neither_keeps_a_run_from_training_nor_loses_its_checkpoint() {
    let stage = stage();
    let more = |steps: u32| format!("--set eval.after_train=false --set checkpoint.keep=1 --set train.steps={steps}");
    let mut command = stage.command(&format!("{BASE} --workers 1 eval"));
    let evaluation =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the launcher can be started");
    eventually("the evaluation has a worker", || {
        let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", evaluation.id()));
        children.is_ok_and(|children| !children.trim().is_empty())
    });
    // A stopped launcher keeps its locks, so the checkpoint stays protected for as long as the test needs.
    signal(evaluation.id(), Signal::SIGSTOP);
    train(&stage, &more(44)).exits_with(ExitCode::Success);
    let steps = |step: u32| stage.path().join(format!("checkpoints/small/step-{step:08}"));
    assert!(steps(40).exists() && steps(44).exists(), "the evaluated checkpoint was removed");
    signal(evaluation.id(), Signal::SIGCONT);
    let ran = Ran::from(evaluation.wait_with_output().expect("the launcher is a child of the test"));
    let result = ran.exits_with(ExitCode::Success).json();
    assert_eq!(result["data"]["step"], 40, "{result}");
    train(&stage, &more(48)).exits_with(ExitCode::Success);
    assert!(!steps(40).exists() && !steps(44).exists() && steps(48).exists(), "old checkpoints were kept");
}
