//! What node 0 knows about the other nodes, and how it changes when nodes join, report and leave.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use locdiff_core::exit_code::{ExitCode, FailureKind, HasExitCode as _};
use locdiff_core::protocol::Failure;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

use crate::cluster::channel::SeenHandshakes;
use crate::cluster::messages::{FromNode, NodeFacts, ToNode};
use crate::cluster::token::Token;
use crate::error::LaunchError;

/// At the end, node 0 also waits for a node that was lost at most this long ago, because it probably connects again.
const RECENT_LOSS: Duration = Duration::from_secs(30);

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
    /// A folder that all nodes must share; `None` if there is none.
    pub(crate) common_folder: Option<PathBuf>,
    /// Whether the workers of all nodes write there.
    pub(crate) must_write: bool,
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
pub(super) struct Hub {
    pub(super) settings: HubSettings,
    pub(super) state: Mutex<HubState>,
    /// Changes whenever a node joins, leaves or is refused.
    pub(super) changes: watch::Sender<u64>,
    pub(super) seen: SeenHandshakes,
}

#[derive(Debug, Default)]
pub(super) struct HubState {
    pub(super) links: BTreeMap<u32, Link>,
    /// When each missing node was lost.
    pub(super) lost_at: BTreeMap<u32, Instant>,
    /// Launchers that have joined, with the numbers of their nodes.
    pub(super) joined: BTreeMap<u64, u32>,
    /// Launchers that may not join again, with the reason.
    pub(super) left_out: BTreeMap<u64, String>,
    /// Nodes whose place must stay empty for a while.
    pub(super) pauses: BTreeMap<u32, Pause>,
    pub(super) gang: Option<AttachedGang>,
    pub(super) gangs: u64,
    /// The last refusal of a node that is missing.
    pub(super) refusal: Option<(ExitCode, String)>,
    /// The exit code with which another node was asked to stop.
    pub(super) interrupted: Option<ExitCode>,
    /// Whether a gang has begun.
    pub(super) has_begun: bool,
    /// The message that tells nodes how the command ended.
    pub(super) end: Option<ToNode>,
    /// The last refusal that was logged.
    pub(super) logged: String,
    /// The refusals of nodes, if [`HubSettings::is_survey`].
    pub(super) refusals: Vec<String>,
}

/// A node that was left out, and may not be replaced yet.
#[derive(Debug)]
pub(super) struct Pause {
    pub(super) began: Instant,
    pub(super) length: Duration,
}

#[derive(Debug)]
pub(super) struct Link {
    pub(super) facts: NodeFacts,
    pub(super) outbox: mpsc::UnboundedSender<ToNode>,
    pub(super) connection: AbortHandle,
    pub(super) number: u64,
}

#[derive(Debug)]
pub(super) struct AttachedGang {
    pub(super) number: u64,
    pub(super) events: mpsc::Sender<FromCluster>,
    pub(super) nodes: Vec<u32>,
}

/// Why a node may not take part.
pub(super) struct NodeRefusal {
    pub(super) exit_code: ExitCode,
    pub(super) reason: String,
    pub(super) is_temporary: bool,
    /// Whether the whole command cannot succeed either.
    pub(super) of_run: bool,
}

impl NodeRefusal {
    pub(super) fn of(error: LaunchError) -> Self {
        let (exit_code, reason) = (error.exit_code(), error.to_string());
        Self { exit_code, reason, is_temporary: false, of_run: true }
    }
}

/// The failure of a gang that has lost a node.
pub(super) fn loss(node: u32, host: &str, reason: &str) -> Failure {
    let host = if host.is_empty() { String::new() } else { format!(" ({host})") };
    Failure {
        message: format!("node {node}{host} was lost: {reason}"),
        of_peer: false,
        exit_code: ExitCode::WorkerFailed.code(),
        kind: FailureKind::Lost,
    }
}

impl Hub {
    pub(super) fn lock(&self) -> MutexGuard<'_, HubState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Adds a node, and tells it so. If the same process was connected before, that connection ends.
    pub(super) fn join(
        &self,
        facts: NodeFacts,
        outbox: mpsc::UnboundedSender<ToNode>,
        connection: AbortHandle,
    ) -> Result<u64, NodeRefusal> {
        let (node, host) = (facts.node, facts.host.clone());
        let mut state = self.lock();
        state.refuse_second(&facts)?;
        state.joined.insert(facts.process, node);
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
    pub(super) async fn leave(&self, node: u32, number: u64, reason: &str) {
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
    pub(super) async fn report(&self, node: u32, message: FromNode) {
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
                FromNode::Proof { .. } => false,
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
    /// Whether a node that is here, or was lost shortly before the end, does not know yet how the command ended.
    pub(super) fn has_to_be_told(&self, end: Instant) -> bool {
        let is_recent = |(node, at): (&u32, &Instant)| {
            *at < end && end.duration_since(*at) < RECENT_LOSS && self.joined.values().any(|joined| joined == node)
        };
        !self.links.is_empty() || self.lost_at.iter().any(is_recent)
    }

    /// Fails if another process has the place of this node.
    pub(super) fn refuse_second(&self, facts: &NodeFacts) -> Result<(), NodeRefusal> {
        let Some(link) = self.links.get(&facts.node).filter(|link| link.facts.process != facts.process) else {
            return Ok(());
        };
        let NodeFacts { node, host, pid, .. } = &link.facts;
        let reason = format!("node {node} is running: it is the process {pid} on {host}");
        Err(NodeRefusal { exit_code: ExitCode::RunHeld, reason, is_temporary: true, of_run: false })
    }
}
