//! The end of node 0: it listens for the other nodes, decides who takes part, and passes messages between them and the
//! supervisor. All of this happens on a thread of its own, so that a busy disk or a long computation of node 0 does not
//! look like a lost connection.

mod door;
mod state;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use locdiff_core::exit_code::{ExitCode, FailureKind};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};

use super::channel::SeenHandshakes;
use super::messages::{FromNode, NodeFacts, ToNode};
use crate::error::{LaunchError, reported};
use state::{AttachedGang, Hub, HubState, Pause, loss};

pub(crate) use state::{FromCluster, HubSettings, NodeLoss};

/// How long node 0 waits at the end until all nodes know the result.
const FAREWELL_LIMIT: Duration = Duration::from_secs(3);

/// How long no other launcher may take the place of a node that was left out for the first time. The pause doubles each
/// time, so that a scheduler that starts a broken node again and again does not keep the others from training.
const FIRST_PAUSE: Duration = Duration::from_secs(30);

/// The longest such pause.
const PAUSE_MAX: Duration = Duration::from_secs(3600);

/// How often the nodes that are still missing are named.
const REMIND_EVERY: Duration = Duration::from_secs(10);

/// Number of files that a launcher may need beside the connections to nodes.
const FILES_BESIDE_NODES: u64 = 2048;

/// The other nodes of the run, as node 0 sees them.
#[derive(Debug)]
pub struct Cluster {
    shared: Arc<Hub>,
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
        thread.spawn(move || runtime.block_on(door::listen(listener, &serving))).context("cannot start a thread")?;
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
                let refused = match shared.lock().logged.as_str() {
                    "" => String::new(),
                    reason => format!("; the last node that was refused: {reason}"),
                };
                return Err(reported!(
                    Timeout,
                    "node(s) {names} did not join at {address} within {:.1} s \
                     (supervise.rendezvous_timeout_s){refused}",
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
        if let Some(code) = state.interrupted {
            // The request came when no gang was attached.
            let _ = events.try_send(FromCluster::Event((0, FromNode::Interrupted(code.code()))));
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

    /// Ends the connection to a launcher for good: only another one may take the place of the node, after a pause that
    /// grows each time.
    pub(crate) fn leave_out(&self, node: u32, process: u64, reason: &str) {
        let mut state = self.shared.lock();
        state.left_out.insert(process, reason.to_owned());
        let length = state.pauses.get(&node).map_or(FIRST_PAUSE, |before| (2 * before.length).min(PAUSE_MAX));
        state.pauses.insert(node, Pause { began: Instant::now(), length });
        if state.links.get(&node).is_none_or(|link| link.facts.process != process) {
            return;
        }
        let exit_code = ExitCode::WorkerFailed.code();
        let refused = ToNode::Refused { reason: reason.to_owned(), exit_code, is_temporary: false };
        // Nobody waits for the node.
        state.lost_at.remove(&node);
        if let Some(link) = state.links.remove(&node) {
            let _ = link.outbox.send(refused);
        }
    }

    /// Waits until another node was asked to stop.
    pub(crate) async fn interrupted(&self) -> ExitCode {
        let mut changes = self.shared.changes.subscribe();
        loop {
            changes.borrow_and_update();
            if let Some(code) = self.shared.lock().interrupted {
                return code;
            }
            let _ = changes.changed().await;
        }
    }

    /// Sends a message to a node. The message is dropped if the node is lost.
    pub(crate) fn send(&self, node: u32, message: ToNode) {
        if let Some(link) = self.shared.lock().links.get(&node) {
            let _ = link.outbox.send(message);
        }
    }

    /// Tells all nodes how the command ended, and waits a moment until they know.
    pub fn end(&self, exit_code: ExitCode, error: &str) {
        let begun = Instant::now();
        {
            let mut state = self.shared.lock();
            let end = ToNode::End { exit_code: exit_code.code(), error: error.to_owned() };
            for link in state.links.values() {
                let _ = link.outbox.send(end.clone());
            }
            state.end = Some(end);
        }
        while self.shared.lock().has_to_be_told(begun) && begun.elapsed() < FAREWELL_LIMIT {
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

#[cfg(test)]
mod tests;
