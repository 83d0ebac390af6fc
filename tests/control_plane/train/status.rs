//! Tests of `status`. If a launcher was killed, the next launcher of the run must report the kill.

use std::io::{Read as _, Write as _};
use std::process::Stdio;

use locdiff_core::exit_code::ExitCode;
use nix::sys::signal::Signal;
use serde_json::Value;

use super::support::{BASE, events, run_dir, stage, train};
use crate::stage::{Stage, eventually, signal, wait};

fn status(stage: &Stage) -> Value {
    let ran = stage.run("--device cpu --json --run run status");
    ran.exits_with(ExitCode::Success).json()["runs"][0].clone()
}

#[test]
fn status_shows_a_run_from_its_first_step_to_its_end_and_a_vanished_launcher_is_noted() {
    let stage = stage();
    let settings = "--workers 2 --set train.steps=9 --set checkpoint.every=3";
    let ran = stage.run("--device cpu --json status");
    assert_eq!(ran.exits_with(ExitCode::Success).json()["runs"], Value::Array(Vec::new()));
    stage
        .run("--device cpu --run run status")
        .exits_with(ExitCode::NoData)
        .stderr_has("no run `run` in checkpoints; there are no runs");

    // The hang holds the run at step 8. By then, seven steps have been reported, and at least one checkpoint has been
    // committed.
    let line = format!("{BASE} --run run {settings} train --inject hang@rank=0,step=8,phase=data");
    let mut launcher =
        stage.command(&line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the launcher can be started");
    let at_hang = |found: &Value| found["workers"][0]["phase"] == "data" && found["workers"][0]["step"] == 8;
    eventually("the status shows the hang", || {
        run_dir(&stage, "run").join("status.json").exists() && at_hang(&status(&stage))
    });
    let running = status(&stage);
    assert_eq!((&running["state"], &running["pid"]), (&"running".into(), &launcher.id().into()), "{running}");
    assert_eq!((&running["step"], &running["steps"]), (&7.into(), &9.into()), "{running}");
    assert!(running["checkpoint_step"].as_u64() >= Some(3) && running["restarts"] == 0, "{running}");
    for field in ["loss", "samples_per_s", "seconds_left", "goodput_percent", "age_s"] {
        assert!(running[field].is_number(), "{field} in {running}");
    }

    signal(launcher.id(), Signal::SIGKILL);
    let pid = launcher.id();
    launcher.wait().expect("the launcher is a child of the test");
    eventually("the launcher counts as vanished", || status(&stage)["state"] == "vanished");
    let ran = train(&stage, "run", settings);
    let noted = format!("the previous launcher (pid {pid} on ");
    ran.exits_with(ExitCode::Success).stderr_has(&noted).stderr_has("was killed or crashed after step 7");
    assert_eq!(events(&stage, "run", "vanished")[0]["step"], 7);

    let ended = status(&stage);
    assert_eq!((&ended["state"], &ended["step"], &ended["failure"]), (&"ended".into(), &9.into(), &Value::Null));
    let spent = |found: &Value, part: &str| found["goodput"][part].as_f64().expect("each part is a number");
    assert!(spent(&ended, "start_s") > spent(&running, "start_s"), "the first launcher's time is not counted: {ended}");
    assert!(spent(&ended, "data_s") > 0.0, "the hang is not counted: {ended}");
    assert!(ran.json()["goodput_percent"].is_number() && ran.stderr.contains("goodput "), "{}", ran.stderr);
    let shown = stage.run("--device cpu --run run status");
    assert!(shown.stdout.starts_with("run: ended, step 9 of 9, loss "), "{}", shown.stdout);
    train(&stage, "run", settings).exits_with(ExitCode::Success);
    assert_eq!(events(&stage, "run", "vanished").len(), 1, "a launcher that ended was reported as vanished");
}

#[test]
fn status_shows_the_last_failure_and_the_goodput_what_it_cost() {
    let stage = stage();
    let settings = "--workers 2 --set train.steps=6 --set checkpoint.every=3";
    let kill = "--inject kill@rank=1,step=5";
    let ran = stage.run(&format!("{BASE} --run run {settings} --max-restarts 0 train {kill}"));
    ran.exits_with(ExitCode::WorkerFailed);
    let failed = status(&stage);
    assert_eq!(failed["state"], "failed");
    assert!(failed["failure"].as_str().is_some_and(|text| text.contains("killed by SIGKILL")), "{failed}");
    let ran = stage.run(&format!("{BASE} --run run {settings} --max-restarts 3 train {kill}"));
    let result = ran.exits_with(ExitCode::Success).json();
    assert!(result["goodput"]["restart_s"].as_f64().is_some_and(|seconds| seconds > 0.0), "{result}");
    assert_eq!((&status(&stage)["state"], &status(&stage)["restarts"]), (&"ended".into(), &1.into()));
}

#[test]
fn slow_rank_is_named_and_its_times_are_shown() {
    let stage = stage();
    let settings = "--workers 3 --set model.degree=5 --set train.steps=120 --set checkpoint.every=1000";
    let line = format!("{BASE} --run slow {settings} train --inject slow@rank=1,step=2,ms=60");
    let ran = stage.run(&line);
    ran.exits_with(ExitCode::Success).stderr_has("rank 1 is slow");
    let named = events(&stage, "slow", "straggler");
    assert!(named.iter().all(|event| event["rank"] == 1) && !named.is_empty(), "{named:?}");
    let status = stage.run("--device cpu --json --run slow status").json();
    let times = |rank: usize, part: &str| status["runs"][0]["workers"][rank]["times"][part].as_f64().unwrap_or(-1.0);
    assert!(times(1, "step_ms") > 50.0 && times(0, "collective_ms") > times(1, "collective_ms"), "{status}");
}

/// The answer to an HTTP request for a path.
fn get(port: u16, path: &str) -> String {
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).expect("the launcher listens");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("the launcher reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("the answer is text");
    answer
}

#[test]
fn prometheus_gets_the_numbers_of_a_run() {
    let stage = stage();
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let port = free.local_addr().expect("the listener is bound").port();
    let line = |metrics: &str| {
        format!(
            "{BASE} --workers 2 --run seen --set network.metrics={metrics} --set train.steps=4000 --set checkpoint.every=2 train"
        )
    };
    stage.run(&line("nonsense")).exits_with(ExitCode::Config).stderr_has("wanted PORT or HOST:PORT");
    stage.run(&line(&port.to_string())).exits_with(ExitCode::Io).stderr_has("network.metrics");
    drop(free);
    let mut launcher = stage.command(&line(&port.to_string())).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let launcher = launcher.as_mut().expect("the launcher can be started");
    let numbers = |name: &str| {
        let text = get(port, "/metrics");
        assert!(text.starts_with("HTTP/1.1 200") && text.contains("text/plain; version=0.0.4"), "{text}");
        let line = text.lines().find(|line| line.starts_with(name)).map(str::to_owned);
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
    };
    eventually("the launcher listens", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
    eventually("the status is written", || get(port, "/metrics").starts_with("HTTP/1.1 200"));
    eventually("a checkpoint is seen", || numbers("locdiff_checkpoint_age_seconds").is_some());
    assert!(numbers("locdiff_step{run=\"seen\"}").is_some_and(|step| step >= 2.0));
    assert_eq!(numbers("locdiff_steps{run=\"seen\"}"), Some(4000.0));
    for name in ["locdiff_loss", "locdiff_samples_per_second", "locdiff_goodput_ratio", "locdiff_restarts_total"] {
        assert!(numbers(name).is_some(), "no {name}");
    }
    assert!(get(port, "/metrics").contains("locdiff_workers{run=\"seen\",node=\"0\",phase="));
    assert!(get(port, "/").starts_with("HTTP/1.1 404"));
    signal(launcher.id(), Signal::SIGTERM);
    assert_eq!(wait(launcher), Some(ExitCode::Preempted.code().into()));
}
