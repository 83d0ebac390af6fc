//! Worker processes and their sockets: spawns a gang, feeds the [`Coordinator`] and does what it says, until all have ended.
//!
//! No process outlives this function: on every way out the children are killed and waited for. A worker asks for the
//! parent-death signal itself, which fires when the spawning thread ends; so everything here runs on the main thread.

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
    Answer, CONTROL_VARIABLE, FRAME_BYTES_MAX, Failure, Hello, Job, JobResult, LAUNCHER_PID_VARIABLE, Meeting,
    PartsWritten, ToLauncher, ToWorker,
};
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

use crate::coordinator::{Action, Coordinator, Event, Exit, Limits, Outcome};
use crate::error::{LaunchError, reported};
use crate::rendezvous::World;
use crate::report::{self, LastWords};

/// Lines of each worker's output that a report quotes.
const LAST_WORDS_LINES: usize = 20;

/// A longer line of a worker's output is cut into pieces.
const LINE_BYTES_MAX: u64 = 8 << 10;

/// Lines and messages that wait to be taken in; a worker that writes faster waits.
const NOTICES_MAX: usize = 1024;

/// How long output is waited for once every worker has ended: what a worker started may hold its pipes open for ever.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// Name of the thread that computes while signals are watched.
const COMPUTING: &str = "computing";

/// A gang to run.
struct Gang<'a> {
    /// The worker program.
    worker: PathBuf,
    /// Who runs where.
    world: &'a World,
    /// How they find each other.
    meeting: Meeting,
    /// What all of them do.
    job: Job,
    /// How long to wait.
    limits: Limits,
}

/// Hears what a gang reports while it runs.
pub trait Observer {
    /// A worker wrote a line.
    fn line(&mut self, rank: usize, line: &str) {
        tracing::info!("[rank {rank}] {line}");
    }
    /// A worker reports about its job.
    fn report(&mut self, _: ToLauncher) {}
    /// Every rank has written its parts of a checkpoint; an error stops the gang.
    fn commit(&mut self, _: &[PartsWritten]) -> Result<(), LaunchError> {
        let text = "a worker has written a checkpoint in a job that has none: this is a bug";
        Err(LaunchError::new(ExitCode::WorkerFailed, text))
    }
}

/// For jobs that report nothing: copies what workers write to stderr.
#[derive(Debug)]
pub struct Echo;

impl Observer for Echo {}

/// For jobs whose workers nobody wants to hear.
#[derive(Debug)]
pub struct Silence;

impl Observer for Silence {
    fn line(&mut self, _: usize, _: &str) {}
}

/// What a gang that ended well has said.
#[derive(Debug)]
pub struct GangResult<T> {
    /// What each rank said of itself.
    pub hellos: Vec<Hello>,
    /// The result of each rank.
    pub results: Vec<T>,
}

impl<T> GangResult<T> {
    /// The result of rank 0.
    pub fn first(self) -> anyhow::Result<T> {
        self.results.into_iter().next().context("a gang without workers: this is a bug")
    }
}

/// Where `locdiff-worker` must be: beside the launcher's own executable.
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

/// Runs gangs, one after the other, on a runtime of this thread. A signal that comes between two of them is not lost: the next
/// one hears of it.
#[derive(Debug)]
pub struct Supervisor {
    runtime: Runtime,
    signals: Signals,
}

#[derive(Debug)]
struct Signals {
    interrupts: UnixSignal,
    terminations: UnixSignal,
}

impl Signals {
    async fn recv(&mut self) {
        tokio::select! { _ = self.interrupts.recv() => {}, _ = self.terminations.recv() => {} }
    }
}

impl Supervisor {
    /// Watches for signals from now on.
    pub fn new() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("no runtime")?;
        let within = runtime.enter();
        let interrupts = signal(SignalKind::interrupt()).context("cannot watch SIGINT")?;
        let terminations = signal(SignalKind::terminate()).context("cannot watch SIGTERM")?;
        drop(within);
        Ok(Self { runtime, signals: Signals { interrupts, terminations } })
    }

    /// Starts workers, gives them a job of this attempt of a run and waits for their results; an error where a worker answers
    /// with the result of another job.
    pub fn run<T: Answer>(
        &mut self,
        config: &RunConfig,
        world: &World,
        job: Job,
        attempt: u32,
        observer: &mut dyn Observer,
    ) -> anyhow::Result<GangResult<T>> {
        let supervise = &config.supervise;
        let limits = Limits {
            start: Duration::from_secs_f64(supervise.start_timeout_s),
            stop: Duration::from_secs_f64(supervise.stop_timeout_s),
        };
        let meeting = Meeting {
            interface: config.network.interface.clone(),
            attempt,
            tensor_parallel: config.parallel.tensor,
            rendezvous_timeout_s: supervise.rendezvous_timeout_s,
            collective_timeout_s: supervise.collective_timeout_s,
        };
        let gang = Gang { worker: worker_path()?, world, meeting, job, limits };
        let GangResult { hellos, results } =
            self.runtime.block_on(self::supervise(&gang, observer, &mut self.signals))?;
        let of_this_job = |(rank, result)| {
            let job = gang.job.name();
            T::try_from(result).map_err(|wrong| {
                reported!(WorkerIncompatible, "worker rank {rank} has answered `{job}` wrongly: {wrong}")
            })
        };
        let results = results.into_iter().enumerate().map(of_this_job).collect::<Result<_, _>>()?;
        Ok(GangResult { hellos, results })
    }

    /// Computes on a thread of its own, so that Ctrl-C and SIGTERM are heard at once: the thread ends with the command.
    pub fn compute<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
    ) -> anyhow::Result<T> {
        let (done, result) = oneshot::channel();
        // Nobody waits for the result of a command that was interrupted.
        let work = move || drop(done.send(work()));
        std::thread::Builder::new().name(COMPUTING.into()).spawn(work).context("no thread to compute on")?;
        let signals = &mut self.signals;
        self.runtime.block_on(async {
            tokio::select! {
                found = result => found.context("the computation broke off: this is a bug")?,
                () = signals.recv() => Err(LaunchError::interrupted().into()),
            }
        })
    }

    /// An error where the user has asked to end since the last gang.
    pub fn check_interrupted(&mut self) -> Result<(), LaunchError> {
        let signals = &mut self.signals;
        let asked = async { tokio::time::timeout(Duration::from_millis(1), signals.recv()).await.is_ok() };
        if self.runtime.block_on(asked) { Err(LaunchError::interrupted()) } else { Ok(()) }
    }
}

async fn supervise(
    gang: &Gang<'_>,
    observer: &mut dyn Observer,
    signals: &mut Signals,
) -> anyhow::Result<GangResult<JobResult>> {
    let control = ControlSocket::bind()?;
    let (events, mut inbox) = mpsc::channel(NOTICES_MAX);
    let mut members = spawn_all(gang, &control, &events)?;
    let began = Instant::now();
    let mut coordinator = Coordinator::new(members.len(), gang.meeting.attempt, gang.limits, Duration::ZERO);
    let mut ended_at = None;
    let outcome = loop {
        if let Some(outcome) = coordinator.outcome() {
            let since = ended_at.get_or_insert_with(Instant::now).elapsed();
            if members.iter().all(Member::is_silent) || since >= LAST_OUTPUT {
                break outcome;
            }
        }
        let deadline = match ended_at {
            Some(_) => Duration::from_millis(50),
            None => coordinator.deadline().map_or(Duration::MAX, |at| at.saturating_sub(began.elapsed())),
        };
        let event = tokio::select! {
            Some(notice) = inbox.recv() => match take_in(notice, &mut members, observer) {
                Some(event) => event,
                None => continue,
            },
            connection = control.listener.accept() => {
                let (stream, _) = connection.context("control socket")?;
                greet(stream, &members, &events);
                continue;
            }
            () = signals.recv() => Event::Interrupted,
            () = tokio::time::sleep(deadline.min(Duration::from_secs(3600))) => Event::Tick,
        };
        let mut actions = VecDeque::from(coordinator.step(event, began.elapsed()));
        while let Some(action) = actions.pop_front() {
            if let Some(event) = act(action, gang, &mut members, observer) {
                actions.extend(coordinator.step(event, began.elapsed()));
            }
        }
    };
    match outcome {
        Outcome::Done(results) => Ok(GangResult { hellos: coordinator.hellos(), results }),
        Outcome::Failed(causes) => {
            let pids: Vec<u32> = members.iter().map(|member| member.pid).collect();
            let words: LastWords = members.into_iter().map(|member| member.last_words.into()).collect();
            Err(report::failure(gang.job.name(), &causes, &pids, &words).into())
        }
    }
}

/// A socket in a folder that only this user may enter, removed at the end.
struct ControlSocket {
    listener: UnixListener,
    folder: PathBuf,
}

impl ControlSocket {
    fn bind() -> anyhow::Result<Self> {
        let base = runtime_folder()?;
        let folder = base.join(std::process::id().to_string());
        // A process id comes back: what lies here was left by a launcher that was killed.
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

/// `$XDG_RUNTIME_DIR/locdiff`, else `$TMPDIR/locdiff-UID` or `/tmp/locdiff-UID`; ours, and closed to everybody else.
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
        let reason = "wanted a folder of this user with mode 0700; remove it, or set XDG_RUNTIME_DIR";
        return Err(fail(std::io::Error::other(reason)));
    }
    Ok(folder)
}

/// What the tasks around the processes report.
enum Notice {
    Line { rank: usize, line: String },
    OutputEnded { rank: usize },
    Connected { rank: usize, replies: mpsc::UnboundedSender<ToWorker> },
    Happened(Event),
}

struct Member {
    pid: u32,
    running: bool,
    open_outputs: usize,
    last_words: VecDeque<String>,
    replies: Option<mpsc::UnboundedSender<ToWorker>>,
}

impl Member {
    /// A worker that has closed its end needs no message; its exit will tell why.
    fn tell(&self, message: ToWorker) {
        if let Some(replies) = &self.replies {
            let _ = replies.send(message);
        }
    }

    /// Has ended, and all that it wrote has been read.
    fn is_silent(&self) -> bool {
        !self.running && self.open_outputs == 0
    }
}

fn spawn_all(gang: &Gang<'_>, control: &ControlSocket, events: &mpsc::Sender<Notice>) -> anyhow::Result<Vec<Member>> {
    let mut members = Vec::with_capacity(gang.world.places.len());
    for rank in 0..gang.world.places.len() {
        // A failure here drops the children spawned before, which kills them.
        let mut child =
            command(gang, rank, &control.path()).spawn().map_err(|error| spawn_error(&gang.worker, error))?;
        let pid = child.id().context("a child that was just spawned has a process id")?;
        tokio::spawn(read_lines(rank, child.stdout.take().context("stdout is piped")?, events.clone()));
        tokio::spawn(read_lines(rank, child.stderr.take().context("stderr is piped")?, events.clone()));
        tokio::spawn(wait(rank, child, events.clone()));
        members.push(Member { pid, running: true, open_outputs: 2, last_words: VecDeque::new(), replies: None });
    }
    Ok(members)
}

fn spawn_error(worker: &Path, error: std::io::Error) -> LaunchError {
    let is_no_program =
        matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::InvalidInput);
    // ENOEXEC has no kind of its own.
    if is_no_program || error.raw_os_error() == Some(nix::errno::Errno::ENOEXEC as i32) {
        return worker_missing(worker, error);
    }
    LaunchError::at(worker)(error)
}

fn command(gang: &Gang<'_>, rank: usize, control: &Path) -> Command {
    let place = &gang.world.places[rank];
    let mut command = Command::new(&gang.worker);
    command
        .env(CONTROL_VARIABLE, control)
        .env(LAUNCHER_PID_VARIABLE, std::process::id().to_string())
        .env("RANK", place.rank.to_string())
        .env("WORLD_SIZE", place.world.to_string())
        .env("LOCAL_RANK", place.local_rank.to_string())
        .env("OMP_NUM_THREADS", place.threads.to_string())
        // GPUs are counted through NVML, which goes by the bus; CUDA would put the fastest first.
        .env("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // A group of its own: Ctrl-C on the terminal reaches the launcher alone, which ends workers in order.
        .process_group(0)
        .kill_on_drop(true);
    if place.gpu.is_some() && std::env::var_os("NCCL_SOCKET_IFNAME").is_none() {
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
    let _ = events.send(Notice::Happened(Event::Exited { rank, exit })).await;
    // Its socket closes with it; should something hold it open, nobody waits for ever.
    tokio::time::sleep(LAST_OUTPUT).await;
    let _ = events.send(Notice::Happened(Event::Closed(rank))).await;
}

async fn read_lines(rank: usize, pipe: impl AsyncRead + Unpin, events: mpsc::Sender<Notice>) {
    let mut pipe = BufReader::new(pipe);
    let mut bytes = Vec::new();
    // Bytes, not `lines()`: what a crashing library writes need not be UTF-8. A line without an end is cut into pieces.
    while matches!((&mut pipe).take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes).await, Ok(count) if count > 0) {
        let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
        let _ = events.send(Notice::Line { rank, line }).await;
        bytes.clear();
    }
    let _ = events.send(Notice::OutputEnded { rank }).await;
}

/// Finds out which child is at the other end, by what the kernel says of it, and listens to it.
fn greet(stream: UnixStream, members: &[Member], events: &mpsc::Sender<Notice>) {
    let pid = stream.peer_cred().ok().and_then(|credentials| credentials.pid());
    let rank = members.iter().position(|member| i32::try_from(member.pid).ok() == pid);
    match rank {
        Some(rank) => drop(tokio::spawn(converse(rank, stream, events.clone()))),
        None => tracing::warn!("a stranger (pid {pid:?}) at the control socket was turned away"),
    }
}

async fn converse(rank: usize, stream: UnixStream, events: mpsc::Sender<Notice>) {
    let codec = *LengthDelimitedCodec::builder().max_frame_length(FRAME_BYTES_MAX);
    let (reader, writer) = stream.into_split();
    let (mut source, mut sink) = (codec.new_read(reader), codec.new_write(writer));
    let (replies, mut outbox) = mpsc::unbounded_channel::<ToWorker>();
    let _ = events.send(Notice::Connected { rank, replies }).await;
    let rank = rank as u32;
    let listen = async {
        while let Some(frame) = source.next().await {
            let event = match frame {
                Ok(bytes) => match serde_json::from_slice(&bytes) {
                    Ok(message) => Event::Message { rank, message },
                    Err(error) => Event::Garbled { rank, reason: format!("message not understood: {error}") },
                },
                Err(error) if error.kind() == ErrorKind::InvalidData => {
                    Event::Garbled { rank, reason: error.to_string() }
                }
                // A socket that breaks is one that closes: the worker's exit will tell why.
                Err(_) => break,
            };
            let _ = events.send(Notice::Happened(event)).await;
        }
        let _ = events.send(Notice::Happened(Event::Closed(rank))).await;
    };
    let speak = async {
        while let Some(message) = outbox.recv().await {
            let bytes = serde_json::to_vec(&message).expect("messages to workers are plain data");
            if sink.send(Bytes::from(bytes)).await.is_err() {
                // The worker has closed its end; its exit will tell why.
                break;
            }
        }
        // Keep the socket open: a worker takes its closing for the launcher's death.
        std::future::pending::<()>().await;
    };
    tokio::select! { () = listen => {}, () = speak => {} }
}

/// Books what happened to the processes; what the coordinator must know of it comes back.
fn take_in(notice: Notice, members: &mut [Member], observer: &mut dyn Observer) -> Option<Event> {
    match notice {
        Notice::Line { rank, line } => {
            observer.line(rank, &line);
            let words = &mut members[rank].last_words;
            words.push_back(line);
            if words.len() > LAST_WORDS_LINES {
                words.pop_front();
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
            if let Event::Exited { rank, .. } = event {
                let member = &mut members[rank as usize];
                member.running = false;
                // Whatever the worker started itself must not outlive it, nor keep its pipes open.
                send(member.pid, Signal::SIGKILL);
            }
            Some(event)
        }
    }
}

/// Does what the coordinator says; what came of it, where it must know.
fn act(action: Action, gang: &Gang<'_>, members: &mut [Member], observer: &mut dyn Observer) -> Option<Event> {
    match action {
        Action::Report(message) => observer.report(message),
        Action::Commit(parts) => {
            if let Err(error) = observer.commit(&parts) {
                let exit_code = error.exit_code().code();
                let failure = Failure { message: error.to_string(), of_peer: false, exit_code };
                return Some(Event::CommitFailed(failure));
            }
        }
        Action::StartAll => {
            for (member, place) in members.iter().zip(&gang.world.places) {
                let (place, meeting, job) = (place.clone(), gang.meeting.clone(), gang.job.clone());
                member.tell(ToWorker::Start { place, meeting, job });
            }
        }
        Action::Announce(address) => {
            for member in members.iter().skip(1) {
                member.tell(ToWorker::Rendezvous { address: address.clone() });
            }
        }
        Action::Terminate => signal_running(members, Signal::SIGTERM),
        Action::Kill => signal_running(members, Signal::SIGKILL),
        Action::KillOne(rank) => signal_running(&members[rank as usize..=rank as usize], Signal::SIGKILL),
    }
    None
}

fn signal_running(members: &[Member], signal: Signal) {
    for member in members.iter().filter(|member| member.running) {
        send(member.pid, signal);
    }
}

/// Signals a worker and all that it started. One that has ended meanwhile needs no signal.
fn send(pid: u32, signal: Signal) {
    if let Ok(group) = i32::try_from(pid) {
        let _ = killpg(Pid::from_raw(group), signal);
    }
}
