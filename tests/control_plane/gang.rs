//! Tests of the supervision of a gang (the workers of one attempt). Some workers are healthy, and others are
//! incompatible, silent, hung or dead. The launcher must leave no worker behind, and must report the cause of a
//! failure.

use std::path::Path;
use std::process::Stdio;

use locdiff_core::exit_code::ExitCode;
use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::Signal;

use crate::stage::{Ran, Stage, Worker, eventually, has_thread, is_alive, signal, wait, workers_of};

#[track_caller]
fn assert_no_leftovers(stage: &Stage) {
    for pid in stage.pids() {
        eventually("every process ends", || !is_alive(pid));
    }
    assert_eq!(stage.leftover_sockets(), 0, "the launcher did not remove its sockets");
}

#[test]
fn two_real_workers_start_compute_and_exit() {
    let stage = Stage::new(Worker::Real);
    let ran = stage.run("--workers 2 --device cpu --json self-check");
    ran.exits_with(ExitCode::Success);
    let json = ran.json();
    let rows = json["rows"].as_array().expect("the result has rows");
    assert_eq!(rows.len(), 2, "{json}");
    assert_ne!(rows[0]["pid"], rows[1]["pid"]);
    assert!(rows.iter().all(|row| row["check"]["error_max"] == 0.0), "{json}");
    assert_no_leftovers(&stage);
}

#[test]
fn version_names_revision_and_libraries() {
    let ran = Stage::new(Worker::Real).run("--version");
    ran.exits_with(ExitCode::Success);
    for part in [locdiff_core::VERSION, locdiff_core::REVISION, "libtorch 2.11.0", "CUDA ", "NCCL "] {
        assert!(ran.stdout.contains(part), "missing {part} in {}", ran.stdout);
    }
}

#[test]
fn doctor_passes_with_a_worker_and_fails_without() {
    let ran = Stage::new(Worker::Real).run("--device cpu --json doctor");
    ran.exits_with(ExitCode::Success);
    assert_eq!(ran.json()["ok"], true);
    let ran = Stage::new(Worker::None).run("--device cpu --json doctor");
    ran.exits_with(ExitCode::NotReady).stderr_has("training cannot start here: worker");
    assert_eq!(ran.json()["ok"], false);
    let ran = Stage::new(Worker::Fake("wrong-libtorch")).run("--device cpu doctor");
    ran.exits_with(ExitCode::NotReady);
    let words: Vec<&str> = ran.stdout.split_whitespace().collect();
    assert!(words.join(" ").contains("libtorch 2.11.0, but 2.10.0 is loaded"), "{}", ran.stdout);
}

#[test]
fn doctor_fails_when_checkpoints_cannot_be_stored() {
    let stage = Stage::new(Worker::Real);
    let ran = stage.run("--device cpu doctor --set checkpoint.dir=/proc/runs");
    ran.exits_with(ExitCode::NotReady).stderr_has("disk");
    let ran = stage.run("--device cpu doctor --config l95 --set checkpoint.keep=100000");
    ran.exits_with(ExitCode::NotReady).stderr_has("disk");
    let words: Vec<&str> = ran.stdout.split_whitespace().collect();
    assert!(words.join(" ").contains("lower checkpoint.keep"), "{}", ran.stdout);
}

#[test]
fn libtorch_version_mismatch_is_reported() {
    let stage = Stage::new(Worker::Fake("wrong-libtorch@1"));
    let ran = stage.run("--workers 2 --device cpu self-check");
    ran.exits_with(ExitCode::WorkerIncompatible)
        .stderr_has("worker rank 1")
        .stderr_has("built for libtorch 2.11.0, but 2.10.0 is loaded");
    assert_no_leftovers(&stage);
}

/// Because of `LD_LIBRARY_PATH`, the dynamic linker finds a file that is not a library before it finds the real
/// libtorch.
#[test]
fn unloadable_libtorch_is_named() {
    let stage = Stage::new(Worker::Real);
    let library = stage.path().join("libtorch_cpu.so");
    std::fs::write(&library, "not a library").expect("the test folder is writable");
    let mut command = stage.command("--device cpu self-check");
    let output = command.env("LD_LIBRARY_PATH", stage.path()).output().expect("the launcher can be started");
    let ran = Ran::from(output);
    ran.exits_with(ExitCode::WorkerIncompatible)
        .stderr_has("its libraries cannot be loaded")
        .stderr_has("libtorch_cpu.so");
}

#[test]
fn worker_of_another_build_or_protocol_is_rejected() {
    for (mode, part) in [("wrong-protocol", "it uses protocol 99"), ("wrong-build", "(0000000), but this launcher")] {
        let stage = Stage::new(Worker::Fake(mode));
        stage.run("--workers 2 --device cpu self-check").exits_with(ExitCode::WorkerIncompatible).stderr_has(part);
        assert_no_leftovers(&stage);
    }
}

#[test]
fn worker_that_sends_garbage_is_rejected() {
    let stage = Stage::new(Worker::Fake("garbage@0"));
    stage
        .run("--workers 2 --device cpu self-check")
        .exits_with(ExitCode::WorkerIncompatible)
        .stderr_has("worker rank 0");
    assert_no_leftovers(&stage);
}

#[test]
fn crashed_worker_is_named_with_its_last_output() {
    let stage = Stage::new(Worker::Fake("crash@1"));
    let ran = stage.run("--workers 3 --device cpu self-check");
    ran.exits_with(ExitCode::WorkerFailed)
        .stderr_has("worker rank 1")
        .stderr_has("killed by SIGSEGV")
        .stderr_has("about to crash");
    assert_no_leftovers(&stage);
}

#[test]
fn workers_keep_freed_memory_unless_the_user_decides() {
    let stage = Stage::new(Worker::Fake("malloc"));
    let line = "--device cpu self-check";
    stage.run(line).exits_with(ExitCode::Success).stderr_has("malloc keeps 33554432 1099511627776");
    let output = stage.command(line).env("MALLOC_TRIM_THRESHOLD_", "4096").output().expect("the program runs");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("malloc keeps 33554432 4096"), "{stderr}");
}

#[test]
fn error_of_a_failed_worker_is_quoted() {
    let stage = Stage::new(Worker::Fake("fail@2"));
    stage.run("--workers 3 --device cpu self-check").exits_with(ExitCode::WorkerFailed).stderr_has("no such thing");
    assert_no_leftovers(&stage);
}

#[test]
fn worker_that_returns_the_result_of_another_job_is_named() {
    let stage = Stage::new(Worker::Fake("other-result@1"));
    stage
        .run("--workers 2 --device cpu self-check")
        .exits_with(ExitCode::WorkerIncompatible)
        .stderr_has("worker rank 1 sent a wrong result for `self-check`")
        .stderr_has("got the result of `bench shdd`, wanted the result of `self-check`");
    assert_no_leftovers(&stage);
}

#[test]
fn worker_that_exits_without_a_result_has_failed() {
    let stage = Stage::new(Worker::Fake("vanish@0"));
    stage
        .run("--workers 2 --device cpu self-check")
        .exits_with(ExitCode::WorkerFailed)
        .stderr_has("ended without a result");
    assert_no_leftovers(&stage);
}

#[test]
fn silent_worker_is_stopped_at_the_start_timeout() {
    let stage = Stage::new(Worker::Fake("silent@1"));
    let ran = stage.run(
        "--workers 2 --device cpu self-check --set supervise.start_timeout_s=1 --set supervise.stop_timeout_s=0.2",
    );
    ran.exits_with(ExitCode::Timeout).stderr_has("worker rank 1 did not report within 1.0 s");
    assert_no_leftovers(&stage);
}

#[test]
fn stopped_worker_is_named_in_the_report() {
    let stage = Stage::new(Worker::Real);
    let line = "--workers 2 --device cpu bench collectives --set supervise.rendezvous_timeout_s=5 --set supervise.collective_timeout_s=1 --set supervise.stop_timeout_s=0.5";
    let launcher =
        stage.command(line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the launcher can be started");
    let pid = launcher.id();
    eventually("all workers have joined", || workers_of(pid).len() == 2 && workers_of(pid).into_iter().all(has_joined));
    let victim = workers_of(pid)[1];
    signal(victim, Signal::SIGSTOP);
    let ran = Ran::from(launcher.wait_with_output().expect("the process can be waited for"));
    // The rest of the line depends on whether the worker had sent a heartbeat before it was stopped.
    ran.exits_with(ExitCode::WorkerFailed)
        .stderr_has(&format!("error: worker rank 1 (pid {victim}) is stuck in `bench collectives`: "));
    assert_no_leftovers(&stage);
}

#[test]
fn worker_that_lingers_after_its_result_is_stopped() {
    let stage = Stage::new(Worker::Fake("linger"));
    stage.run("--workers 2 --device cpu self-check --set supervise.stop_timeout_s=0.3").exits_with(ExitCode::Success);
    assert_no_leftovers(&stage);
}

#[test]
fn worker_that_closes_its_socket_but_stays_alive_has_failed() {
    let stage = Stage::new(Worker::Fake("hang-up@1"));
    let ran = stage.run("--workers 2 --device cpu self-check --set supervise.stop_timeout_s=0.3");
    ran.exits_with(ExitCode::WorkerFailed).stderr_has("worker rank 1").stderr_has("closed its control socket");
    assert_no_leftovers(&stage);
}

/// The worker starts a process in a new session. This process is not in the worker's process group, so it survives the
/// worker and keeps the worker's pipes open.
#[test]
fn pipes_held_open_by_a_daemon_do_not_block_the_launcher() {
    let stage = Stage::new(Worker::Fake("daemon"));
    stage.run("--device cpu self-check").exits_with(ExitCode::Success);
    for pid in stage.pids().into_iter().filter(|pid| is_alive(*pid)) {
        signal(pid, Signal::SIGKILL);
    }
}

#[test]
fn killed_worker_with_unread_messages_is_reported_as_killed() {
    let stage = Stage::new(Worker::Fake("die-unread@0"));
    stage.run("--workers 2 --device cpu self-check").exits_with(ExitCode::WorkerFailed).stderr_has("killed by SIGKILL");
    assert_no_leftovers(&stage);
}

#[test]
fn huge_worker_output_does_not_fill_memory() {
    let stage = Stage::new(Worker::Fake("flood"));
    let mut command = stage.command("--device cpu self-check");
    let mut launcher = command.stderr(Stdio::null()).stdout(Stdio::null()).spawn().expect("the launcher exists");
    let status = format!("/proc/{}/status", launcher.id());
    let mut peak_kb = 0;
    eventually("the launcher ends", || {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let peak =
            text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        peak_kb = peak_kb.max(peak.unwrap_or(0));
        launcher.try_wait().expect("the process is a child of the test").is_some()
    });
    assert!(peak_kb > 0 && peak_kb < 100_000, "{peak_kb} kB");
}

#[test]
fn child_processes_of_a_worker_end_with_it() {
    let stage = Stage::new(Worker::Fake("leave-child"));
    stage.run("--device cpu self-check").exits_with(ExitCode::Success);
    assert_eq!(stage.pids().len(), 2);
    assert_no_leftovers(&stage);
}

#[test]
fn interrupt_stops_every_worker() {
    for (mode, interrupt, code) in [
        ("hang", Signal::SIGINT, ExitCode::Interrupted),
        ("hang", Signal::SIGTERM, ExitCode::Preempted),
        ("stubborn", Signal::SIGUSR1, ExitCode::Preempted),
    ] {
        let stage = Stage::new(Worker::Fake(mode));
        let line = "--workers 3 --device cpu self-check --set supervise.stop_timeout_s=0.3";
        let mut launcher = stage.command(line).stderr(Stdio::null()).spawn().expect("the launcher can be started");
        eventually("three workers are running", || stage.pids().len() == 3);
        signal(launcher.id(), interrupt);
        assert_eq!(wait(&mut launcher), Some(code.code().into()), "{mode}");
        assert_no_leftovers(&stage);
    }
}

/// The kernel kills real workers when their launcher is killed, even in the middle of a job.
#[test]
fn killed_launcher_leaves_no_worker() {
    // This process becomes the parent of the workers when their launcher dies. Without a parent in the same session, the
    // kernel would wake a stopped worker, which would then notice that its control socket has closed.
    set_child_subreaper(true).expect("the kernel knows subreapers");
    let stage = Stage::new(Worker::Real);
    let mut command = stage.command("--workers 2 --device cpu bench collectives");
    let mut launcher = command.stderr(Stdio::null()).stdout(Stdio::null()).spawn().expect("the program can be started");
    let pid = launcher.id();
    eventually("all workers have joined", || workers_of(pid).len() == 2 && workers_of(pid).into_iter().all(has_joined));
    let workers = workers_of(pid);
    // A stopped worker cannot end by itself. It can neither finish its job nor notice that its control socket has
    // closed.
    signal(workers[1], Signal::SIGSTOP);
    signal(pid, Signal::SIGKILL);
    wait(&mut launcher);
    for pid in workers {
        eventually("the worker ends", || !is_alive(pid));
    }
}

/// Whether a worker has connected to the other workers. A connected worker has a thread of Gloo.
fn has_joined(pid: u32) -> bool {
    has_thread(pid, "gloo")
}

#[test]
fn bench_shdd_times_vectorised_and_scalar_harmonics() {
    let ran = Stage::new(Worker::Real).run("--device cpu --json bench shdd");
    ran.exits_with(ExitCode::Success);
    let json = ran.json();
    let rows = json["rows"].as_array().expect("the result has rows");
    let degrees: Vec<u64> = rows.iter().filter_map(|row| row["degree"].as_u64()).collect();
    assert_eq!(degrees, [23, 47, 95]);
    for row in rows {
        assert_eq!(row["ok"], true, "{row}");
        for field in ["us_per_location", "us_per_location_scalar"] {
            assert!(row[field].as_f64().is_some_and(|us| us > 0.0), "{row}");
        }
        let fast = row["us_per_location"].as_f64();
        // Check only that the limit and `within_limit` are reported correctly. The time itself depends on the machine.
        let limited = row["degree"] == 47;
        assert_eq!(row["limit_us"].as_f64(), limited.then_some(3.0), "{row}");
        let within = fast.filter(|_| limited).map(|fast| fast <= 3.0);
        assert_eq!(row["within_limit"].as_bool(), within, "{row}");
    }
}

#[test]
fn bench_collectives_is_correct_and_bit_equal_from_run_to_run() {
    let stage = Stage::new(Worker::Real);
    let run = || {
        let ran = stage.run("--workers 3 --device cpu --json bench collectives --max-bytes 16384");
        ran.exits_with(ExitCode::Success);
        ran.json()
    };
    let (first, second) = (run(), run());
    assert_eq!(first["ok"], true);
    let pids = first["pids"].as_array().expect("the result lists process ids");
    assert!(pids.len() == 3 && pids.iter().collect::<std::collections::HashSet<_>>().len() == 3, "{pids:?}");
    let rows = |json: &serde_json::Value| json["rows"].as_array().expect("the result has rows").clone();
    let digests = |json| {
        rows(json)
            .iter()
            .map(|row| (row["op"].clone(), row["bytes"].clone(), row["digest"].clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(digests(&first), digests(&second), "two runs gave different sums");
    let operations: std::collections::BTreeSet<String> = rows(&first).iter().map(|row| row["op"].to_string()).collect();
    assert_eq!(operations.len(), 7, "{operations:?}");
    assert!(rows(&first).iter().all(|row| row["ok"] == true && row["us"].as_f64().is_some_and(|us| us > 0.0)));
}

#[test]
fn worker_killed_during_collectives_is_reported_as_the_first_cause() {
    let stage = Stage::new(Worker::Real);
    let mut command = stage.command("--workers 3 --device cpu bench collectives");
    let launcher = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the launcher can be started");
    let pid = launcher.id();
    eventually("all workers have joined", || workers_of(pid).len() == 3 && workers_of(pid).into_iter().all(has_joined));
    let victim = workers_of(pid)[1];
    signal(victim, Signal::SIGKILL);
    let ran = Ran::from(launcher.wait_with_output().expect("the process can be waited for"));
    ran.exits_with(ExitCode::WorkerFailed);
    let error = ran.stderr.lines().find(|line| line.starts_with("error:")).unwrap_or_default().to_owned();
    assert!(error.contains(&format!("(pid {victim}) was killed by SIGKILL")), "{}", ran.stderr);
    assert_no_leftovers(&stage);
}

#[test]
fn shards_are_inspected_and_verified_by_one_worker() {
    let stage = Stage::new(Worker::Real);
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/shards");
    let run =
        |verb: &str, name: &str| stage.run(&format!("--device cpu --json shards {verb} {}/{name}", golden.display()));
    let found = run("inspect", "pyarrow_f32_list_default.parquet");
    found.exits_with(ExitCode::Success).stderr_has("latitude      -80.0000 to 77.5000");
    let json = found.json();
    assert_eq!(
        (&json["ok"], &json["rows"], &json["width"], &json["views"]),
        (&true.into(), &64.into(), &8.into(), &2.into())
    );
    let verified = run("verify", "duckdb_f32_list.parquet");
    assert_eq!(verified.exits_with(ExitCode::Success).json()["rows"], 64);
    let bad = run("verify", "bad_latitude.parquet");
    bad.exits_with(ExitCode::BadData).stderr_has("row group 1: column `lat`: row 6: latitude 91, wanted -90 to 90");
    assert_eq!(bad.json()["ok"], false);
    for verb in ["inspect", "verify"] {
        let origin = format!("of `shards {verb}`); ");
        run(verb, "nothing")
            .exits_with(ExitCode::NoData)
            .stderr_has(&origin)
            .stderr_has("Parquet files with other names");
    }
    // `inspect` and `verify` skip the rows that training would skip, and report them.
    let skipping = |arguments: &str| {
        let path = golden.join("bad_latitude.parquet");
        let line = arguments.replace("PATH", &path.display().to_string());
        stage.run(&format!("--device cpu --json --set shards.on_bad_rows=\"skip\" shards {line}"))
    };
    let left_out = "1 of 64 rows are left out";
    let verified = skipping("verify PATH --epochs 2 --world-sizes 1,3");
    verified
        .exits_with(ExitCode::Success)
        .stderr_has(left_out)
        .stderr_has("row group 1: column `lat`: row 6: latitude 91");
    verified.stderr_has("each row once per epoch");
    let json = verified.json();
    assert_eq!((&json["skipped_rows"], &json["plan"]["rows"]), (&1.into(), &63.into()));
    let found = skipping("inspect PATH");
    found.exits_with(ExitCode::Success).stderr_has(left_out).stderr_has("latitude      -80.0000 to 77.5000");
    assert_eq!((&found.json()["skipped_rows"], &found.json()["statistics"]["rows"]), (&1.into(), &63.into()));
    let none = skipping("verify PATH --epochs 1 --world-sizes 2,0");
    none.exits_with(ExitCode::Config).stderr_has("--world-sizes contains 0");
}
