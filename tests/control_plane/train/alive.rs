//! Tests of a launcher whose terminal or disk does not respond. With a stuck terminal, the run must continue, and
//! signals must still work. With a stuck disk, the launcher must still end.

use std::fs::Permissions;
use std::io::{PipeReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use locdiff_core::exit_code::ExitCode;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::Signal;

use super::support::{BASE, events, run_dir, stage, train};
use crate::stage::{Ran, Stage, Worker, eventually, is_alive, signal, wait};

const SETTINGS: &str = "--set train.steps=6 --set checkpoint.every=3 --workers 2";

/// Starts a command whose stdout and stderr are a pipe that is already full. Returns the process and the read end of
/// the pipe.
fn start_with_full_pipe(command: &mut Command) -> (Child, PipeReader) {
    let (reader, mut writer) = std::io::pipe().expect("a pipe can be created");
    let size = fcntl(&writer, FcntlArg::F_SETPIPE_SZ(1)).expect("the size of a pipe can be changed");
    writer.write_all(&vec![b'.'; size.try_into().expect("sizes are positive")]).expect("the pipe is empty");
    let same = writer.try_clone().expect("a pipe can be duplicated");
    let child = command.stdout(writer).stderr(same).spawn().expect("the launcher can be started");
    // The `Command` still holds the write ends of the pipe. Drop them, so that the reader sees the end of the
    // output.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    (child, reader)
}

fn has_ended(stage: &Stage, run: &str) -> bool {
    run_dir(stage, run).join("events.jsonl").exists() && !events(stage, run, "ended").is_empty()
}

#[test]
fn training_ends_although_nobody_reads_its_output() {
    let stage = stage();
    let line = |run: &str| format!("{} --run {run} {SETTINGS} train", BASE.replace("--json", ""));
    // The reader starts to read after the end of the run, and gets the result.
    let (mut launcher, mut reader) = start_with_full_pipe(&mut stage.command(&line("read")));
    eventually("the run ends", || has_ended(&stage, "read"));
    let mut output = String::new();
    reader.read_to_string(&mut output).expect("the output is text");
    assert_eq!(wait(&mut launcher), Some(0), "{output}");
    assert!(output.contains("step 6 of 6") && output.contains("trained 6 steps"), "{output}");
    // If the reader never reads, the launcher waits until it gets a signal.
    let (mut launcher, _reader) = start_with_full_pipe(&mut stage.command(&line("unread")));
    eventually("the run ends", || has_ended(&stage, "unread"));
    assert!(is_alive(launcher.id()), "the launcher ended before its result was written");
    signal(launcher.id(), Signal::SIGTERM);
    assert_eq!(wait(&mut launcher), Some(ExitCode::Interrupted.code().into()));
    // If the reader closes the pipe, the run still ends normally.
    let (mut launcher, reader) = start_with_full_pipe(&mut stage.command(&line("gone")));
    drop(reader);
    assert_eq!(wait(&mut launcher), Some(0));
    assert!(has_ended(&stage, "gone"));
}

#[test]
fn signals_work_while_the_terminal_is_stuck() {
    let stage = Stage::new(Worker::Fake("hang"));
    let line = "--workers 2 --device cpu self-check --set supervise.stop_timeout_s=0.3";
    let (mut launcher, _reader) = start_with_full_pipe(&mut stage.command(line));
    eventually("two workers are running", || stage.pids().len() == 2);
    signal(launcher.id(), Signal::SIGHUP);
    signal(launcher.id(), Signal::SIGTERM);
    assert_eq!(wait(&mut launcher), Some(ExitCode::Preempted.code().into()), "wrong exit code after SIGHUP, SIGTERM");
    stage.pids().into_iter().for_each(|pid| eventually("the worker ends", || !is_alive(pid)));
}

#[test]
fn lines_that_a_stuck_terminal_cannot_take_are_counted() {
    let stage = Stage::new(Worker::Fake("flood"));
    let (mut launcher, mut reader) = start_with_full_pipe(&mut stage.command("--device cpu self-check"));
    eventually("the worker has started", || !stage.pids().is_empty());
    stage.pids().into_iter().for_each(|pid| eventually("the worker ends", || !is_alive(pid)));
    let mut output = String::new();
    reader.read_to_string(&mut output).expect("the output is text");
    assert_eq!(wait(&mut launcher), Some(0), "{}", &output[output.len().saturating_sub(1000)..]);
    let notice = output.lines().find(|line| line.starts_with("dropped ")).expect("a line says what was dropped");
    assert!(notice.ends_with("lines: the terminal does not keep up"), "{notice}");
    assert!(output.contains("all workers started, computed and exited normally"));
    // The queues hold less than 20 MiB of the 200 MiB that the worker wrote.
    assert!(output.len() < 50 << 20, "the terminal got {} bytes, wanted less than 50 MiB", output.len());
}

/// Runs the launcher in a terminal. In mode `stop`, the terminal is stopped (Ctrl-S) until the run has ended. In mode
/// `close`, the terminal is closed after the first step, so the launcher also gets SIGHUP.
const IN_A_TERMINAL: &str = r#"
import os, pty, sys, time
mode, events, *command = sys.argv[1:]
pid, terminal = pty.fork()
if pid == 0:
    os.environ["TERM"] = "xterm"
    os.execv(command[0], command)
def wait_for(event):
    for _ in range(6000):
        if os.path.exists(events) and f'"event":"{event}"' in open(events).read():
            return
        time.sleep(0.01)
    sys.exit(f"no event {event}")
if mode == "stop":
    os.write(terminal, b"\x13")
    wait_for("ended")
    os.write(terminal, b"\x11")
    output = b""
    try:
        while piece := os.read(terminal, 4096):
            output += piece
    except OSError:
        pass
    sys.stdout.buffer.write(output)
else:
    wait_for("progress")
    os.close(terminal)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"#;

#[test]
fn training_ends_although_its_terminal_is_stopped_or_closed() {
    let stage = stage();
    for mode in ["stop", "close"] {
        let line = format!("{} --run {mode} {SETTINGS} train", BASE.replace("--json", ""));
        let launcher = stage.command(&line);
        let mut command = Command::new("python3");
        command.args(["-c", IN_A_TERMINAL, mode]).arg(run_dir(&stage, mode).join("events.jsonl"));
        command.arg(launcher.get_program()).args(launcher.get_args()).current_dir(stage.path());
        command.env("XDG_RUNTIME_DIR", stage.path());
        let ran = Ran::from(command.output().expect("python3 can be started"));
        ran.exits_with(ExitCode::Success);
        assert_eq!(events(&stage, mode, "ended")[0]["step"], 6, "{mode}");
        if mode == "stop" {
            assert!(ran.stdout.contains("trained 6 steps"), "the result is missing after Ctrl-Q: {}", ran.stdout);
        }
    }
}

/// Takes a lease on a file and keeps it until the script is killed. The kernel makes other processes wait when they
/// open the file, as on a disk that does not respond. The kernel also sends SIGIO to the script, which then prints a
/// line.
const HOLD: &str = r#"
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, lambda *_: print("held", flush=True))
file = os.open(sys.argv[1], os.O_RDWR)
while True:
    try:
        fcntl.fcntl(file, 1024, fcntl.F_WRLCK)  # F_SETLEASE
        break
    except OSError:
        time.sleep(0.001)
time.sleep(600)
"#;

#[test]
fn launcher_ends_although_the_disk_does_not_respond() {
    let stage = stage();
    for (run, limit_s, interrupts, code) in [
        ("patient", 600, 2, ExitCode::Interrupted),
        ("impatient", 1, 1, ExitCode::Interrupted),
        ("alone", 1, 0, ExitCode::Io),
    ] {
        let settings = format!(
            "--set train.steps=1000000 --set checkpoint.every=1000000 --set supervise.checkpoint_timeout_s={limit_s} --workers 1"
        );
        let mut command = stage.command(&format!("{BASE} --run {run} {settings} train"));
        let launcher = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the launcher starts");
        let file = run_dir(&stage, run).join("events.jsonl");
        eventually("the first step is done", || file.exists() && !events(&stage, run, "progress").is_empty());
        let mut holder =
            Command::new("python3").args(["-c", HOLD]).arg(&file).stdout(Stdio::piped()).spawn().expect("python3 runs");
        let mut held = [0; 5];
        let stdout = holder.stdout.as_mut().expect("stdout is a pipe");
        stdout.read_exact(&mut held).expect("the script prints a line when the launcher opens the file");
        let workers = || std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", launcher.id()));
        if interrupts > 0 {
            signal(launcher.id(), Signal::SIGINT);
        }
        eventually("the worker ends", || workers().is_ok_and(|pids| pids.is_empty()));
        for _ in 1..interrupts {
            // A second signal within one second would count as part of the same request.
            std::thread::sleep(Duration::from_secs(2));
            assert!(is_alive(launcher.id()), "the launcher did not wait for the disk");
            signal(launcher.id(), Signal::SIGINT);
        }
        let ran = Ran::from(launcher.wait_with_output().expect("the launcher can be waited for"));
        holder.kill().and_then(|()| holder.wait()).expect("the holder can be killed");
        ran.exits_with(code).stderr_has("the disk does not respond");
    }
}

#[test]
fn worker_logs_are_capped() {
    let stage = stage();
    // Replace the worker with a script that writes 20 kB of lines and then runs the real worker.
    let worker = stage.path().join("locdiff-worker");
    let real = worker.canonicalize().expect("the worker exists");
    std::fs::remove_file(&worker).expect("the test folder is writable");
    let script = format!("#!/bin/sh\nseq 1 4000\nexec {} \"$@\"\n", real.display());
    std::fs::write(&worker, script).expect("the test folder is writable");
    std::fs::set_permissions(&worker, Permissions::from_mode(0o755)).expect("the file belongs to the test");
    let settings = "--set train.steps=1 --set supervise.log_bytes_max=4096 --workers 1";
    train(&stage, "small", settings).exits_with(ExitCode::Success);
    let log = std::fs::read_to_string(run_dir(&stage, "small").join("logs/0/rank-0.log")).expect("there is a log");
    assert!(log.len() <= 4096 && log.starts_with("1\n2\n"), "{} bytes: {log}", log.len());
    assert!(log.contains("bytes were cut here: supervise.log_bytes_max is 4096\n"), "{log}");
    assert!(log.contains("\n3999\n4000\n"), "the newest lines are missing: {log}");
}

#[test]
fn line_of_all_ranks_is_shown_once() {
    let stage = Stage::new(Worker::Fake("same-line"));
    let ran = stage.run("--workers 3 --device cpu self-check");
    ran.exits_with(ExitCode::Success).stderr_has("[ranks 0-2] the same line").stderr_has("[rank 1] rank 1 has started");
    assert_eq!(ran.stderr.matches("the same line").count(), 1, "{}", ran.stderr);
}

#[test]
fn control_socket_survives_bad_folders_and_killed_launchers() {
    let stage = Stage::new(Worker::Fake("hang"));
    let mut launcher =
        stage.command("--device cpu self-check").stderr(Stdio::null()).spawn().expect("the launcher starts");
    eventually("the worker is running", || !stage.pids().is_empty());
    signal(launcher.id(), Signal::SIGKILL);
    wait(&mut launcher);
    assert_eq!(stage.leftover_sockets(), 1, "a killed launcher removed its folder");
    let stage_of_good = Stage::new(Worker::Fake("good"));
    let run = |folder: &std::path::Path| {
        let mut command = stage_of_good.command("--device cpu self-check");
        Ran::from(command.env("XDG_RUNTIME_DIR", folder).output().expect("the launcher can be started"))
    };
    run(stage.path()).exits_with(ExitCode::Success);
    assert_eq!(stage.leftover_sockets(), 0, "the folder of the killed launcher was not removed");
    run(std::path::Path::new("/nowhere/at/all")).exits_with(ExitCode::Success);
    stage.pids().into_iter().for_each(|pid| signal(pid, Signal::SIGKILL));
}

#[test]
fn url_with_credentials_is_refused_before_anything_is_written() {
    let stage = stage();
    let ran = stage.run(&format!("{BASE} --run never --set shards.train=s3://KEY:hunter2@data/x train"));
    ran.exits_with(ExitCode::Config).stderr_has("shards.train: must not contain credentials");
    assert!(!ran.stderr.contains("hunter2") && !ran.stdout.contains("hunter2"), "{}{}", ran.stdout, ran.stderr);
    assert!(!run_dir(&stage, "never").exists(), "the run folder was created");
}

/// The workers send their results while the last checkpoint is being committed. The run must not count as ended if the
/// commit fails.
#[test]
fn run_whose_last_checkpoint_cannot_be_committed_has_failed() {
    let stage = stage();
    let latest = run_dir(&stage, "late").join("latest");
    std::fs::create_dir_all(latest.join("not a file")).expect("the test folder is writable");
    let ran = stage.run(&format!("{BASE} --run late --set train.steps=3 --set checkpoint.every=3 --workers 2 train"));
    ran.exits_with(ExitCode::Io).stderr_has("latest");
    assert!(events(&stage, "late", "ended").is_empty(), "the run counts as ended");
}
