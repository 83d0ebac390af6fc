//! Test of a run with many random faults. Workers die, hang, stop, crash or corrupt their weights. Checkpoints are
//! damaged, disks are slow, reads fail, and the launcher itself is killed. The losses and weights must equal those of
//! an undisturbed run.
//!
//! `LOCDIFF_CHAOS_FAULTS` sets the number of faults, and `LOCDIFF_CHAOS_SEED` the seed. By default the seed changes
//! every day. The assertions print the seed, so that a failure can be reproduced.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use locdiff_core::exit_code::ExitCode;
use nix::sys::signal::Signal;
use serde_json::Value;

use super::support::{BASE, events, last_trace, run_dir, stage, tensors, trace, train};
use crate::stage::{Stage, eventually, is_alive, signal, wait, workers_of};

/// Number of faults if `LOCDIFF_CHAOS_FAULTS` is not set.
const FAULTS: u64 = 20;
/// Steps per fault.
const SPACING: u64 = 3;
/// Settings of the order of rows. With these cells, some rows come several times in an epoch, and others do not come at
/// all.
const ORDER: &str = "--set shards.density_alpha=0.5 --set shards.density_cell_degrees=30";

/// Kinds of faults from which a run recovers.
const KINDS: [&str; 14] = [
    "kill",
    "stop",
    "hang,phase=data",
    "hang,phase=step",
    "hang,phase=collective",
    "hang,phase=checkpoint",
    "segfault",
    "panic",
    "exit,code=3",
    "eio",
    "tensorboard-eio",
    "slow-disk,seconds=1",
    "flip,in=weight",
    "corrupt-checkpoint",
];

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Whether the folder of the stage is the working directory of any process. Launchers and their workers run there.
fn has_process(stage: &Stage) -> bool {
    let folder = stage.path().canonicalize().expect("the stage exists");
    let processes = std::fs::read_dir("/proc").expect("/proc can be read").flatten();
    processes.into_iter().any(|process| std::fs::read_link(process.path().join("cwd")).is_ok_and(|at| at == folder))
}

/// The position in the data at which the newest checkpoint of a run was made.
fn bookmark(run_dir: &Path) -> Value {
    let latest = std::fs::read_to_string(run_dir.join("latest")).expect("the run has a checkpoint");
    let state = std::fs::read_to_string(run_dir.join(latest.trim()).join("state.json")).expect("it has a state");
    let state: Value = serde_json::from_str(&state).expect("the file is valid JSON");
    state["bookmark"].clone()
}

#[test]
fn random_faults_leave_no_trace_in_the_numbers() {
    let faults = number("LOCDIFF_CHAOS_FAULTS").unwrap_or(FAULTS);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("the clock is after 1970");
    let seed = number("LOCDIFF_CHAOS_SEED").unwrap_or(now.as_secs() / 86_400);
    let stage = stage();
    let steps = (faults + 2) * SPACING;
    let settings = format!(
        "{ORDER} --workers 4 --set model.degree=5 --set train.steps={steps} --set checkpoint.every=2 \
         --set checkpoint.keep=3 --max-restarts 1000 --set supervise.data_timeout_s=3 \
         --set supervise.step_timeout_s=3.5 --set supervise.collective_timeout_s=3 \
         --set supervise.checkpoint_timeout_s=5 --set supervise.stop_timeout_s=1"
    );
    train(&stage, "undisturbed", &settings).exits_with(ExitCode::Success);
    // A linear congruential generator chooses the step, the kind and the rank of each fault.
    let mut state = seed;
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let (mut inject, mut corrupted) = (String::new(), Vec::new());
    for fault in 0..faults {
        let step = 2 + fault * SPACING + draw(SPACING);
        let mut kind = KINDS[draw(KINDS.len() as u64) as usize];
        let mut rank = draw(4);
        // A second corruption of the same rank ends the run, so flip a weight at most once per rank.
        if kind == "flip,in=weight" {
            match (0..4).map(|offset| (rank + offset) % 4).find(|rank| !corrupted.contains(rank)) {
                Some(free) => {
                    rank = free;
                    corrupted.push(free);
                }
                None => kind = "kill",
            }
        }
        let (name, more) =
            kind.split_once(',').map_or((kind, String::new()), |(name, more)| (name, format!(",{more}")));
        write!(inject, " --inject {name}@rank={rank},step={step}{more}").expect("writing to a string cannot fail");
    }
    // Kill the launcher itself a few times. After each kill, repeat the same command, as a scheduler does.
    let line = format!("{BASE} --run chaos {settings} train{inject}");
    for death in 1..=faults / 10 {
        let mut launcher = stage
            .command(&line)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the launcher can be started");
        let goal = death * steps / (faults / 10 + 1);
        let reached = || {
            let path = run_dir(&stage, "chaos").join("latest");
            let latest = std::fs::read_to_string(path).unwrap_or_default();
            latest.trim().trim_start_matches("step-").parse::<u64>().unwrap_or(0)
        };
        while reached() < goal {
            assert!(is_alive(launcher.id()), "seed {seed}: the launcher ended before step {goal}");
            std::thread::sleep(Duration::from_millis(5));
        }
        let workers = workers_of(launcher.id());
        signal(launcher.id(), Signal::SIGKILL);
        wait(&mut launcher);
        for pid in workers {
            eventually("the worker ends", || !is_alive(pid));
        }
    }
    let ran = stage.run(&line);
    ran.exits_with(ExitCode::Success);
    assert!(!has_process(&stage), "seed {seed}: a process is left");
    let injected = events(&stage, "chaos", "injected").len() as u64;
    assert!(injected >= faults, "seed {seed}: only {injected} of {faults} faults occurred");
    let made = last_trace(&stage, "chaos");
    assert!(made.keys().copied().eq(1..=steps), "seed {seed}: a step is missing");
    assert_eq!(made, trace(&stage, "undisturbed"), "seed {seed}: the losses differ");
    // If the losses and the bookmarks (the positions in the data) are equal, both runs used the same rows in every
    // step. `shards verify` then proves that each row comes as often as its quota in each epoch. It also proves that an
    // epoch leaves out only rows that do not fill a batch.
    let [bookmark, of_whole] = ["chaos", "undisturbed"].map(|run| bookmark(&run_dir(&stage, run)));
    assert_eq!(bookmark, of_whole, "seed {seed}: the bookmarks differ");
    let epochs = bookmark["position"]["epoch"].as_u64().expect("a bookmark has an epoch") + 1;
    let audit = format!("{BASE} {ORDER} --workers 1 shards verify shards/small --epochs {epochs} --world-sizes 1,4");
    let audit = stage.run(&audit).exits_with(ExitCode::Success).json();
    assert!(audit["plan"]["quota_max"].as_u64() > Some(1), "seed {seed}: no row comes twice: {audit}");
    let [chaos, whole] = ["chaos", "undisturbed"].map(|run| tensors(&run_dir(&stage, run)));
    assert_eq!(chaos, whole, "seed {seed}: the weights differ");
    let names = std::fs::read_dir(run_dir(&stage, "chaos")).expect("the run has a folder").flatten();
    assert!(names.into_iter().all(|entry| !entry.file_name().to_string_lossy().contains("partial")), "seed {seed}");
    assert_eq!(stage.leftover_sockets(), 0, "seed {seed}: a runtime folder is left");
}
