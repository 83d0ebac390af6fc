//! The end of node 0: it listens for the other nodes, decides who takes part, and passes messages between them and the
//! supervisor. All of this happens on a thread of its own, so that a busy disk or a long computation of node 0 does not
//! look like a lost connection.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;
use locdiff_core::exit_code::{ExitCode, FailureKind, HasExitCode as _};
use locdiff_core::protocol::Failure;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;

use super::agreement;
use super::channel::{Receiver, SeenHandshakes, Sender, accept};
use super::messages::{ALIVE_EVERY, FromNode, NodeFacts, NodeHello, ToNode};
use super::token::{Token, random};
use crate::error::{LaunchError, reported};
use crate::run_folder::exact_unix_s;

/// How long a stranger may take to prove that it knows the token, and a node to say what it is.
const GREETING_LIMIT: Duration = Duration::from_secs(5);

/// How long a node may take to read a file of the common folder. File systems on a network may show new files late.
const PROOF_LIMIT: Duration = Duration::from_secs(60);

/// Number of connections that may be in the middle of their greeting. If there are more, the oldest one ends, but not
/// before it has had [`GREETING_LEAST`].
const GREETINGS_MAX: usize = 256;

/// How long a greeting may take at least, so that many nodes that connect at the same moment do not end each other's.
const GREETING_LEAST: Duration = Duration::from_millis(500);

/// If this many connections were rejected within a second, the next ones wait for each other, so that strangers cannot
/// keep node 0 busy.
const REJECTIONS_PER_SECOND: u32 = 200;

/// How long a connection then waits for the one before it.
const WAIT_AFTER_REJECTIONS: Duration = Duration::from_millis(5);

/// How often rejected connections are reported.
const REPORT_EVERY: Duration = Duration::from_secs(10);

/// How long node 0 waits at the end until all nodes know the result.
const FAREWELL_LIMIT: Duration = Duration::from_secs(3);

/// How often the nodes that are still missing are named.
const REMIND_EVERY: Duration = Duration::from_secs(10);

/// Number of files that a launcher may need beside the connections to nodes.
const FILES_BESIDE_NODES: u64 = 2048;

/// What node 0 needs to know to let others take part.
#[derive(Debug)]
pub(crate) struct HubSettings {
    /// Where to listen.
    pub(crate) address: SocketAddr,
    /// The token of the run.
    pub(crate) token: Token,
    /// What node 0 says about itself.
    pub(crate) own: NodeFacts,
    /// Number of nodes, with node 0.
    pub(crate) nodes: u32,
    /// Number of nodes without which the command does not go on.
    pub(crate) nodes_needed: u32,
    /// How long to wait for lost nodes that are not needed.
    pub(crate) patience: Duration,
    /// A node that says nothing for this time is lost.
    pub(crate) silence_limit: Duration,
    /// How long to wait for missing nodes.
    pub(crate) gather_limit: Duration,
    /// Whether nodes that are missing or refused are only reported.
    pub(crate) is_survey: bool,
    /// A folder that all nodes must share; `None` if the command writes nothing there.
    pub(crate) common_folder: Option<PathBuf>,
}

/// The other nodes of the run, as node 0 sees them.
#[derive(Debug)]
pub struct Cluster {
    shared: Arc<Hub>,
}

/// Something that a node reports while a gang runs.
pub(crate) type NodeEvent = (u32, FromNode);

/// Why a node is lost.
#[derive(Debug, Clone)]
pub(crate) struct NodeLoss {
    pub(crate) node: u32,
    pub(crate) failure: Failure,
}

/// What the supervisor receives from the nodes of its gang.
#[derive(Debug)]
pub(crate) enum FromCluster {
    Event(NodeEvent),
    Lost(NodeLoss),
    /// A node has joined that is not in the gang.
    Joined(u32),
}

#[derive(Debug)]
struct Hub {
    settings: HubSettings,
    state: Mutex<HubState>,
    /// Changes whenever a node joins, leaves or is refused.
    changes: watch::Sender<u64>,
    seen: SeenHandshakes,
}

#[derive(Debug, Default)]
struct HubState {
    links: BTreeMap<u32, Link>,
    /// When each missing node was lost.
    lost_at: BTreeMap<u32, Instant>,
    /// Launchers that may not join again, with the reason.
    left_out: BTreeMap<u64, String>,
    gang: Option<AttachedGang>,
    gangs: u64,
    /// The last refusal of a node that is missing.
    refusal: Option<(ExitCode, String)>,
    /// The exit code with which another node was asked to stop.
    interrupted: Option<ExitCode>,
    /// Whether a gang has begun.
    has_begun: bool,
    /// The message that tells nodes how the command ended.
    end: Option<ToNode>,
    /// The last refusal that was logged.
    logged: String,
    /// The refusals of nodes, if [`HubSettings::is_survey`].
    refusals: Vec<String>,
}

#[derive(Debug)]
struct Link {
    facts: NodeFacts,
    outbox: mpsc::UnboundedSender<ToNode>,
    connection: AbortHandle,
    number: u64,
}

#[derive(Debug)]
struct AttachedGang {
    number: u64,
    events: mpsc::Sender<FromCluster>,
    nodes: Vec<u32>,
}

impl Cluster {
    /// Listens for the other nodes.
    pub(crate) fn open(settings: HubSettings) -> anyhow::Result<Arc<Self>> {
        let address = settings.address;
        allow_connections(settings.nodes);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("cannot start the async runtime")?;
        let about = |error| LaunchError::at(address.to_string())(error).about("--rendezvous");
        let listener = runtime.block_on(TcpListener::bind(address)).map_err(about)?;
        let (changes, _) = watch::channel(0);
        let lost_at = (1..settings.nodes).map(|node| (node, Instant::now())).collect();
        let state = Mutex::new(HubState { lost_at, ..HubState::default() });
        let shared = Hub { settings, state, changes, seen: SeenHandshakes::default() };
        let shared = Arc::new(shared);
        let serving = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("nodes".into());
        thread.spawn(move || runtime.block_on(listen(listener, &serving))).context("cannot start a thread")?;
        Ok(Arc::new(Self { shared }))
    }

    /// Number of nodes, with node 0, if all are there.
    pub(crate) fn nodes(&self) -> u32 {
        self.shared.settings.nodes
    }

    /// Why nodes were refused, if [`HubSettings::is_survey`].
    pub(crate) fn refusals(&self) -> Vec<String> {
        self.shared.lock().refusals.clone()
    }

    /// Whether the command may go on without some nodes.
    pub(crate) fn may_shrink(&self) -> bool {
        self.shared.settings.nodes_needed < self.shared.settings.nodes
    }

    /// Waits until all nodes have joined, and returns what they say about themselves, in order. If the command may go on
    /// with fewer nodes, leaves out those that have been lost for too long.
    pub(crate) async fn gather(&self) -> Result<Vec<NodeFacts>, LaunchError> {
        let settings = &self.shared.settings;
        self.wait_for((1..settings.nodes).collect(), settings.nodes_needed).await
    }

    /// Waits until the nodes `wanted` have joined.
    pub(crate) async fn wait_for_nodes(&self, wanted: BTreeSet<u32>) -> Result<Vec<NodeFacts>, LaunchError> {
        let needed = u32::try_from(wanted.len() + 1).unwrap_or(u32::MAX);
        self.wait_for(wanted, needed).await
    }

    async fn wait_for(&self, wanted: BTreeSet<u32>, needed: u32) -> Result<Vec<NodeFacts>, LaunchError> {
        let (shared, begun) = (&self.shared, Instant::now());
        let mut changes = shared.changes.subscribe();
        let mut remind_at = begun + Duration::from_secs(1);
        let mut patience_ends: Option<Instant>;
        loop {
            changes.borrow_and_update();
            let missing = {
                let state = shared.lock();
                if let Some(code) = state.interrupted {
                    return Err(interrupted(code));
                }
                let (present, missing): (Vec<u32>, Vec<u32>) =
                    wanted.iter().partition(|node| state.links.contains_key(node));
                let is_enough = present.len() + 1 >= needed as usize;
                let left = |node: &u32| {
                    let lost_at = state.lost_at.get(node);
                    lost_at.map_or(Duration::ZERO, |at| shared.settings.patience.saturating_sub(at.elapsed()))
                };
                patience_ends = missing.iter().map(left).max().filter(|_| is_enough).map(|left| Instant::now() + left);
                let is_complete = missing.len() <= state.refusals.len();
                if patience_ends.is_some_and(|at| at <= Instant::now()) || is_complete {
                    let others = present.iter().map(|node| state.links[node].facts.clone());
                    return Ok(std::iter::once(shared.settings.own.clone()).chain(others).collect());
                }
                if let Some((code, reason)) = &state.refusal {
                    return Err(LaunchError::new(*code, reason.clone()));
                }
                missing
            };
            let names = missing.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
            let (limit, address) = (shared.settings.gather_limit, shared.settings.address);
            if begun.elapsed() >= limit && patience_ends.is_none() {
                return Err(reported!(
                    Timeout,
                    "node(s) {names} did not join at {address} within {:.1} s (supervise.rendezvous_timeout_s)",
                    limit.as_secs_f64()
                )
                .with_kind(FailureKind::Final));
            }
            if Instant::now() >= remind_at {
                remind_at += REMIND_EVERY;
                tracing::info!("waiting at {address} for node(s) {names}");
            }
            let until = remind_at.min(patience_ends.unwrap_or(begun + limit));
            let _ = tokio::time::timeout_at(until.into(), changes.changed()).await;
        }
    }

    /// Begins a gang on these nodes. What they report arrives at `events`. Returns the number of the gang.
    pub(crate) fn attach(&self, nodes: Vec<u32>, events: mpsc::Sender<FromCluster>) -> u64 {
        let mut state = self.shared.lock();
        state.gangs += 1;
        let number = state.gangs;
        for node in nodes.iter().filter(|node| !state.links.contains_key(node)) {
            let lost = FromCluster::Lost(NodeLoss { node: *node, failure: loss(*node, "", "it is not connected") });
            // The queue is new, so it has room.
            let _ = events.try_send(lost);
        }
        for node in state.links.keys().filter(|node| !nodes.contains(node)) {
            let _ = events.try_send(FromCluster::Joined(*node));
        }
        state.gang = Some(AttachedGang { number, events, nodes });
        (state.refusal, state.has_begun) = (None, true);
        number
    }

    /// Ends the gang: what nodes report from now on is dropped.
    pub(crate) fn detach(&self) {
        let mut state = self.shared.lock();
        (state.gang, state.refusal) = (None, None);
    }

    /// Ends the connection to a node for good: only another launcher may take its place.
    pub(crate) fn leave_out(&self, node: u32, reason: &str) {
        let mut state = self.shared.lock();
        let Some(link) = state.links.get(&node) else { return };
        let (process, exit_code) = (link.facts.process, ExitCode::WorkerFailed.code());
        let refused = ToNode::Refused { reason: reason.to_owned(), exit_code, is_temporary: false };
        let _ = link.outbox.send(refused);
        state.left_out.insert(process, reason.to_owned());
        // Nobody waits for the node.
        state.lost_at.remove(&node);
        drop(state.links.remove(&node));
    }

    /// Sends a message to a node. The message is dropped if the node is lost.
    pub(crate) fn send(&self, node: u32, message: ToNode) {
        if let Some(link) = self.shared.lock().links.get(&node) {
            let _ = link.outbox.send(message);
        }
    }

    /// Tells all nodes how the command ended, and waits a moment until they know.
    pub fn end(&self, exit_code: ExitCode, error: &str) {
        {
            let mut state = self.shared.lock();
            let end = ToNode::End { exit_code: exit_code.code(), error: error.to_owned() };
            for link in state.links.values() {
                let _ = link.outbox.send(end.clone());
            }
            state.end = Some(end);
        }
        let begun = Instant::now();
        while !self.shared.lock().links.is_empty() && begun.elapsed() < FAREWELL_LIMIT {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Allows this process as many open files as `nodes` connections need, if the limit of the system allows it. Shells
/// usually set a limit of 1,024.
fn allow_connections(nodes: u32) {
    let wanted = FILES_BESIDE_NODES + 2 * u64::from(nodes);
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < wanted
    {
        // If this fails, connections beyond the limit fail, with a message.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, wanted.min(hard), hard);
    }
}

/// The error of a command that was asked to stop through another node.
fn interrupted(code: ExitCode) -> LaunchError {
    match code {
        ExitCode::Preempted => reported!(Preempted, "stopped by a signal; the same command resumes the run"),
        _ => LaunchError::interrupted(),
    }
}

/// The failure of a gang that has lost a node.
fn loss(node: u32, host: &str, reason: &str) -> Failure {
    let host = if host.is_empty() { String::new() } else { format!(" ({host})") };
    Failure {
        message: format!("node {node}{host} was lost: {reason}"),
        of_peer: false,
        exit_code: ExitCode::WorkerFailed.code(),
        kind: FailureKind::Lost,
    }
}

impl Hub {
    fn lock(&self) -> MutexGuard<'_, HubState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Whether the node may take part.
    fn judge(&self, hello: NodeHello) -> Result<NodeFacts, NodeRefusal> {
        let mut facts = agreement::facts(hello).map_err(NodeRefusal::of)?;
        facts.ahead_s = facts.unix_s - exact_unix_s(SystemTime::now());
        agreement::check(&self.settings.own, &facts, self.settings.nodes).map_err(NodeRefusal::of)?;
        let state = self.lock();
        if let Some(reason) = state.left_out.get(&facts.process) {
            let (exit_code, reason) = (ExitCode::WorkerFailed, reason.clone());
            return Err(NodeRefusal { exit_code, reason, is_temporary: false, of_run: false });
        }
        state.refuse_second(&facts)?;
        Ok(facts)
    }

    /// Adds a node, and tells it so. If the same process was connected before, that connection ends.
    fn join(
        &self,
        facts: NodeFacts,
        outbox: mpsc::UnboundedSender<ToNode>,
        connection: AbortHandle,
    ) -> Result<u64, NodeRefusal> {
        let (node, host) = (facts.node, facts.host.clone());
        let mut state = self.lock();
        state.refuse_second(&facts)?;
        let _ = outbox.send(ToNode::Welcome);
        if let Some(end) = &state.end {
            let _ = outbox.send(end.clone());
        }
        state.gangs += 1;
        let number = state.gangs;
        let before = state.links.insert(node, Link { facts, outbox, connection, number });
        state.refusal = None;
        state.lost_at.remove(&node);
        let gang = state.gang.as_ref().map(|gang| (gang.nodes.contains(&node), gang.events.clone()));
        drop(state);
        if let Some(before) = before {
            before.connection.abort();
        }
        if let Some((is_in_gang, events)) = gang {
            // If the gang has the node, the workers of its earlier connection are gone.
            let failure = loss(node, &host, "it connected again");
            let lost = FromCluster::Lost(NodeLoss { node, failure });
            let news = if is_in_gang { lost } else { FromCluster::Joined(node) };
            tokio::spawn(async move { events.send(news).await });
        }
        self.changed();
        Ok(number)
    }

    /// Removes the connection `number` of a node.
    async fn leave(&self, node: u32, number: u64, reason: &str) {
        let events = {
            let mut state = self.lock();
            let Some(link) = state.links.get(&node).filter(|link| link.number == number) else { return };
            let host = link.facts.host.clone();
            state.links.remove(&node);
            state.lost_at.insert(node, Instant::now());
            let gang = state.gang.as_ref().filter(|gang| gang.nodes.contains(&node));
            if gang.is_none() && state.end.is_none() {
                // Otherwise the failure of the gang is logged.
                tracing::warn!("node {node} ({host}) was lost: {reason}");
            }
            gang.map(|gang| (gang.events.clone(), loss(node, &host, reason)))
        };
        self.changed();
        if let Some((events, failure)) = events {
            let _ = events.send(FromCluster::Lost(NodeLoss { node, failure })).await;
        }
    }

    /// Passes on what a node reports.
    async fn report(&self, node: u32, message: FromNode) {
        let events = {
            let mut state = self.lock();
            if let FromNode::Interrupted(code) = &message {
                let code = ExitCode::from_code((*code).into()).unwrap_or(ExitCode::Interrupted);
                state.interrupted.get_or_insert(code);
            }
            let belongs = |gang: &&AttachedGang| match &message {
                FromNode::Worker { gang: number, .. }
                | FromNode::NotStarted { gang: number, .. }
                | FromNode::Alive { gang: number, .. } => gang.number == *number,
                FromNode::Interrupted(_) => true,
                FromNode::Proof(_) => false,
            };
            state.gang.as_ref().filter(belongs).map(|gang| gang.events.clone())
        };
        if matches!(message, FromNode::Interrupted(_)) {
            self.changed();
        }
        if let Some(events) = events {
            let _ = events.send(FromCluster::Event((node, message))).await;
        }
    }
}

impl HubState {
    /// Fails if another process has the place of this node.
    fn refuse_second(&self, facts: &NodeFacts) -> Result<(), NodeRefusal> {
        let Some(link) = self.links.get(&facts.node).filter(|link| link.facts.process != facts.process) else {
            return Ok(());
        };
        let NodeFacts { node, host, pid, .. } = &link.facts;
        let reason = format!("node {node} is running: it is the process {pid} on {host}");
        Err(NodeRefusal { exit_code: ExitCode::RunHeld, reason, is_temporary: true, of_run: false })
    }
}

/// Why a node may not take part.
struct NodeRefusal {
    exit_code: ExitCode,
    reason: String,
    is_temporary: bool,
    /// Whether the whole command cannot succeed either.
    of_run: bool,
}

impl NodeRefusal {
    fn of(error: LaunchError) -> Self {
        let (exit_code, reason) = (error.exit_code(), error.to_string());
        Self { exit_code, reason, is_temporary: false, of_run: true }
    }
}

async fn listen(listener: TcpListener, shared: &Arc<Hub>) {
    let mut greetings: VecDeque<(Instant, SocketAddr, AbortHandle)> = VecDeque::new();
    let rejections = Arc::new(Rejections::default());
    loop {
        if rejections.are_many() {
            tokio::time::sleep(WAIT_AFTER_REJECTIONS).await;
        }
        let Ok((stream, peer)) = listener.accept().await else {
            // Too many open files, for example.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        greetings.retain(|(_, _, greeting)| !greeting.is_finished());
        while greetings.len() >= GREETINGS_MAX {
            if greetings.front().is_some_and(|(began, ..)| began.elapsed() >= GREETING_LEAST)
                && let Some((_, stranger, oldest)) = greetings.pop_front()
            {
                oldest.abort();
                rejections
                    .add(stranger, "it was the oldest of too many connections that had not proved to know the token");
            } else {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            greetings.retain(|(_, _, greeting)| !greeting.is_finished());
        }
        let (shared, rejections) = (Arc::clone(shared), Arc::clone(&rejections));
        let greeting = tokio::spawn(async move {
            match tokio::time::timeout(GREETING_LIMIT, greet(stream, &shared)).await {
                Ok(Ok((sender, receiver, hello))) => {
                    // A task of its own: from here on, the connection is no greeting any more.
                    let (started, has_started) = oneshot::channel();
                    let connection = tokio::spawn(async move {
                        if let Ok(own) = has_started.await {
                            serve_node(sender, receiver, hello, &shared, own).await;
                        }
                    });
                    let _ = started.send(connection.abort_handle());
                }
                Ok(Err(error)) => rejections.add(peer, &error.to_string()),
                Err(_) => rejections.add(peer, "it did not prove in time that it knows the token"),
            }
        });
        greetings.push_back((Instant::now(), peer, greeting.abort_handle()));
    }
}

/// Connections that were rejected.
#[derive(Debug, Default)]
struct Rejections(Mutex<RejectionCounts>);

#[derive(Debug, Default)]
struct RejectionCounts {
    since_report: u64,
    reported_at: Option<Instant>,
    this_second: u32,
    second_began: Option<Instant>,
}

impl Rejections {
    fn lock(&self) -> MutexGuard<'_, RejectionCounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, peer: SocketAddr, reason: &str) {
        let mut counts = self.lock();
        counts.since_report += 1;
        if counts.second_began.is_none_or(|began| began.elapsed() >= Duration::from_secs(1)) {
            (counts.this_second, counts.second_began) = (0, Some(Instant::now()));
        }
        counts.this_second += 1;
        if counts.reported_at.is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
            let count = std::mem::take(&mut counts.since_report);
            counts.reported_at = Some(Instant::now());
            let peer = peer.ip();
            tracing::warn!("rejected {count} connection(s) to the coordinator, the last from {peer}: {reason}");
        }
    }

    /// Whether there were so many in the current second that the next connections must wait.
    fn are_many(&self) -> bool {
        let counts = self.lock();
        let is_current = counts.second_began.is_some_and(|began| began.elapsed() < Duration::from_secs(1));
        is_current && counts.this_second >= REJECTIONS_PER_SECOND
    }
}

async fn greet(stream: TcpStream, shared: &Hub) -> io::Result<(Sender, Receiver, NodeHello)> {
    let (sender, mut receiver) = accept(stream, &shared.settings.token, &shared.seen).await?;
    let hello = receiver.receive().await?;
    let hello = hello.ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection"))?;
    Ok((sender, receiver, hello))
}

async fn serve_node(
    mut sender: Sender,
    mut receiver: Receiver,
    hello: NodeHello,
    shared: &Arc<Hub>,
    connection: AbortHandle,
) {
    let facts = match admit(&mut sender, &mut receiver, hello, shared).await {
        Ok(Ok(facts)) => facts,
        Ok(Err(refusal)) => return refuse(&mut sender, refusal, shared).await,
        Err(error) => return tracing::warn!("a node was lost before it took part: {error}"),
    };
    let (outbox, mut messages) = mpsc::unbounded_channel();
    let (node, host) = (facts.node, facts.host.clone());
    let number = match shared.join(facts, outbox, connection) {
        Ok(number) => number,
        Err(refusal) => return refuse(&mut sender, refusal, shared).await,
    };
    tracing::info!("node {node} ({host}) has joined");
    receiver.accept_long_messages();
    let transmit = async {
        loop {
            let message = match tokio::time::timeout(ALIVE_EVERY, messages.recv()).await {
                Ok(Some(message)) => message,
                Ok(None) => return "its connection was replaced".to_owned(),
                Err(_) => ToNode::Alive,
            };
            let is_last = matches!(message, ToNode::End { .. } | ToNode::Refused { .. });
            if let Err(error) = sender.send(&message).await {
                return error.to_string();
            }
            if is_last {
                let _ = sender.close().await;
                // The node closes the connection when it has read everything.
                std::future::pending::<()>().await;
            }
        }
    };
    let limit = shared.settings.silence_limit;
    let receive = async {
        loop {
            match tokio::time::timeout(limit, receiver.receive::<FromNode>()).await {
                Ok(Ok(Some(message))) => shared.report(node, message).await,
                Ok(Ok(None)) => return "it closed the connection".to_owned(),
                Ok(Err(error)) => return error.to_string(),
                Err(_) => {
                    return format!("it has said nothing for {:.1} s (supervise.node_timeout_s)", limit.as_secs_f64());
                }
            }
        }
    };
    let reason = tokio::select! { reason = transmit => reason, reason = receive => reason };
    shared.leave(node, number, &reason).await;
}

/// Tells a node why it may not take part.
async fn refuse(sender: &mut Sender, refusal: NodeRefusal, shared: &Hub) {
    let NodeRefusal { exit_code, reason, is_temporary, of_run } = refusal;
    {
        let mut state = shared.lock();
        if state.logged != reason {
            // A node that tries again and again is logged once.
            tracing::warn!("refused a node: {reason}");
            state.logged.clone_from(&reason);
        }
        if of_run && shared.settings.is_survey {
            state.refusals.push(reason.clone());
        } else if of_run && !state.has_begun {
            state.refusal = Some((exit_code, reason.clone()));
        }
    }
    shared.changed();
    let _ = sender.send(&ToNode::Refused { reason, exit_code: exit_code.code(), is_temporary }).await;
}

/// Checks whether a node may take part, and whether it sees the common folder.
async fn admit(
    sender: &mut Sender,
    receiver: &mut Receiver,
    hello: NodeHello,
    shared: &Arc<Hub>,
) -> io::Result<Result<NodeFacts, NodeRefusal>> {
    let facts = match shared.judge(hello) {
        Ok(facts) => facts,
        Err(refusal) => return Ok(Err(refusal)),
    };
    if let Some(folder) = shared.settings.common_folder.clone() {
        let written = tokio::task::spawn_blocking(move || Proof::write(&folder)).await.map_err(io::Error::other)?;
        let proof = match written {
            Ok(proof) => proof,
            Err(error) => return Ok(Err(NodeRefusal::of(error))),
        };
        let name = proof.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        sender.send(&ToNode::Prove { name }).await?;
        let text = proof_of(facts.node, sender, receiver, shared).await?;
        if text.as_ref() != Some(&proof.text) {
            let (node, host, folder) = (facts.node, &facts.host, proof.path.parent().unwrap_or(Path::new("")));
            return Ok(Err(NodeRefusal::of(reported!(
                Config,
                "node {node} ({host}) does not see the files of node 0 in {}: all nodes need the same checkpoint.dir",
                folder.display()
            ))));
        }
    }
    Ok(Ok(facts))
}

/// What the node reads in the file that it was asked for; `None` if it cannot read it.
async fn proof_of(node: u32, sender: &mut Sender, receiver: &mut Receiver, shared: &Hub) -> io::Result<Option<String>> {
    let answer = async {
        loop {
            match receiver.receive::<FromNode>().await? {
                Some(FromNode::Proof(text)) => return Ok(text),
                Some(message) => shared.report(node, message).await,
                None => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")),
            }
        }
    };
    let mut answer = std::pin::pin!(answer);
    let until = Instant::now() + PROOF_LIMIT;
    loop {
        tokio::select! {
            answer = &mut answer => return answer,
            () = tokio::time::sleep(ALIVE_EVERY) => {
                if Instant::now() >= until {
                    return Err(io::Error::other("it did not answer in time"));
                }
                sender.send(&ToNode::Alive).await?;
            }
        }
    }
}

/// A file with a random text, which another node must read.
struct Proof {
    path: PathBuf,
    text: String,
}

impl Proof {
    fn write(folder: &Path) -> Result<Self, LaunchError> {
        let mut bytes = [0; 16];
        random(&mut bytes)?;
        let text = format!("{:032x}", u128::from_be_bytes(bytes));
        let path = folder.join(format!(".node-{}", &text[..16]));
        std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, &text)).map_err(LaunchError::at(&path))?;
        Ok(Self { path, text })
    }
}

impl Drop for Proof {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
#[path = "hub_tests.rs"]
mod tests;
