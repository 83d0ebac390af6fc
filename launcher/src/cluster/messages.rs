//! Messages between the launcher of node 0, which coordinates, and the launchers of the other nodes, which start workers
//! for it. Both ends know the token ([`super::channel`]).
//!
//! A node begins with [`NodeHello`]. Node 0 compares it with its own, and answers with [`ToNode::Welcome`] or
//! [`ToNode::Refused`]. From then on, each end sends something at least every [`ALIVE_EVERY`].

use std::time::Duration;

use locdiff_core::config::RunConfig;
use locdiff_core::exit_code::FailureKind;
use locdiff_core::protocol::{ToLauncher, ToWorker, WorkerSlot};
use locdiff_core::pulse::Beat;
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use crate::coordinator::Exit;

/// Version of these messages. Increase it whenever one changes.
pub(super) const LINK_VERSION: u32 = 2;

/// How often each end says that it is alive.
pub(crate) const ALIVE_EVERY: Duration = Duration::from_millis(500);

/// The first message of a node. It begins with the same fields in every version.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct NodeHello {
    /// [`LINK_VERSION`] of the node.
    pub(super) link_version: u32,
    /// Version of the node's launcher.
    pub(super) version: String,
    /// Git revision of the node's launcher.
    pub(super) revision: String,
    /// The rest, which other versions may not understand.
    #[serde(flatten)]
    pub(super) rest: serde_json::Value,
}

/// What a node of the same version says about itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct NodeFacts {
    /// Number of the node, from 0.
    pub(crate) node: u32,
    /// Name of the machine.
    pub(crate) host: String,
    /// Process id of the launcher.
    pub(crate) pid: u32,
    /// A random number of the launcher process.
    pub(crate) process: u64,
    /// The verb that the node runs.
    pub(crate) verb: String,
    /// The node's configuration.
    pub(crate) config: Box<RunConfig>,
    /// The workers that the node can start; their ranks count from 0 on each node.
    pub(crate) slots: Vec<WorkerSlot>,
    /// Whether several of these workers share a GPU.
    pub(crate) share_gpu: bool,
    /// Number of cores of the node.
    pub(crate) cores: u32,
    /// The network interface over which the node's workers reach the others; "": loopback.
    pub(crate) interface: String,
    /// What `doctor` found on the node; null for other verbs.
    pub(crate) report: serde_json::Value,
    /// The node's clock when it connected, seconds since 1970.
    pub(crate) unix_s: f64,
    /// By how many seconds the node's clock was ahead of node 0's. Node 0 sets this.
    #[serde(skip)]
    pub(crate) ahead_s: f64,
}

/// From node 0 to another node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ToNode {
    /// The node may not take part.
    Refused {
        /// Why not.
        reason: String,
        /// Exit code for the node.
        exit_code: u8,
        /// Whether the reason may vanish, so that the node should try again.
        is_temporary: bool,
    },
    /// Read this file in the common folder, and send its content.
    Prove {
        /// Name of the file.
        name: String,
        /// Whether to write and remove a file beside it.
        must_write: bool,
    },
    /// The node takes part.
    Welcome,
    /// Node 0 is alive.
    Alive,
    /// Start workers.
    Begin {
        /// Number of the gang. Messages that belong to another gang are ignored.
        gang: u64,
        /// The workers to start.
        slots: Vec<WorkerSlot>,
        /// Whether workers share a GPU.
        share_gpu: bool,
        /// The network interface over which the node's workers reach the others; "": loopback.
        interface: String,
    },
    /// Kill the workers of a gang that are still running.
    Kill {
        /// Number of the gang.
        gang: u64,
    },
    /// Pass a message to a worker.
    Deliver {
        /// Number of the gang.
        gang: u64,
        /// Rank of the worker.
        rank: u32,
        /// The message.
        message: ToWorker,
    },
    /// Send a signal to a worker.
    Signal {
        /// Number of the gang.
        gang: u64,
        /// Rank of the worker.
        rank: u32,
        /// The signal.
        signal: WorkerSignal,
    },
    /// The command has ended.
    End {
        /// Exit code of the command.
        exit_code: u8,
        /// Its error; empty if it succeeded.
        error: String,
    },
}

/// A signal to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum WorkerSignal {
    /// SIGKILL, also for the processes that the worker has started.
    Kill,
    /// The signal that asks for a backtrace.
    Backtrace,
}

impl WorkerSignal {
    /// The signal.
    pub(crate) fn number(self) -> Signal {
        match self {
            Self::Kill => Signal::SIGKILL,
            Self::Backtrace => Signal::SIGUSR2,
        }
    }
}

/// From another node to node 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FromNode {
    /// The content of the file in [`ToNode::Prove`].
    Proof {
        /// `None` if the file cannot be read.
        text: Option<String>,
        /// Why the node cannot write a file beside it; `None` if it can, or need not.
        not_written: Option<String>,
    },
    /// The node is alive.
    Alive {
        /// Number of the gang; 0 if there is none.
        gang: u64,
        /// Rank and heartbeat of each worker with a new heartbeat.
        beats: Vec<(u32, Beat)>,
    },
    /// Somebody asked this node to stop, and its launcher would end with this exit code.
    Interrupted(u8),
    /// Something happened to a worker.
    Worker {
        /// Number of the gang.
        gang: u64,
        /// Rank of the worker.
        rank: u32,
        /// What happened.
        event: WorkerEvent,
    },
    /// The workers could not be started.
    NotStarted {
        /// Number of the gang.
        gang: u64,
        /// Why not.
        error: String,
        /// Exit code that belongs to the error.
        exit_code: u8,
        /// Kind of the failure.
        kind: FailureKind,
    },
}

/// Something that happened to a worker of another node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum WorkerEvent {
    /// The worker was started and has this process id.
    Started(u32),
    /// The worker sent a message other than a heartbeat.
    Message(Box<ToLauncher>),
    /// The worker sent a message that cannot be parsed, for this reason.
    Garbled(String),
    /// The worker closed its socket.
    Closed,
    /// The worker ended.
    Exited {
        /// How it ended.
        exit: Exit,
        /// Whether the kernel has killed a process of the node because memory ran out.
        is_out_of_memory: bool,
    },
    /// The worker printed a line.
    Line(String),
    /// One of the worker's two streams of output has ended.
    OutputEnded,
}
