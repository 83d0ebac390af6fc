//! A temporary folder for each test. It contains the launcher, the kind of worker that the test needs, and the control
//! sockets.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

use locdiff_core::exit_code::ExitCode;
use locdiff_core::protocol::PROTOCOL_VERSION;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

pub(crate) const LAUNCHER: &str = env!("CARGO_BIN_EXE_locdiff-launch");

/// How long a test waits for a condition before it fails. This is far longer than any command takes, even on a busy
/// machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// Which worker executable is in the launcher's folder.
pub(crate) enum Worker {
    None,
    /// `fake_worker.py` and its mode. The mode `crash` applies to all ranks, and `crash@1` only to rank 1.
    Fake(&'static str),
    /// The real worker, which Cargo builds into the same folder as the launcher.
    Real,
}

pub(crate) struct Stage {
    folder: tempfile::TempDir,
    mode: &'static str,
}

impl Stage {
    pub(crate) fn new(worker: Worker) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        // Copy the launcher instead of linking it, because the launcher resolves links before it looks for the worker
        // in its own folder.
        std::fs::copy(LAUNCHER, folder.path().join("locdiff-launch")).expect("the file can be copied");
        let beside = folder.path().join("locdiff-worker");
        let mode = match worker {
            Worker::None => "",
            Worker::Fake(mode) => {
                let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/control_plane/fake_worker.py");
                symlink(script, beside).expect("the test folder is writable");
                mode
            }
            Worker::Real => {
                let real = Path::new(LAUNCHER).with_file_name("locdiff-worker");
                assert!(real.exists(), "{} is missing: build the whole workspace", real.display());
                symlink(real, beside).expect("the test folder is writable");
                ""
            }
        };
        Self { folder, mode }
    }

    /// A stage with the real worker and GeoCLIP's weights, which `geoclip import` puts into `shards/geoclip`.
    pub(crate) fn with_geoclip() -> Self {
        let stage = Self::new(Worker::Real);
        stage.run(&format!("geoclip import --device cpu --wheel {}", wheel().display())).exits_with(ExitCode::Success);
        stage
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn command(&self, line: &str) -> Command {
        let mut command = Command::new(self.path().join("locdiff-launch"));
        command
            .args(line.split_whitespace())
            .current_dir(self.path())
            .env("XDG_RUNTIME_DIR", self.path())
            .env("FAKE_WORKER", self.mode)
            .env("FAKE_PIDS", self.pids_file())
            .env("FAKE_PROTOCOL", PROTOCOL_VERSION.to_string())
            .env("FAKE_VERSION", locdiff_core::VERSION)
            .env("FAKE_REVISION", locdiff_core::REVISION)
            // Several tests run at once. If the threads of one wait for each other busily, they slow down the others.
            .env("OMP_WAIT_POLICY", "passive")
            .env_remove("CUDA_VISIBLE_DEVICES");
        command
    }

    pub(crate) fn run(&self, line: &str) -> Ran {
        Ran::from(self.command(line).output().expect("the launcher can be started"))
    }

    fn pids_file(&self) -> PathBuf {
        self.path().join("pids")
    }

    /// The process ids that fake workers have recorded so far.
    pub(crate) fn pids(&self) -> Vec<u32> {
        let text = std::fs::read_to_string(self.pids_file()).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// The number of socket folders that launchers left behind.
    pub(crate) fn leftover_sockets(&self) -> usize {
        let entries = std::fs::read_dir(self.path()).expect("the stage can be read").flatten();
        entries
            .filter(|entry| entry.path().is_dir() && entry.file_name().as_encoded_bytes().starts_with(b"locdiff-"))
            .count()
    }
}

/// Path of GeoCLIP's wheel, which `make setup` downloads.
pub(crate) fn wheel() -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.geoclip/geoclip-1.3.0-py3-none-any.whl");
    assert!(path.exists(), "{} is missing: run `make setup`", path.display());
    path
}

/// Output and exit code of a finished command.
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Ran {
    #[track_caller]
    pub(crate) fn exits_with(&self, code: ExitCode) -> &Self {
        assert_eq!(self.code, Some(code.code().into()), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }

    #[track_caller]
    pub(crate) fn stderr_has(&self, part: &str) -> &Self {
        assert!(self.stderr.contains(part), "missing {part:?} in stderr:\n{}", self.stderr);
        self
    }

    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        let last = self.stdout.lines().last().unwrap_or_default();
        serde_json::from_str(last).unwrap_or_else(|error| panic!("last line of stdout is not JSON ({error}): {last}"))
    }
}

/// Waits until `condition` holds. Panics after [`PATIENCE`].
#[track_caller]
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "timed out waiting until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits for a child to exit. Panics after [`PATIENCE`].
#[track_caller]
pub(crate) fn wait(child: &mut Child) -> Option<i32> {
    let mut code = None;
    eventually("the launcher ends", || match child.try_wait().expect("the process is a child of the test") {
        Some(status) => {
            code = status.code();
            true
        }
        None => false,
    });
    code
}

/// Whether a process has a thread whose name contains `part`.
pub(crate) fn has_thread(pid: u32, part: &str) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok())
        .any(|name| name.contains(part))
}

/// Sends a signal to a live process.
pub(crate) fn signal(pid: u32, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(pid).expect("process ids are below 2^31")), signal).expect("the process is alive");
}

/// Whether a process is running, that is, exists and is not a zombie.
pub(crate) fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().and_then(|rest| rest.chars().next()).is_some_and(|state| state != 'Z' && state != 'X')
}

/// Whether a worker has been given its job. Then it has a thread that sends heartbeats.
pub(crate) fn has_begun(worker: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{worker}/task")).into_iter().flatten().flatten();
    threads.into_iter().any(|thread| {
        std::fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name.trim_end() == "heartbeat")
    })
}

/// The process ids of the launcher's children, which are the workers.
pub(crate) fn workers_of(launcher: u32) -> Vec<u32> {
    let text = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}
