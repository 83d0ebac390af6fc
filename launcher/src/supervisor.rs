//! Runs the processes and sockets of a gang (the workers of one attempt). The supervisor spawns the workers, passes
//! events to the [`Coordinator`], and carries out the coordinator's actions until all workers have ended.
//!
//! No worker outlives the launcher. The supervisor waits until all workers have ended, and kills workers that do not
//! end in time. If the supervisor itself fails, dropping it kills the workers. Each worker also asks the kernel to kill
//! it when its parent dies. The kernel does so when the thread that spawned the worker ends, so workers are spawned on
//! the main thread.

use std::collections::VecDeque;
use std::fmt::Display;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures::{SinkExt, StreamExt};
use locdiff_core::config::RunConfig;
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::protocol::{
    CONTROL_VARIABLE, FRAME_BYTES_MAX, Failure, Hello, Job, JobResult, LAUNCHER_PID_VARIABLE, MEMORY_EVENTS_VARIABLE,
    Meeting, PartsWritten, ToLauncher, ToWorker, TypedResult,
};
use locdiff_core::pulse::{self, Beat};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::process::{Child, Command};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal as UnixSignal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio_util::bytes::Bytes;
use tokio_util::codec::LengthDelimitedCodec;

use crate::coordinator::{Action, Coordinator, Exit, GangEvent, Limits, Outcome};
use crate::error::{LaunchError, exit_code_of, reported};
use crate::faults::RandomFaults;
use crate::pulses::{PhaseLimits, TICK};
use crate::rendezvous::NodeWorkers;
use crate::report::{self, EndedWorker};

/// Largest number of lines of a worker's output that an error report quotes.
const LAST_LINES_MAX: usize = 20;

/// Largest length of a line of a worker's output, bytes. Longer lines are split.
const LINE_BYTES_MAX: u64 = 8 << 10;

/// Capacity of the queue of lines and messages from the workers. While the queue is full, workers that write output
/// have to wait.
const NOTICES_MAX: usize = 1024;

/// How long to wait for remaining output and messages after a worker has ended. A process that the worker started may
/// hold the worker's pipes and socket open forever.
const OUTPUT_GRACE: Duration = Duration::from_secs(1);

/// Name of the thread that computes while the main thread waits for signals.
const COMPUTING_THREAD: &str = "computing";

/// A gang to run: the workers of one attempt.
struct Gang<'a> {
    /// Path of the worker program.
    worker: PathBuf,
    /// Rank and device of each worker.
    world: &'a NodeWorkers,
    /// How the workers connect to each other.
    meeting: Meeting,
    /// The job that every worker gets.
    job: Job,
    /// Time limits.
    limits: Limits,
}

/// Receives the output and the reports of a gang while it runs.
pub trait GangObserver {
    /// A worker wrote a line to stdout or stderr.
    fn line(&mut self, rank: usize, line: &str) {
        tracing::info!("[rank {rank}] {line}");
    }
    /// A worker sent a heartbeat.
    fn beat(&mut self, _rank: usize, _: &Beat) {}
    /// A worker sent a report about its job.
    fn report(&mut self, _: ToLauncher) {}
    /// Every rank has written its parts of a checkpoint. The observer must commit them. An error stops the gang.
    fn commit(&mut self, _: &[PartsWritten]) -> Result<(), LaunchError> {
        let text = "a worker wrote a checkpoint in a job without checkpoints: this is a bug";
        Err(LaunchError::new(ExitCode::WorkerFailed, text))
    }
}

/// An observer that logs the output of workers and ignores their reports.
#[derive(Debug)]
pub struct Echo;

impl GangObserver for Echo {}

/// An observer that ignores the output and the reports of workers.
#[derive(Debug)]
pub struct Silence;

impl GangObserver for Silence {
    fn line(&mut self, _: usize, _: &str) {}
}

/// The results of a gang that succeeded.
#[derive(Debug)]
pub struct GangResult<T> {
    /// The hello of each rank.
    pub hellos: Vec<Hello>,
    /// The result of each rank.
    pub results: Vec<T>,
}

impl<T> GangResult<T> {
    /// The result of rank 0.
    pub fn first(self) -> anyhow::Result<T> {
        self.results.into_iter().next().context("a gang has no workers: this is a bug")
    }
}

/// Path of `locdiff-worker`, which must be in the folder of the launcher's executable.
fn worker_path() -> Result<PathBuf, LaunchError> {
    let launcher = std::env::current_exe().map_err(|error| worker_missing("locdiff-worker", error))?;
    let path = launcher.with_file_name("locdiff-worker");
    match std::fs::metadata(&path) {
        Ok(metadata) if metadata.is_file() && metadata.permissions().mode() & 0o111 != 0 => Ok(path),
        Ok(_) => Err(worker_missing(path, "not an executable file")),
        Err(error) => Err(worker_missing(path, error)),
    }
}

fn worker_missing(path: impl AsRef<Path>, reason: impl Display) -> LaunchError {
    reported!(
        WorkerMissing,
        "no worker at {}: {reason}; build it with `make build`, or install both programs into one folder",
        path.as_ref().display()
    )
}

/// Runs gangs one after another on this thread. A signal that arrives between two gangs is not lost: it interrupts the
/// next gang.
#[derive(Debug)]
pub struct Supervisor {
    runtime: Runtime,
    signals: Signals,
    random_faults: Option<RandomFaults>,
}

/// The signals with which a user or a scheduler asks to stop.
#[derive(Debug)]
struct Signals {
    interrupts: UnixSignal,
    terminations: UnixSignal,
    user_signals: UnixSignal,
    /// The exit code that belongs to the first signal; `None` if no signal has arrived.
    code: Option<ExitCode>,
}

impl Signals {
    /// Starts to watch the signals. Must be called within an async runtime.
    fn watch() -> std::io::Result<Self> {
        Ok(Self {
            interrupts: signal(SignalKind::interrupt())?,
            terminations: signal(SignalKind::terminate())?,
            user_signals: signal(SignalKind::user_defined1())?,
            code: None,
        })
    }

    async fn recv(&mut self) {
        let code = tokio::select! {
            _ = self.interrupts.recv() => ExitCode::Interrupted,
            _ = self.terminations.recv() => ExitCode::Preempted,
            _ = self.user_signals.recv() => ExitCode::Preempted,
        };
        self.code.get_or_insert(code);
    }

    /// The error of a command that was asked to stop.
    fn error(&self) -> LaunchError {
        match self.code {
            Some(ExitCode::Preempted) => reported!(Preempted, "stopped by a signal; the same command resumes the run"),
            _ => LaunchError::interrupted(),
        }
    }
}

impl Supervisor {
    /// Starts watching for SIGINT, SIGTERM and SIGUSR1.
    pub fn new() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("cannot start the async runtime")?;
        let within = runtime.enter();
        let signals = Signals::watch().context("cannot install signal handlers")?;
        drop(within);
        Ok(Self { runtime, signals, random_faults: None })
    }

    /// Starts the workers of `world`, gives each of them `job`, and waits for all results. `attempt` is the number of
    /// the training attempt, or 0 for any other job. Fails if a worker returns a result that does not belong to `job`.
    pub fn run<T: TypedResult>(
        &mut self,
        config: &RunConfig,
        world: &NodeWorkers,
        job: Job,
        attempt: u32,
        observer: &mut dyn GangObserver,
    ) -> anyhow::Result<GangResult<T>> {
        let supervise = &config.supervise;
        let limits = Limits {
            start: Duration::from_secs_f64(supervise.start_timeout_s),
            stop: Duration::from_secs_f64(supervise.stop_timeout_s),
            preempt: Duration::from_secs_f64(supervise.preempt_timeout_s),
            phases: PhaseLimits::new(supervise),
        };
        let meeting = Meeting {
            interface: config.network.interface.clone(),
            attempt,
            tensor_parallel: config.parallel.tensor,
            rendezvous_timeout_s: supervise.rendezvous_timeout_s,
            collective_timeout_s: supervise.collective_timeout_s,
        };
        let gang = Gang { worker: worker_path()?, world, meeting, job, limits };
        let supervised = self::supervise(&gang, observer, &mut self.signals, &mut self.random_faults);
        let GangResult { hellos, results } = match self.runtime.block_on(supervised) {
            Err(error) if exit_code_of(&error) == ExitCode::Interrupted => return Err(self.signals.error().into()),
            outcome => outcome?,
        };
        let of_this_job = |(rank, result)| {
            let job = gang.job.name();
            T::try_from(result).map_err(|wrong| {
                reported!(WorkerIncompatible, "worker rank {rank} sent a wrong result for `{job}`: {wrong}")
            })
        };
        let results = results.into_iter().enumerate().map(of_this_job).collect::<Result<_, _>>()?;
        Ok(GangResult { hellos, results })
    }

    /// Makes training workers fail at random.
    pub fn inject_at_random(&mut self, faults: RandomFaults) {
        self.random_faults = Some(faults);
    }

    /// Runs `work` on another thread and returns its result. Ctrl-C and SIGTERM make this function fail at once. They
    /// do not stop the thread, which ends with the process at the latest.
    pub fn compute<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
    ) -> anyhow::Result<T> {
        let (done, result) = oneshot::channel();
        // Sending fails after an interrupt, because the receiver is gone. Ignore this.
        let work = move || drop(done.send(work()));
        std::thread::Builder::new().name(COMPUTING_THREAD.into()).spawn(work).context("cannot start a thread")?;
        let signals = &mut self.signals;
        self.runtime.block_on(async {
            tokio::select! {
                found = result => found.context("the computing thread panicked: this is a bug")?,
                () = signals.recv() => Err(signals.error().into()),
            }
        })
    }

    /// Fails if the user has asked to stop.
    pub fn check_interrupted(&mut self) -> Result<(), LaunchError> {
        self.pause(Duration::from_millis(1))
    }

    /// Waits. Fails at once if the user asks to stop, or has asked before.
    pub fn pause(&mut self, wait: Duration) -> Result<(), LaunchError> {
        let signals = &mut self.signals;
        let is_asked = async { signals.code.is_some() || tokio::time::timeout(wait, signals.recv()).await.is_ok() };
        if self.runtime.block_on(is_asked) { Err(self.signals.error()) } else { Ok(()) }
    }
}

async fn supervise(
    gang: &Gang<'_>,
    observer: &mut dyn GangObserver,
    signals: &mut Signals,
    random_faults: &mut Option<RandomFaults>,
) -> anyhow::Result<GangResult<JobResult>> {
    let control = ControlSocket::bind()?;
    let oom_kills_before = oom_kills();
    let (events, mut inbox) = mpsc::channel(NOTICES_MAX);
    let mut members = spawn_all(gang, &control, &events)?;
    let began = Instant::now();
    let mut coordinator = Coordinator::new(members.len(), gang.meeting.attempt, gang.limits, Duration::ZERO);
    let mut ended_at = None;
    let outcome = loop {
        if let Some(outcome) = coordinator.outcome() {
            let since = ended_at.get_or_insert_with(Instant::now).elapsed();
            if members.iter().all(WorkerHandle::is_drained) || since >= OUTPUT_GRACE {
                break outcome;
            }
        }
        let deadline = match ended_at {
            Some(_) => Duration::from_millis(50),
            None => coordinator.deadline().map_or(Duration::MAX, |at| at.saturating_sub(began.elapsed())),
        };
        let event = tokio::select! {
            Some(notice) = inbox.recv() => match handle_notice(notice, &mut members, observer) {
                Some(event) => event,
                None => continue,
            },
            connection = control.listener.accept() => {
                let (stream, _) = connection.context("cannot accept a connection on the control socket")?;
                accept_worker(stream, &members, &events);
                continue;
            }
            () = signals.recv() => {
                let has_begun = |member: &WorkerHandle| pulse::read_step(&control.folder, member.rank).unwrap_or(0) > 0;
                let has_progress = matches!(gang.job, Job::Train(_)) && members.iter().any(has_begun);
                GangEvent::Interrupted { has_progress }
            }
            () = tokio::time::sleep(deadline.min(TICK)) => GangEvent::Tick,
        };
        if let Some(fault) = random_faults.as_mut().and_then(|faults| faults.due(members.len())) {
            members[fault.rank as usize].send(ToWorker::Inject(fault));
        }
        if let GangEvent::Message { rank, message: ToLauncher::Beat(beat) } = &event {
            observer.beat(*rank as usize, beat);
        }
        let mut actions = VecDeque::from(coordinator.step(event, began.elapsed()));
        while let Some(action) = actions.pop_front() {
            if let Some(event) = carry_out(action, gang, &mut members, observer) {
                actions.extend(coordinator.step(event, began.elapsed()));
            }
        }
    };
    match outcome {
        Outcome::Done(results) => Ok(GangResult { hellos: coordinator.hellos(), results }),
        Outcome::Failed(causes) => {
            let workers = members.into_iter().zip(&gang.world.slots).enumerate().map(|(rank, (member, slot))| {
                let (mut last_beat, exit) = coordinator.end_of(rank);
                // The last heartbeat may be many steps old.
                if let (Some(beat), Some(step)) = (&mut last_beat, pulse::read_step(&control.folder, rank as u32)) {
                    beat.step = step;
                }
                EndedWorker { pid: member.pid, gpu: slot.gpu, last_beat, exit, last_lines: member.last_lines.into() }
            });
            let oom_killed = oom_kills() > oom_kills_before;
            Err(report::failure(gang.job.name(), &causes, &workers.collect::<Vec<_>>(), oom_killed).into())
        }
    }
}

/// How many processes of this process's cgroup the OOM killer has killed so far; `None` if this is not known.
fn oom_kills() -> Option<u64> {
    if let Some(path) = std::env::var_os(MEMORY_EVENTS_VARIABLE) {
        return report::oom_kill_count(&std::fs::read_to_string(path).unwrap_or_default());
    }
    let membership = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    report::oom_kills(Path::new("/sys/fs/cgroup"), &membership)
}

/// The socket that workers connect to, in a folder that only this user can access. Dropping the `ControlSocket` removes
/// the folder.
struct ControlSocket {
    listener: UnixListener,
    folder: PathBuf,
}

impl ControlSocket {
    fn bind() -> anyhow::Result<Self> {
        let base = runtime_folder()?;
        let folder = base.join(std::process::id().to_string());
        // Process ids are reused, so an earlier launcher that was killed may have left a folder with this name.
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::DirBuilder::new().mode(0o700).create(&folder).map_err(LaunchError::at(&folder))?;
        let path = folder.join("control");
        let listener = UnixListener::bind(&path).map_err(LaunchError::at(path))?;
        Ok(Self { listener, folder })
    }

    fn path(&self) -> PathBuf {
        self.folder.join("control")
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// The folder for control sockets: `$XDG_RUNTIME_DIR/locdiff`, else `$TMPDIR/locdiff-UID`, else `/tmp/locdiff-UID`.
/// Creates the folder if it is missing. Fails if another user owns the folder or can access it.
fn runtime_folder() -> Result<PathBuf, LaunchError> {
    let user = nix::unistd::getuid();
    let folder = match std::env::var_os("XDG_RUNTIME_DIR").filter(|value| !value.is_empty()) {
        Some(base) => Path::new(&base).join("locdiff"),
        None => std::env::temp_dir().join(format!("locdiff-{user}")),
    };
    let fail = LaunchError::at(folder.clone());
    match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(fail(error)),
        _ => {}
    }
    let metadata = std::fs::symlink_metadata(&folder).map_err(&fail)?;
    if !metadata.is_dir() || metadata.uid() != user.as_raw() || metadata.mode() & 0o077 != 0 {
        let reason = "not a folder that only this user can access (mode 0700); remove it, or set XDG_RUNTIME_DIR";
        return Err(fail(std::io::Error::other(reason)));
    }
    Ok(folder)
}

/// A notice to the supervisor from a task that watches a worker.
enum Notice {
    Line { rank: usize, line: String },
    OutputEnded { rank: usize },
    Connected { rank: usize, replies: mpsc::UnboundedSender<ToWorker> },
    Happened(GangEvent),
}

struct WorkerHandle {
    rank: u32,
    pid: u32,
    running: bool,
    open_outputs: usize,
    last_lines: VecDeque<String>,
    replies: Option<mpsc::UnboundedSender<ToWorker>>,
}

impl WorkerHandle {
    /// Sends a message to the worker. If the worker has closed its socket, drops the message, because the worker's exit
    /// status will tell the reason.
    fn send(&self, message: ToWorker) {
        if let Some(replies) = &self.replies {
            let _ = replies.send(message);
        }
    }

    /// Whether the process has ended and all its output has been read.
    fn is_drained(&self) -> bool {
        !self.running && self.open_outputs == 0
    }
}

fn spawn_all(
    gang: &Gang<'_>,
    control: &ControlSocket,
    events: &mpsc::Sender<Notice>,
) -> anyhow::Result<Vec<WorkerHandle>> {
    let mut members = Vec::with_capacity(gang.world.slots.len());
    for rank in 0..gang.world.slots.len() {
        // On an error, the launcher drops the runtime, and so the children that were spawned before. Dropping a child
        // kills it.
        let mut child =
            command(gang, rank, &control.path()).spawn().map_err(|error| spawn_error(&gang.worker, error))?;
        let pid = child.id().context("a worker that was just spawned has no process id: this is a bug")?;
        let stdout = child.stdout.take().context("the stdout of a worker is not a pipe: this is a bug")?;
        let stderr = child.stderr.take().context("the stderr of a worker is not a pipe: this is a bug")?;
        tokio::spawn(read_lines(rank, stdout, events.clone()));
        tokio::spawn(read_lines(rank, stderr, events.clone()));
        tokio::spawn(wait(rank, child, events.clone()));
        let rank = rank as u32;
        members.push(WorkerHandle {
            rank,
            pid,
            running: true,
            open_outputs: 2,
            last_lines: VecDeque::new(),
            replies: None,
        });
    }
    Ok(members)
}

fn spawn_error(worker: &Path, error: std::io::Error) -> LaunchError {
    let is_not_executable =
        matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::InvalidInput);
    // ENOEXEC has no `ErrorKind`.
    if is_not_executable || error.raw_os_error() == Some(nix::errno::Errno::ENOEXEC as i32) {
        return worker_missing(worker, error);
    }
    LaunchError::at(worker)(error)
}

fn command(gang: &Gang<'_>, rank: usize, control: &Path) -> Command {
    let slot = &gang.world.slots[rank];
    let mut command = Command::new(&gang.worker);
    command
        .env(CONTROL_VARIABLE, control)
        .env(LAUNCHER_PID_VARIABLE, std::process::id().to_string())
        .env("RANK", slot.rank.to_string())
        .env("WORLD_SIZE", slot.world.to_string())
        .env("LOCAL_RANK", slot.local_rank.to_string())
        .env("OMP_NUM_THREADS", slot.threads.to_string())
        // Make CUDA number the GPUs in the order of the PCI bus, as NVML does. By default, CUDA puts the fastest GPU
        // first.
        .env("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // A worker in its own process group does not receive Ctrl-C from the terminal. The launcher receives Ctrl-C and
        // stops the workers.
        .process_group(0)
        .kill_on_drop(true);
    if slot.gpu.is_some() && std::env::var_os("NCCL_SOCKET_IFNAME").is_none() {
        let interface = if gang.meeting.interface.is_empty() { "lo" } else { &gang.meeting.interface };
        command.env("NCCL_SOCKET_IFNAME", interface);
    }
    if gang.world.share_gpu {
        command.env("NCCL_HOSTID", format!("locdiff-{}-{rank}", std::process::id()));
    }
    command
}

async fn wait(rank: usize, mut child: Child, events: mpsc::Sender<Notice>) {
    let status = child.wait().await.ok();
    let exit = match status.and_then(|status| status.signal()) {
        Some(signal) => Exit::Signal(signal),
        None => Exit::Code(status.and_then(|status| status.code()).unwrap_or(-1)),
    };
    let rank = rank as u32;
    let _ = events.send(Notice::Happened(GangEvent::Exited { rank, exit })).await;
    // The socket usually closes when the process ends. If another process holds the socket open, report it as closed
    // nevertheless.
    tokio::time::sleep(OUTPUT_GRACE).await;
    let _ = events.send(Notice::Happened(GangEvent::Closed(rank))).await;
}

async fn read_lines(rank: usize, pipe: impl AsyncRead + Unpin, events: mpsc::Sender<Notice>) {
    let mut pipe = BufReader::new(pipe);
    let mut bytes = Vec::new();
    // Read bytes instead of `lines()`, because a crashing library may write invalid UTF-8. `take` splits lines that are
    // too long.
    while matches!((&mut pipe).take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes).await, Ok(count) if count > 0) {
        let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
        let _ = events.send(Notice::Line { rank, line }).await;
        bytes.clear();
    }
    let _ = events.send(Notice::OutputEnded { rank }).await;
}

/// Identifies the worker at the other end of `stream` by the process id that the kernel reports, and starts a task that
/// exchanges messages with the worker. Rejects a process that is not a worker.
fn accept_worker(stream: UnixStream, members: &[WorkerHandle], events: &mpsc::Sender<Notice>) {
    let pid = stream.peer_cred().ok().and_then(|credentials| credentials.pid());
    let rank = members.iter().position(|member| i32::try_from(member.pid).ok() == pid);
    match rank {
        Some(rank) => drop(tokio::spawn(serve_worker(rank, stream, events.clone()))),
        None => tracing::warn!("rejected a connection to the control socket from pid {pid:?}, which is not a worker"),
    }
}

async fn serve_worker(rank: usize, stream: UnixStream, events: mpsc::Sender<Notice>) {
    let codec = *LengthDelimitedCodec::builder().max_frame_length(FRAME_BYTES_MAX);
    let (reader, writer) = stream.into_split();
    let (mut source, mut sink) = (codec.new_read(reader), codec.new_write(writer));
    let (replies, mut outbox) = mpsc::unbounded_channel::<ToWorker>();
    let _ = events.send(Notice::Connected { rank, replies }).await;
    let rank = rank as u32;
    let receive = async {
        while let Some(frame) = source.next().await {
            let event = match frame {
                Ok(bytes) => match serde_json::from_slice(&bytes) {
                    Ok(message) => GangEvent::Message { rank, message },
                    Err(error) => GangEvent::Garbled { rank, reason: format!("it sent an invalid message: {error}") },
                },
                Err(error) if error.kind() == ErrorKind::InvalidData => {
                    GangEvent::Garbled { rank, reason: error.to_string() }
                }
                // A broken socket counts as closed. The worker's exit status will tell the reason.
                Err(_) => break,
            };
            let _ = events.send(Notice::Happened(event)).await;
        }
        let _ = events.send(Notice::Happened(GangEvent::Closed(rank))).await;
    };
    let transmit = async {
        while let Some(message) = outbox.recv().await {
            let bytes = serde_json::to_vec(&message).expect("messages to workers are plain data");
            if sink.send(Bytes::from(bytes)).await.is_err() {
                // The worker has closed its socket. Its exit status will tell the reason.
                break;
            }
        }
        // Keep the socket open. If it closed, the worker would assume that the launcher has died.
        std::future::pending::<()>().await;
    };
    tokio::select! { () = receive => {}, () = transmit => {} }
}

/// Updates `members` and informs the observer. Returns the event to pass to the coordinator, if the notice contains
/// one.
fn handle_notice(notice: Notice, members: &mut [WorkerHandle], observer: &mut dyn GangObserver) -> Option<GangEvent> {
    match notice {
        Notice::Line { rank, line } => {
            observer.line(rank, &line);
            let lines = &mut members[rank].last_lines;
            lines.push_back(line);
            if lines.len() > LAST_LINES_MAX {
                lines.pop_front();
            }
            None
        }
        Notice::OutputEnded { rank } => {
            members[rank].open_outputs -= 1;
            None
        }
        Notice::Connected { rank, replies } => {
            members[rank].replies = Some(replies);
            None
        }
        Notice::Happened(event) => {
            if let GangEvent::Exited { rank, .. } = event {
                let member = &mut members[rank as usize];
                member.running = false;
                // Kill the processes that the worker started. They must not outlive the worker or keep its pipes open.
                send_signal(member.pid, Signal::SIGKILL);
            }
            Some(event)
        }
    }
}

/// Carries out an action of the coordinator. Returns [`GangEvent::CommitFailed`] if a commit failed.
fn carry_out(
    action: Action,
    gang: &Gang<'_>,
    members: &mut [WorkerHandle],
    observer: &mut dyn GangObserver,
) -> Option<GangEvent> {
    match action {
        Action::Report(message) => observer.report(message),
        Action::Commit(parts) => {
            if let Err(error) = observer.commit(&parts) {
                let exit_code = error.exit_code().code();
                let kind = error.failure_kind();
                let failure = Failure { message: error.to_string(), of_peer: false, exit_code, kind };
                return Some(GangEvent::CommitFailed(failure));
            }
        }
        Action::StartAll => {
            for (member, slot) in members.iter().zip(&gang.world.slots) {
                let (slot, meeting, job) = (slot.clone(), gang.meeting.clone(), gang.job.clone());
                member.send(ToWorker::Start { place: slot, meeting, job });
            }
        }
        Action::Announce(address) => {
            for member in members.iter().skip(1) {
                member.send(ToWorker::Rendezvous { address: address.clone() });
            }
        }
        Action::AskToStop => members.iter().for_each(|member| member.send(ToWorker::Stop)),
        Action::AskForBacktrace(rank) => send_signal(members[rank as usize].pid, Signal::SIGUSR2),
        Action::Kill => signal_running(members, Signal::SIGKILL),
        Action::KillOne(rank) => signal_running(&members[rank as usize..=rank as usize], Signal::SIGKILL),
    }
    None
}

fn signal_running(members: &[WorkerHandle], signal: Signal) {
    for member in members.iter().filter(|member| member.running) {
        send_signal(member.pid, signal);
    }
}

/// Sends a signal to the process group of a worker, that is, to the worker and the processes that it started. It is not
/// an error if all of them have ended.
fn send_signal(pid: u32, signal: Signal) {
    if let Ok(group) = i32::try_from(pid) {
        let _ = killpg(Pid::from_raw(group), signal);
    }
}
