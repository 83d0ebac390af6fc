//! Tests of runs that a user or a scheduler stops with a signal. Such a run must write a checkpoint of its last step.
//! After the run has resumed, its losses and weights must equal those of an undisturbed run.

use std::process::Stdio;
use std::time::{Duration, Instant};

use locdiff_core::exit_code::ExitCode;
use nix::sys::signal::Signal;

use super::support::{BASE, events, run_dir, stage, tensors, trace, train};
use crate::stage::{Stage, eventually, is_alive, signal, wait, workers_of};

/// Starts a run, waits until it has made `steps` steps, and sends `stop` to the launcher and to all workers, as
/// schedulers do. The launcher receives the signal twice, as it does when `make` also passes the signal on. Returns the
/// exit code and the number of the last step.
fn stop_after(stage: &Stage, run: &str, settings: &str, steps: usize, stop: Signal) -> (Option<i32>, u64) {
    let line = format!("{BASE} --run {run} {settings} train");
    let mut command = stage.command(&line);
    let mut launcher =
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the launcher can be started");
    let made =
        || if run_dir(stage, run).join("events.jsonl").exists() { events(stage, run, "progress").len() } else { 0 };
    let before = made();
    eventually("the run has made enough steps", || made() >= before + steps);
    let workers = workers_of(launcher.id());
    signal(launcher.id(), stop);
    workers.iter().filter(|pid| is_alive(**pid)).for_each(|pid| signal(*pid, stop));
    std::thread::sleep(Duration::from_millis(5));
    signal(launcher.id(), stop);
    let code = wait(&mut launcher);
    assert!(workers.into_iter().all(|pid| !is_alive(pid)), "a worker is left");
    (code, events(stage, run, "progress").last().and_then(|last| last["step"].as_u64()).unwrap_or(0))
}

#[test]
fn signal_ends_a_run_with_a_checkpoint_from_which_it_resumes_bit_equal() {
    let stage = stage();
    let term = (1, Signal::SIGTERM, ExitCode::Preempted);
    let usr1 = (3, Signal::SIGUSR1, ExitCode::Preempted);
    let int = (2, Signal::SIGINT, ExitCode::Interrupted);
    for (run, layout, signals) in
        [("flat", "--workers 4", vec![term, int]), ("split", "--workers 4 --tensor-parallel 2", vec![usr1])]
    {
        let settings = format!("{layout} --set train.steps=24 --set checkpoint.every=1000");
        train(&stage, &format!("{run}-whole"), &settings).exits_with(ExitCode::Success);
        for (steps, stop, code) in signals {
            let (got, last) = stop_after(&stage, run, &settings, steps, stop);
            assert_eq!(got, Some(code.code().into()), "{run}: wrong exit code after {stop}");
            let newest = std::fs::read_to_string(run_dir(&stage, run).join("latest")).expect("there is a checkpoint");
            assert_eq!(newest.trim(), format!("step-{last:08}"), "{run}: the checkpoint is not from the last step");
            let names = std::fs::read_dir(run_dir(&stage, run)).expect("the run has a folder").flatten();
            assert!(names.into_iter().all(|entry| !entry.file_name().to_string_lossy().contains("partial")));
        }
        train(&stage, run, &settings).exits_with(ExitCode::Success);
        assert_eq!(trace(&stage, run), trace(&stage, &format!("{run}-whole")), "{run}: the losses differ");
        let whole = run_dir(&stage, &format!("{run}-whole"));
        assert_eq!(tensors(&run_dir(&stage, run)), tensors(&whole), "{run}: the weights differ");
    }
}

/// Sends SIGTERM to all processes of a run at a random moment, and then completes the run without a signal. By default,
/// the run has tensor parallelism and gets one signal.
///
/// If `LOCDIFF_TRIES` is above 1, the test starts the run repeatedly, and each time sends the signal within about the
/// first two seconds. This goes on until the run has ended by itself, or until `LOCDIFF_TRIES` signals have stopped it.
/// If the variable is set, the test also covers a run without tensor parallelism.
#[test]
#[allow(clippy::print_stdout, reason = "the test prints what it measured")]
fn signal_at_any_moment_ends_with_its_code_and_changes_no_number() {
    let tries = std::env::var("LOCDIFF_TRIES").ok().and_then(|text| text.parse::<u64>().ok());
    // Each signal needs time, so a run with many signals needs more steps.
    let (steps, tries, skipped) = tries.map_or((40, 1, 1), |tries| (100 + 20 * tries, tries, 0));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("the clock is after 1970");
    let mut random = now.as_secs();
    let stage = stage();
    let layouts = [("flat", "--workers 4"), ("split", "--workers 4 --tensor-parallel 2")];
    for (run, layout) in layouts.into_iter().skip(skipped) {
        let settings = format!(
            "{layout} --set model.degree=7 --set train.steps={steps} --set checkpoint.every=1000 --set shards.validation=shards/small \
             --set eval.every=20 --set eval.quick_rows=64 --set eval.quick_samples=2 --set eval.sampler_steps=5"
        );
        let (whole, begun) = (format!("{run}-whole"), Instant::now());
        train(&stage, &whole, &settings).exits_with(ExitCode::Success);
        let latest_ms = if tries == 1 { begun.elapsed().as_millis() as u64 } else { 2000 };
        let (mut run, mut stopped) = (run.to_owned(), 0);
        while stopped < tries {
            let mut command = stage.command(&format!("{BASE} --run {run} {settings} train"));
            let mut launcher =
                command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the launcher can be started");
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            std::thread::sleep(Duration::from_millis(50 + (random >> 33) % latest_ms));
            let workers = workers_of(launcher.id());
            for pid in std::iter::once(launcher.id()).chain(workers.clone()).filter(|pid| is_alive(*pid)) {
                signal(pid, Signal::SIGTERM);
            }
            let code = wait(&mut launcher);
            assert!(workers.into_iter().all(|pid| !is_alive(pid)), "a worker is left");
            let names = std::fs::read_dir(run_dir(&stage, &run)).into_iter().flatten().flatten();
            assert!(names.into_iter().all(|entry| !entry.file_name().to_string_lossy().contains("partial")));
            if code == Some(0) {
                assert_eq!(events(&stage, &run, "ended").len(), 1, "{run}: the signal was lost");
                if tries > 1 {
                    break;
                }
                // The signal came too late. Try again with a new run.
                run += "-again";
                continue;
            }
            assert_eq!(code, Some(ExitCode::Preempted.code().into()), "{run}: wrong exit code");
            stopped += 1;
            // The newest checkpoint must be from the last step that was reported.
            let path = run_dir(&stage, &run);
            let newest = std::fs::read_to_string(path.join("latest")).ok();
            let last = if path.join("events.jsonl").exists() { events(&stage, &run, "progress") } else { Vec::new() };
            let last = last.last().and_then(|last| last["step"].as_u64()).map(|step| format!("step-{step:08}"));
            assert_eq!(newest.as_deref().map(str::trim), last.as_deref(), "{run}: the checkpoint is from another step");
            println!("{run}: stopped at {}", last.as_deref().unwrap_or("the start"));
        }
        println!("{run}: {stopped} signals");
        train(&stage, &run, &settings).exits_with(ExitCode::Success);
        assert_eq!(trace(&stage, &run), trace(&stage, &whole), "{run}: the losses differ");
        assert_eq!(tensors(&run_dir(&stage, &run)), tensors(&run_dir(&stage, &whole)), "{run}: the weights differ");
    }
}

/// Rank 1 waits for a batch that never comes. The run must nevertheless stop with a checkpoint of the previous step.
#[test]
fn signal_while_a_rank_waits_for_data_loses_no_step() {
    let stage = stage();
    // In the run `small`, a rank has one row per step, and most rows lose their embedding (for classifier-free
    // guidance).
    for (run, layout) in [
        ("split", "--workers 4 --tensor-parallel 2"),
        ("small", "--workers 2 --set train.global_batch=2 --set diffusion.condition_drop=0.95"),
    ] {
        let settings = format!("{layout} --set train.steps=9 --set checkpoint.every=1000");
        let whole = format!("{run}-whole");
        train(&stage, &whole, &settings).exits_with(ExitCode::Success);
        let line = format!("{BASE} --run {run} {settings} train --inject hang@rank=1,step=6,phase=data");
        let mut command = stage.command(&line);
        let mut launcher =
            command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the launcher can be started");
        let path = run_dir(&stage, run).join("events.jsonl");
        eventually("the rank waits", || path.exists() && !events(&stage, run, "injected").is_empty());
        signal(launcher.id(), Signal::SIGTERM);
        assert_eq!(wait(&mut launcher), Some(ExitCode::Preempted.code().into()), "{run}: wrong exit code");
        let newest = std::fs::read_to_string(run_dir(&stage, run).join("latest")).expect("there is a checkpoint");
        assert_eq!(newest.trim(), "step-00000005", "{run}: the checkpoint is from another step");
        train(&stage, run, &settings).exits_with(ExitCode::Success);
        assert_eq!(trace(&stage, run), trace(&stage, &whole), "{run}: the losses differ");
        assert_eq!(tensors(&run_dir(&stage, run)), tensors(&run_dir(&stage, &whole)), "{run}: the weights differ");
    }
}

#[test]
fn signal_before_the_first_step_leaves_no_checkpoint() {
    let stage = stage();
    let line = format!("{BASE} --run early --workers 2 --set train.steps=2000 train");
    let mut launcher = stage.command(&line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    eventually("the workers are spawned", || workers_of(launcher.id()).len() == 2);
    signal(launcher.id(), Signal::SIGTERM);
    assert_eq!(wait(&mut launcher), Some(ExitCode::Preempted.code().into()));
    let names = std::fs::read_dir(run_dir(&stage, "early")).expect("the run has a folder").flatten();
    let names: Vec<String> = names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    assert!(names.iter().all(|name| !name.contains("step-")), "{names:?}");
}

/// A worker stopped by SIGSTOP cannot finish its step, so the other worker cannot finish the step either. The command
/// must end nevertheless: after `supervise.preempt_timeout_s`, or at a second signal.
#[test]
fn run_that_cannot_stop_is_killed_in_time_or_by_a_second_signal() {
    let stage = stage();
    for (run, limit_s, signals) in [("late", 1, 1), ("twice", 600, 2)] {
        let settings = format!("--workers 2 --set train.steps=2000 --set supervise.preempt_timeout_s={limit_s}");
        let mut launcher = stage
            .command(&format!("{BASE} --run {run} {settings} train --inject stop@rank=1,step=3"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the launcher can be started");
        let path = run_dir(&stage, run).join("events.jsonl");
        eventually("the worker is stopped", || path.exists() && !events(&stage, run, "injected").is_empty());
        let workers = workers_of(launcher.id());
        std::thread::sleep(Duration::from_millis(100));
        signal(launcher.id(), Signal::SIGTERM);
        for _ in 1..signals {
            // A signal within one second of the first signal would count as the same request.
            std::thread::sleep(Duration::from_secs(2));
            signal(launcher.id(), Signal::SIGTERM);
        }
        assert_eq!(wait(&mut launcher), Some(ExitCode::Preempted.code().into()), "{run}: wrong exit code");
        assert!(workers.into_iter().all(|pid| !is_alive(pid)), "{run}: a worker is left");
    }
}
