//! The other nodes of a gang: what they are asked to do, and what they report.

use std::sync::Arc;

use locdiff_core::exit_code::ExitCode;
use locdiff_core::protocol::{Failure, WorkerSlot};
use tokio::sync::mpsc;

use super::control::NOTICES_MAX;
use super::observer::Observations;
use super::workers::{RemoteNode, WorkerHandle};
use crate::cluster::{Cluster, FromCluster, FromNode, NodeLoss, ToNode, WorkerEvent};
use crate::coordinator::GangEvent;
use crate::rendezvous::NodeWorkers;

/// The other nodes of a gang. When this value is dropped, they kill the workers that are still running.
pub(super) struct GangNodes {
    cluster: Arc<Cluster>,
    news: mpsc::Receiver<FromCluster>,
    gang: u64,
    nodes: Vec<u32>,
}

impl GangNodes {
    /// Asks the other nodes to start their workers. `None` if there is only one node.
    pub(super) fn begin(world: &NodeWorkers) -> Option<Self> {
        let cluster = Arc::clone(world.cluster.as_ref()?);
        let nodes: Vec<u32> = world.other_nodes().map(|node| node.number).collect();
        let (from_nodes, news) = mpsc::channel(NOTICES_MAX);
        let gang = cluster.attach(nodes.clone(), from_nodes);
        for node in world.other_nodes() {
            let slots = world.slots.iter().filter(|slot| slot.node == node.number).cloned().collect();
            let (share_gpu, interface) = (world.share_gpu, node.interface.clone());
            cluster.send(node.number, ToNode::Begin { gang, slots, share_gpu, interface });
        }
        Some(Self { cluster, news, gang, nodes })
    }

    /// The worker that the other node starts in `slot`. `None` if the slot belongs to this node.
    pub(super) fn worker(&self, world: &NodeWorkers, slot: &WorkerSlot) -> Option<WorkerHandle> {
        let node = world.node(slot.node).filter(|node| node.number > 0)?;
        let (cluster, host) = (Arc::clone(&self.cluster), node.host.clone());
        let node = RemoteNode { cluster, gang: self.gang, number: slot.node, host };
        Some(WorkerHandle::elsewhere(slot.rank, node))
    }

    /// What a node reports. Waits forever if there are no other nodes.
    pub(super) async fn next(nodes: &mut Option<Self>) -> FromCluster {
        let Some(nodes) = nodes else { return std::future::pending().await };
        match nodes.news.recv().await {
            Some(news) => news,
            None => std::future::pending().await,
        }
    }
}

impl Drop for GangNodes {
    fn drop(&mut self) {
        self.cluster.detach();
        // Usually, all workers have ended.
        self.nodes.iter().for_each(|node| self.cluster.send(*node, ToNode::Kill { gang: self.gang }));
    }
}

/// What the supervisor does about the news from a node.
pub(super) enum NodeNews {
    Event(GangEvent),
    Exited { event: GangEvent, is_out_of_memory: bool },
    Interrupted(ExitCode),
    Joined(u32),
}

/// Updates `members`, and informs the observer. Returns what else is to be done.
pub(super) fn handle_node(
    news: FromCluster,
    members: &mut [WorkerHandle],
    observations: &Observations,
) -> Option<NodeNews> {
    let lose = |members: &mut [WorkerHandle], node: u32, failure: Failure| {
        let mut ranks = Vec::new();
        for (rank, member) in (0..).zip(members).filter(|(_, member)| member.is_of(node)) {
            (member.running, member.open_outputs) = (false, 0);
            ranks.push(rank);
        }
        Some(NodeNews::Event(GangEvent::NodeLost { node, ranks, failure }))
    };
    let (node, message) = match news {
        FromCluster::Lost(NodeLoss { node, failure }) => return lose(members, node, failure),
        FromCluster::Joined(node) => return Some(NodeNews::Joined(node)),
        FromCluster::Event(event) => event,
    };
    let (rank, event) = match message {
        FromNode::Worker { rank, event, .. } => (rank, event),
        FromNode::NotStarted { error, exit_code, kind, .. } => {
            let failure = Failure { message: error, of_peer: false, exit_code, kind };
            return lose(members, node, failure);
        }
        FromNode::Alive { mut beats, .. } => {
            beats.retain(|(rank, beat)| {
                let member = members.get_mut(*rank as usize).filter(|member| member.is_of(node));
                member.map(|member| member.set_step(beat.step)).is_some()
            });
            return (!beats.is_empty()).then_some(NodeNews::Event(GangEvent::Beats(beats)));
        }
        FromNode::Interrupted(code) => {
            let code = ExitCode::from_code(code.into()).unwrap_or(ExitCode::Interrupted);
            return Some(NodeNews::Interrupted(code));
        }
        FromNode::Proof { .. } => return None,
    };
    // A node may report only about its own workers.
    let member = members.get_mut(rank as usize).filter(|member| member.is_of(node))?;
    let event = match event {
        WorkerEvent::Started(pid) => {
            member.pid = pid;
            return None;
        }
        WorkerEvent::Line(line) => {
            member.keep_line(line.clone());
            observations.line(rank as usize, line);
            return None;
        }
        WorkerEvent::OutputEnded => {
            member.open_outputs = member.open_outputs.saturating_sub(1);
            return None;
        }
        WorkerEvent::Exited { exit, is_out_of_memory } => {
            member.running = false;
            return Some(NodeNews::Exited { event: GangEvent::Exited { rank, exit }, is_out_of_memory });
        }
        WorkerEvent::Message(message) => GangEvent::Message { rank, message: *message },
        WorkerEvent::Garbled(reason) => GangEvent::Garbled { rank, reason },
        WorkerEvent::Closed => GangEvent::Closed(rank),
    };
    Some(NodeNews::Event(event))
}
