//! Tests of the real worker program. The test itself plays the launcher.

use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use locdiff_core::exit_code::ExitCode;
use locdiff_core::protocol::{
    CONTROL_VARIABLE, Job, JobResult, LAUNCHER_PID_VARIABLE, Meeting, PROTOCOL_VERSION, ToLauncher, ToWorker,
    WorkerSlot, read_message, write_message,
};

const WORKER: &str = env!("CARGO_BIN_EXE_locdiff-worker");

/// How long a test waits for a worker to exit before it fails. Loading libtorch and exiting takes far less, even on a
/// busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

struct Launched {
    child: Child,
    socket: UnixStream,
    _folder: tempfile::TempDir,
}

fn launch() -> Launched {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let path = folder.path().join("control");
    let listener = UnixListener::bind(&path).expect("the socket can be bound");
    let child = Command::new(WORKER)
        .env(CONTROL_VARIABLE, &path)
        .env(LAUNCHER_PID_VARIABLE, std::process::id().to_string())
        .env("RANK", "3")
        .spawn()
        .expect("the worker program exists");
    let (socket, _) = listener.accept().expect("the worker connects");
    Launched { child, socket, _folder: folder }
}

fn wait(child: &mut Child) -> Option<i32> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().expect("the worker is a child process") {
            return status.code();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    panic!("the worker did not exit within {PATIENCE:?}");
}

fn start(slot: WorkerSlot, job: Job) -> ToWorker {
    let meeting = Meeting {
        interface: String::new(),
        attempt: 0,
        tensor_parallel: 1,
        rendezvous_timeout_s: 30.0,
        collective_timeout_s: 30.0,
        heartbeat_s: 0.25,
    };
    ToWorker::Start { place: slot, meeting, job }
}

fn read_hello(socket: &mut UnixStream) -> locdiff_core::protocol::Hello {
    match read_message(socket).expect("the messages are valid") {
        Some(ToLauncher::Hello(hello)) => hello,
        other => panic!("the first message is {other:?}, wanted a hello"),
    }
}

/// The next message that is not a heartbeat.
fn read_report(socket: &mut UnixStream) -> Option<ToLauncher> {
    loop {
        match read_message::<ToLauncher>(socket).expect("the messages are valid") {
            Some(ToLauncher::Beat(_)) => {}
            other => return other,
        }
    }
}

#[test]
fn worker_introduces_itself_does_its_job_and_exits() {
    let mut worker = launch();
    let hello = read_hello(&mut worker.socket);
    assert_eq!((hello.protocol, hello.rank, hello.pid), (PROTOCOL_VERSION, 3, worker.child.id()));
    assert_eq!((hello.libtorch_built.as_str(), hello.libtorch_loaded.as_str()), ("2.11.0", "2.11.0"));
    let slot = WorkerSlot { rank: 3, world: 4, node: 0, local_rank: 3, gpu: None, threads: 1 };
    write_message(&mut worker.socket, &start(slot, Job::SelfCheck)).expect("the worker reads the message");
    let result = read_report(&mut worker.socket);
    let Some(ToLauncher::Result(answer)) = result else { panic!("wanted a result, got {result:?}") };
    assert!(matches!(&*answer, JobResult::SelfCheck(check) if check.error_max == 0.0), "{answer:?}");
    assert_eq!(wait(&mut worker.child), Some(0));
}

#[test]
fn missing_gpu_is_an_error_instead_of_a_run_on_the_cpu() {
    let mut worker = launch();
    read_hello(&mut worker.socket);
    let missing = u32::try_from(tch::Cuda::device_count()).expect("the number of GPUs fits in a u32");
    let slot = WorkerSlot { rank: 3, world: 4, node: 0, local_rank: 3, gpu: Some(missing), threads: 1 };
    write_message(&mut worker.socket, &start(slot, Job::SelfCheck)).expect("the worker reads the message");
    let result = read_report(&mut worker.socket);
    assert!(
        matches!(&result, Some(ToLauncher::Failed(failure)) if failure.message.contains(&format!("no GPU {missing}"))),
        "{result:?}"
    );
    assert_eq!(wait(&mut worker.child), Some(ExitCode::WorkerFailed.code().into()));
}

#[test]
fn worker_exits_when_its_launcher_disconnects() {
    let mut worker = launch();
    read_hello(&mut worker.socket);
    drop(worker.socket);
    assert_eq!(wait(&mut worker.child), Some(ExitCode::Interrupted.code().into()));
}

/// The launcher disconnects while the worker's main thread waits for a message in the middle of a job.
#[test]
fn worker_exits_when_its_launcher_disconnects_during_a_job() {
    let mut worker = launch();
    read_hello(&mut worker.socket);
    let slot = WorkerSlot { rank: 3, world: 4, node: 0, local_rank: 3, gpu: None, threads: 1 };
    // In this job, rank 3 waits for the address of the store. This test never sends the address.
    write_message(&mut worker.socket, &start(slot, Job::BenchCollectives { bytes_max: 1024 }))
        .expect("the worker reads the message");
    drop(worker.socket);
    assert_eq!(wait(&mut worker.child), Some(ExitCode::Interrupted.code().into()));
}

#[test]
fn worker_started_by_hand_explains_how_to_start_it() {
    let output = Command::new(WORKER).env_remove(CONTROL_VARIABLE).output().expect("the worker program exists");
    assert_eq!(output.status.code(), Some(ExitCode::Usage.code().into()));
    assert!(String::from_utf8_lossy(&output.stderr).contains("locdiff-launch"));
}

#[test]
fn worker_does_not_start_after_its_launcher_has_died() {
    let mut child = Command::new(WORKER)
        .env(CONTROL_VARIABLE, "/nonexistent")
        .env(LAUNCHER_PID_VARIABLE, "1")
        .env("RANK", "0")
        .stderr(Stdio::piped())
        .spawn()
        .expect("the worker program exists");
    let mut text = String::new();
    child.stderr.take().expect("stderr is piped").read_to_string(&mut text).expect("stderr is text");
    assert!(text.contains("the launcher (pid 1) is gone"), "{text}");
    assert_eq!(wait(&mut child), Some(ExitCode::Usage.code().into()));
}

/// Checks that the worker finds every library without any environment variable such as `LD_LIBRARY_PATH`.
#[test]
fn worker_finds_its_libraries_through_its_run_path() {
    let output =
        Command::new("ldd").arg(WORKER).env_clear().env("PATH", "/usr/bin:/bin").output().expect("ldd is installed");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("libtorch_cpu.so => /"), "{text}");
    assert!(!text.contains("not found"), "{text}");
}
