//! Test of a long run whose workers are killed twenty times.

use std::fmt::Write as _;

use locdiff_core::exit_code::ExitCode;

use super::support::{BASE, run_dir, stage, tensors, trace, train};

const KILLS: u64 = 20;
const STEPS: u64 = 60;

/// At each of twenty random steps, one of four workers is killed with SIGKILL. The losses and weights must equal those
/// of an undisturbed run.
#[test]
fn twenty_kills_do_not_change_the_numbers() {
    let stage = stage();
    let settings = format!("--workers 4 --set train.steps={STEPS} --set checkpoint.every=4 --set checkpoint.keep=2");
    train(&stage, "undisturbed", &settings).exits_with(ExitCode::Success);
    // A linear congruential generator chooses ranks and steps. Its seed changes every day. The assertions print the
    // seed, so that a failure can be reproduced.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("the clock is after 1970");
    let seed = now.as_secs() / 86_400;
    let (mut state, mut faults, mut steps) = (seed, String::new(), Vec::new());
    while steps.len() < KILLS as usize {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (rank, step) = ((state >> 33) % 4, (state >> 40) % STEPS + 1);
        if !steps.contains(&step) {
            steps.push(step);
            write!(faults, " --inject kill@rank={rank},step={step}").expect("writing to a string cannot fail");
        }
    }
    let ran = stage.run(&format!("{BASE} --run killed {settings} --max-restarts {KILLS} train{faults}"));
    ran.exits_with(ExitCode::Success);
    assert_eq!(ran.json()["restarts"], KILLS, "seed {seed}: wrong number of restarts");
    assert_eq!(trace(&stage, "killed"), trace(&stage, "undisturbed"), "seed {seed}: the losses differ");
    assert_eq!(
        tensors(&run_dir(&stage, "killed")),
        tensors(&run_dir(&stage, "undisturbed")),
        "seed {seed}: the weights differ"
    );
}
