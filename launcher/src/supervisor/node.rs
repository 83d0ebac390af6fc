//! The launcher of a node other than node 0. It joins node 0, starts the workers that node 0 asks for, and passes their
//! messages and output on. If the connection is lost, it kills its workers and connects again.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;
use locdiff_core::config::RunConfig;
use locdiff_core::exit_code::{ExitCode, HasExitCode as _};
use locdiff_core::files::wait_until_visible;
use locdiff_core::protocol::{Job, ToLauncher, ToWorker, WorkerSlot};
use locdiff_core::pulse::Beat;
use serde_json::{Value, json};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;

use super::control::{NOTICES_MAX, Notice, accept_worker};
use super::gang_run::oom_kills;
use super::program::worker_path;
use super::runtime_folder::ControlSocket;
use super::signals::Signals;
use super::workers::{Seat, SpawnSettings, WorkerHandle, kill_running, spawn};
use super::{KILL_PATIENCE, orphans};
use crate::cluster::{
    ALIVE_EVERY, FromNode, NodeFacts, Receiver, Sender, ToNode, Token, WorkerEvent, WorkerSignal, interface_of,
    open_channel,
};
use crate::coordinator::GangEvent;
use crate::error::{LaunchError, exit_code_of, refuse, reported};
use crate::run_folder::exact_unix_s;

/// How long an attempt to connect may take. Strangers can make others wait for about half of it.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// How long to wait between two attempts.
const CONNECT_AGAIN: Duration = Duration::from_millis(500);

/// How long to look for a file in the common folder, at most. File systems on a network may show new files late.
const PROOF_PATIENCE: Duration = Duration::from_secs(45);

/// How many bytes may wait for the network before the workers have to wait too. A heartbeat waits behind them.
const WAITING_BYTES_MAX: usize = 256 << 10;

/// What a node needs to know to take part.
#[derive(Debug)]
pub struct NodeSettings {
    /// HOST:PORT of node 0.
    pub rendezvous: String,
    /// The token of the run.
    pub token: Token,
    /// What the node says about itself.
    pub(crate) facts: NodeFacts,
    /// If node 0 says nothing for this time, the connection is lost.
    pub silence_limit: Duration,
    /// How long to wait for node 0.
    pub gather_limit: Duration,
    /// Time from a request to stop until this launcher gives up waiting for node 0.
    pub preempt_limit: Duration,
    /// A folder that all nodes must share; `None` if the command writes nothing there.
    pub common_folder: Option<PathBuf>,
}

/// How a connection to node 0 ended.
enum ConnectionEnd {
    /// The command has ended.
    Ended { exit_code: ExitCode, error: String },
    /// Node 0 does not want this node.
    Refused { exit_code: ExitCode, reason: String },
    /// The connection was lost, or node 0 does not want this node now.
    Lost(String),
    /// The user asked to stop, and did not want to wait.
    Stopped,
}

/// Takes part in the command of node 0 until it ends.
pub fn run_node(settings: &NodeSettings) -> anyhow::Result<Value> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime: Runtime = runtime.context("cannot start the async runtime")?;
    runtime.block_on(async {
        let mut signals = Signals::watch().context("cannot install signal handlers")?;
        let mut node = Node { settings, is_interrupted: false, last_contact: Instant::now(), has_joined: false };
        let mut last_reason = String::new();
        loop {
            let reason = match node.session(&mut signals).await? {
                ConnectionEnd::Ended { exit_code: ExitCode::Success, .. } => {
                    return Ok(json!({ "ok": true, "node": settings.facts.node }));
                }
                ConnectionEnd::Ended { exit_code, error } | ConnectionEnd::Refused { exit_code, reason: error } => {
                    return Err(LaunchError::new(exit_code, error).into());
                }
                ConnectionEnd::Stopped => return Err(signals.error().into()),
                ConnectionEnd::Lost(_) if node.is_interrupted => return Err(signals.error().into()),
                ConnectionEnd::Lost(reason) => reason,
            };
            if reason != last_reason {
                tracing::warn!("{reason}; trying again");
                last_reason.clone_from(&reason);
            }
            if node.last_contact.elapsed() >= settings.gather_limit {
                let limit = settings.gather_limit.as_secs_f64();
                refuse!(Timeout, "{reason}; gave up after {limit:.1} s (supervise.rendezvous_timeout_s)");
            }
            tokio::select! {
                () = tokio::time::sleep(CONNECT_AGAIN) => {}
                () = signals.recv() => return Err(signals.error().into()),
            }
        }
    })
}

struct Node<'a> {
    settings: &'a NodeSettings,
    /// Whether node 0 was told that the user asked to stop.
    is_interrupted: bool,
    /// When a node 0 that lets this node take part was last heard.
    last_contact: Instant,
    has_joined: bool,
}

impl Node<'_> {
    /// Connects to node 0, and serves it until the connection ends.
    async fn session(&mut self, signals: &mut Signals) -> anyhow::Result<ConnectionEnd> {
        let address = &self.settings.rendezvous;
        let connected = tokio::select! {
            connected = tokio::time::timeout(CONNECT_LIMIT, self.connect()) => connected,
            () = signals.recv() => return Ok(ConnectionEnd::Stopped),
        };
        let (mut sender, mut receiver) = match connected {
            Ok(Ok(opened)) => opened,
            Ok(Err(error)) => {
                return Ok(ConnectionEnd::Lost(format!("cannot connect to node 0 at {address}: {error}")));
            }
            Err(_) => return Ok(ConnectionEnd::Lost(format!("node 0 at {address} does not answer"))),
        };
        receiver.accept_long_messages();
        let (outbox, mut outgoing) = Uplink::new();
        let (incoming, mut inbox) = mpsc::channel(64);
        let silence_limit = self.settings.silence_limit;
        // These tasks end with the session, when their channels close.
        let reading = tokio::spawn(async move {
            loop {
                let message = match tokio::time::timeout(silence_limit, receiver.receive::<ToNode>()).await {
                    Ok(Ok(Some(message))) => Ok(message),
                    Ok(Ok(None)) => Err("node 0 closed the connection".to_owned()),
                    Ok(Err(error)) => Err(format!("the connection to node 0 failed: {error}")),
                    Err(_) => Err(format!("node 0 has said nothing for {:.1} s", silence_limit.as_secs_f64())),
                };
                let is_last = message.is_err();
                if incoming.send(message).await.is_err() || is_last {
                    return;
                }
            }
        });
        let writing = tokio::spawn(async move {
            while let Some(message) = outgoing.messages.recv().await {
                if sender.send(&message).await.is_err() {
                    return;
                }
                outgoing.waiting.fetch_sub(size(&message), Ordering::Relaxed);
            }
        });
        let mut workers = LocalWorkers { gang: None, outbox: outbox.clone() };
        let mut ticks = tokio::time::interval(ALIVE_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut give_up_at: Option<Instant> = None;
        let mut is_welcome = false;
        let ended = loop {
            tokio::select! {
                message = inbox.recv() => match message {
                    Some(Ok(message)) => {
                        // The time to give up does not move while node 0 refuses this node.
                        is_welcome |= message == ToNode::Welcome;
                        if is_welcome {
                            self.last_contact = Instant::now();
                        }
                        if let Some(end) = self.handle(message, &mut workers).await? {
                            break end;
                        }
                    }
                    Some(Err(reason)) => break ConnectionEnd::Lost(reason),
                    None => break ConnectionEnd::Lost("the connection to node 0 is closed".to_owned()),
                },
                // While the network is slow, the workers' output stays in their pipes.
                happened = workers.next(), if !outbox.is_full() => workers.handle(happened)?,
                () = signals.recv() => {
                    if !self.has_joined || self.is_interrupted {
                        break ConnectionEnd::Stopped;
                    }
                    self.is_interrupted = true;
                    give_up_at = Some(Instant::now() + self.settings.preempt_limit + CONNECT_LIMIT);
                    let code = exit_code_of(&signals.error().into());
                    outbox.send(FromNode::Interrupted(code.code()));
                    tracing::info!("asked node 0 to stop the command; interrupt again to end at once");
                }
                _ = ticks.tick() => {
                    if give_up_at.is_some_and(|at| Instant::now() >= at) {
                        break ConnectionEnd::Stopped;
                    }
                    workers.tick();
                }
            }
        };
        drop(outbox);
        reading.abort();
        workers.kill().await?;
        drop(workers);
        // The writer ends when everything is sent.
        let _ = tokio::time::timeout(Duration::from_millis(200), writing).await;
        Ok(ended)
    }

    async fn connect(&self) -> io::Result<(Sender, Receiver)> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
        let addresses: Vec<SocketAddr> = tokio::net::lookup_host(&self.settings.rendezvous).await?.collect();
        for address in addresses {
            match TcpStream::connect(address).await {
                Ok(stream) => {
                    let mut facts = self.settings.facts.clone();
                    facts.unix_s = exact_unix_s(SystemTime::now());
                    if facts.interface.is_empty() {
                        facts.interface = interface_of(stream.local_addr()?.ip()).unwrap_or_default();
                    }
                    return open_channel(stream, &self.settings.token, &facts).await;
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Handles a message of node 0. Returns how the session ends, if it does.
    async fn handle(&mut self, message: ToNode, workers: &mut LocalWorkers) -> anyhow::Result<Option<ConnectionEnd>> {
        match message {
            ToNode::Alive => {}
            ToNode::Refused { reason, exit_code, is_temporary } => {
                let exit_code = ExitCode::from_code(exit_code.into()).unwrap_or(ExitCode::Internal);
                return Ok(Some(if is_temporary {
                    ConnectionEnd::Lost(reason)
                } else {
                    ConnectionEnd::Refused { exit_code, reason }
                }));
            }
            ToNode::Prove { name, must_write } => {
                let name = Path::new(&name).file_name().unwrap_or_default().to_owned();
                let path = self.settings.common_folder.clone().unwrap_or_default().join(name);
                // A thread that nobody waits for: the file may be on a file server that does not respond.
                let outbox = workers.outbox.clone();
                let patience = PROOF_PATIENCE.min(self.settings.gather_limit / 2);
                let read = move || outbox.send(prove(&path, patience, must_write));
                std::thread::Builder::new().name("proof".into()).spawn(read).context("cannot start a thread")?;
            }
            ToNode::Welcome => {
                self.has_joined = true;
                tracing::info!("node {} has joined node 0 at {}", self.settings.facts.node, self.settings.rendezvous);
            }
            ToNode::Kill { gang } => workers.kill_gang(gang),
            ToNode::Begin { gang, slots, share_gpu, interface } => {
                if let Err(error) = workers.begin(gang, &slots, share_gpu, &interface) {
                    let known = error.downcast_ref::<LaunchError>();
                    let kind = known.map_or(locdiff_core::exit_code::FailureKind::Final, |known| known.failure_kind());
                    let node = self.settings.facts.node;
                    workers.outbox.send(FromNode::NotStarted {
                        gang,
                        error: format!("node {node} cannot start its workers: {error:#}"),
                        exit_code: exit_code_of(&error).code(),
                        kind,
                    });
                }
            }
            ToNode::Deliver { gang, rank, mut message } => {
                if let ToWorker::Start { job, .. } = &mut message
                    && let Some(config) = config_of(job)
                {
                    config.shards.cache_dir.clone_from(&self.settings.facts.config.shards.cache_dir);
                }
                if let Some(worker) = workers.of(gang, rank) {
                    worker.send(message);
                }
            }
            ToNode::Signal { gang, rank, signal } => {
                if let Some(worker) = workers.of(gang, rank).filter(|worker| worker.running) {
                    worker.signal(signal);
                }
            }
            ToNode::End { exit_code, error } => {
                let exit_code = ExitCode::from_code(exit_code.into()).unwrap_or(ExitCode::Internal);
                return Ok(Some(ConnectionEnd::Ended { exit_code, error }));
            }
        }
        Ok(None)
    }
}

/// The configuration in a job, if it has one.
fn config_of(job: &mut Job) -> Option<&mut RunConfig> {
    match job {
        Job::Train(job) => Some(&mut job.config),
        Job::Eval(job) | Job::Gallery(job) => Some(&mut job.config),
        _ => None,
    }
}

/// Proves that this node can read a file that node 0 has just written, and write one beside it.
fn prove(path: &Path, patience: Duration, must_write: bool) -> FromNode {
    let text = read_proof(path, patience);
    let own = path.with_extension("answer");
    let write = || std::fs::write(&own, "").and_then(|()| std::fs::remove_file(&own)).err();
    let not_written = must_write.then(write).flatten().map(|error| error.to_string());
    FromNode::Proof { text, not_written }
}

/// Reads a file that node 0 has just written.
fn read_proof(path: &Path, patience: Duration) -> Option<String> {
    let begun = Instant::now();
    loop {
        wait_until_visible(path, patience);
        match std::fs::read_to_string(path) {
            Ok(text) if !text.is_empty() => return Some(text),
            _ if begun.elapsed() >= patience => return None,
            _ => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// The workers that this node runs for node 0.
struct LocalWorkers {
    gang: Option<LocalGang>,
    outbox: Uplink,
}

/// Messages on their way to node 0.
#[derive(Clone)]
struct Uplink {
    messages: mpsc::UnboundedSender<FromNode>,
    /// About how many bytes wait.
    waiting: Arc<AtomicUsize>,
}

/// The other end of an [`Uplink`].
struct Outgoing {
    messages: mpsc::UnboundedReceiver<FromNode>,
    waiting: Arc<AtomicUsize>,
}

impl Uplink {
    fn new() -> (Self, Outgoing) {
        let (messages, outgoing) = mpsc::unbounded_channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        (Self { messages, waiting: Arc::clone(&waiting) }, Outgoing { messages: outgoing, waiting })
    }

    /// Sends a message. It is dropped if the connection is lost.
    fn send(&self, message: FromNode) {
        self.waiting.fetch_add(size(&message), Ordering::Relaxed);
        let _ = self.messages.send(message);
    }

    /// Whether so much waits that the workers should wait too.
    fn is_full(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > WAITING_BYTES_MAX
    }
}

/// About how many bytes a message takes.
fn size(message: &FromNode) -> usize {
    match message {
        FromNode::Worker { event: WorkerEvent::Line(line), .. } => 128 + line.len(),
        _ => 256,
    }
}

struct LocalGang {
    number: u64,
    control: ControlSocket,
    members: BTreeMap<u32, WorkerHandle>,
    events: mpsc::Sender<Notice>,
    notices: mpsc::Receiver<Notice>,
    /// The newest heartbeat of each worker that was not passed on yet.
    beats: BTreeMap<u32, Beat>,
    oom_kills_before: Option<u64>,
}

/// Something that happened to the workers of this node.
enum LocalEvent {
    Notice(Notice),
    Connection(UnixStream),
}

impl LocalWorkers {
    fn begin(&mut self, number: u64, slots: &[WorkerSlot], share_gpu: bool, interface: &str) -> anyhow::Result<()> {
        if self.is_running() {
            return Err(reported!(WorkerFailed, "the workers of the last attempt are still running").into());
        }
        let (program, control) = (worker_path()?, ControlSocket::bind()?);
        let (events, notices) = mpsc::channel(NOTICES_MAX);
        let (members, beats, oom_kills_before) = (BTreeMap::new(), BTreeMap::new(), oom_kills());
        let gang = self.gang.insert(LocalGang { number, control, members, events, notices, beats, oom_kills_before });
        let settings = SpawnSettings { worker: &program, interface, share_gpu };
        for slot in slots {
            match spawn(&settings, slot, &gang.control, &gang.events) {
                Ok(worker) => {
                    let (rank, event) = (slot.rank, WorkerEvent::Started(worker.pid));
                    self.outbox.send(FromNode::Worker { gang: number, rank, event });
                    gang.members.insert(rank, worker);
                }
                Err(error) => {
                    kill_running(gang.members.values());
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// The worker of this rank, if the gang is the current one.
    fn of(&self, number: u64, rank: u32) -> Option<&WorkerHandle> {
        self.gang.as_ref().filter(|gang| gang.number == number)?.members.get(&rank)
    }

    /// Kills the workers of this gang, if it is the current one.
    fn kill_gang(&self, number: u64) {
        if let Some(gang) = self.gang.as_ref().filter(|gang| gang.number == number) {
            kill_running(gang.members.values());
        }
    }

    fn is_running(&self) -> bool {
        self.gang.as_ref().is_some_and(|gang| gang.members.values().any(|member| member.running))
    }

    /// Waits for the next event. Waits forever without a gang.
    async fn next(&mut self) -> io::Result<LocalEvent> {
        let Some(gang) = &mut self.gang else { return std::future::pending().await };
        tokio::select! {
            Some(notice) = gang.notices.recv() => Ok(LocalEvent::Notice(notice)),
            accepted = gang.control.listener.accept() => Ok(LocalEvent::Connection(accepted?.0)),
        }
    }

    /// Passes on what happened to a worker.
    fn handle(&mut self, happened: io::Result<LocalEvent>) -> anyhow::Result<()> {
        let Some(gang) = &mut self.gang else { return Ok(()) };
        let notice = match happened.context("cannot accept a connection on the control socket")? {
            LocalEvent::Notice(notice) => notice,
            LocalEvent::Connection(stream) => {
                let ranks = gang.members.iter().map(|(rank, member)| (member.pid, *rank as usize));
                accept_worker(stream, &ranks.collect::<Vec<_>>(), &gang.events);
                return Ok(());
            }
        };
        let (rank, event) = match notice {
            Notice::Line { rank, line } => (rank as u32, WorkerEvent::Line(line)),
            Notice::OutputEnded { rank } => (rank as u32, WorkerEvent::OutputEnded),
            Notice::Connected { rank, replies } => {
                if let Some(member) = gang.members.get_mut(&(rank as u32)) {
                    member.seat = Seat::Here { replies: Some(replies) };
                }
                return Ok(());
            }
            Notice::Happened(GangEvent::Message { rank, message: ToLauncher::Beat(beat) }) => {
                gang.beats.insert(rank, beat);
                return Ok(());
            }
            Notice::Happened(GangEvent::Message { rank, message }) => (rank, WorkerEvent::Message(Box::new(message))),
            Notice::Happened(GangEvent::Garbled { rank, reason }) => (rank, WorkerEvent::Garbled(reason)),
            Notice::Happened(GangEvent::Closed(rank)) => (rank, WorkerEvent::Closed),
            Notice::Happened(GangEvent::Exited { rank, exit }) => {
                if let Some(member) = gang.members.get_mut(&rank) {
                    member.running = false;
                    member.signal(WorkerSignal::Kill);
                }
                let is_out_of_memory = oom_kills() > gang.oom_kills_before;
                (rank, WorkerEvent::Exited { exit, is_out_of_memory })
            }
            Notice::Happened(_) => return Ok(()),
        };
        let number = gang.number;
        // Node 0 must see a heartbeat before a message that the worker sent after it.
        if gang.beats.contains_key(&rank) {
            self.send_beats();
        }
        self.outbox.send(FromNode::Worker { gang: number, rank, event });
        Ok(())
    }

    /// Says that this node is alive, and collects orphans.
    fn tick(&mut self) {
        if let Some(gang) = &self.gang
            && orphans::adopts_orphans()
        {
            orphans::collect(&gang.members.values().map(|member| member.pid).collect::<Vec<_>>());
        }
        self.send_beats();
    }

    /// Passes the heartbeats of all workers on in one message: with one message each, node 0 would be busy with the
    /// heartbeats of a large cluster.
    fn send_beats(&mut self) {
        let mut beats: Vec<(u32, Beat)> = Vec::new();
        let number = self.gang.as_ref().map_or(0, |gang| gang.number);
        if let Some(gang) = &mut self.gang {
            beats.extend(std::mem::take(&mut gang.beats));
            for (rank, beat) in &mut beats {
                // The step file is newer than the heartbeat.
                let member = gang.members.get(rank);
                beat.step = member.and_then(|member| member.step(*rank, gang.control.folder())).unwrap_or(beat.step);
            }
        }
        self.outbox.send(FromNode::Alive { gang: number, beats });
    }

    /// Kills all workers, and waits until they have ended.
    async fn kill(&mut self) -> anyhow::Result<()> {
        let begun = Instant::now();
        if let Some(gang) = &self.gang {
            kill_running(gang.members.values());
        }
        while self.is_running() && begun.elapsed() < KILL_PATIENCE {
            if let Ok(happened) = tokio::time::timeout(Duration::from_millis(100), self.next()).await {
                self.handle(happened)?;
            }
        }
        Ok(())
    }
}
