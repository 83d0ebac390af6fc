//! The rendezvous: connects this rank with the other ranks of its groups, through the keys that all ranks share.

use std::fmt::Display;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tch::Device;

use super::error::CommError;
use super::group::Group;
use super::layout::{Layout, LayoutPosition};
use crate::native::NativeError;
use crate::native::c10d::{Keys, ProcessGroup, Store};

/// The library that runs the collectives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backend {
    /// Gloo, for CPU tensors, over TCP. The field is an address of this host. Gloo listens on this address and connects
    /// from it.
    Gloo(String),
    /// NCCL, for CUDA tensors, with one GPU per rank. NCCL's environment variable `NCCL_SOCKET_IFNAME` chooses the
    /// network interface between nodes.
    Nccl {
        /// Index of the GPU among those visible to this process.
        device: u32,
    },
}

/// The settings with which a rank joins the other ranks.
pub struct Rendezvous {
    /// This process's rank in the world.
    pub rank: u32,
    /// How the ranks of the world are divided into groups. Must be the same on every rank.
    pub layout: Layout,
    /// The keys that all ranks share. No other group of ranks may have used them.
    pub keys: Arc<dyn Keys>,
    /// The library that runs the collectives.
    pub backend: Backend,
    /// How long to wait until all other ranks have joined, and then until each group is connected.
    pub connect_timeout: Duration,
    /// Default timeout of each collective.
    pub collective_timeout: Duration,
}

/// The groups to which this rank belongs, and its position in the layout.
///
/// Each group has its own connections, so collectives of two groups may run at the same time and in any order.
#[derive(Debug)]
pub struct Communicator {
    layout: Layout,
    rank: u32,
    place: LayoutPosition,
    world: Group,
    data: Group,
    tensor: Group,
}

impl Communicator {
    /// Waits until every rank has joined, and connects the groups of this rank. If some ranks do not join in time, the
    /// error names them.
    pub fn connect(rendezvous: Rendezvous) -> Result<Self, CommError> {
        let Rendezvous { rank, layout, keys, backend, connect_timeout, collective_timeout } = rendezvous;
        let place = layout.place(rank)?;
        join_rendezvous(&*keys, rank, layout, connect_timeout)?;

        let connect = |name: &str, prefix: &str, members: (u32, u32)| {
            Store::new(Arc::clone(&keys), prefix, connect_timeout)
                .and_then(|store| open_group(&backend, &store, name, members, connect_timeout))
                .map(|group| Group::new(group, name, members, backend.device(), collective_timeout))
                .map_err(|error| connect_error(rank, &format!("group {name}"), &error))
        };
        // Every rank connects its groups in the same order. Otherwise, ranks could wait for each other forever.
        let world = connect("world", "world", (rank, layout.world()))?;
        let data = connect("data", &format!("data-{}", place.tensor_rank), (place.data_rank, layout.data_parallel()))?;
        let tensor =
            connect("tensor", &format!("tensor-{}", place.data_rank), (place.tensor_rank, layout.tensor_parallel()))?;
        // Finds a rank that cannot exchange data before the job begins.
        world.with_timeout(connect_timeout).barrier()?;
        Ok(Self { layout, rank, place, world, data, tensor })
    }

    /// How the ranks of the world are divided into groups.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// This process's rank in the world.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Position of this rank in the layout.
    pub fn place(&self) -> LayoutPosition {
        self.place
    }

    /// The group of all ranks.
    pub fn world(&self) -> &Group {
        &self.world
    }

    /// The group of the ranks that hold the same part of the model as this rank. Gradients are averaged over this
    /// group.
    pub fn data(&self) -> &Group {
        &self.data
    }

    /// The group of the ranks that together hold one replica of the model.
    pub fn tensor(&self) -> &Group {
        &self.tensor
    }

    /// A handle that can abort the collectives of this rank from another thread.
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle([self.tensor.clone(), self.data.clone(), self.world.clone()])
    }
}

/// A handle that can abort all pending collectives of a rank.
#[derive(Debug, Clone)]
pub struct AbortHandle([Group; 3]);

impl AbortHandle {
    /// Number of ranks in the world.
    pub fn size(&self) -> u32 {
        self.0[2].size()
    }

    /// Starts a background thread that makes every pending collective of this rank's groups fail. If a CUDA graph
    /// contains NCCL collectives, the abort ends them at once, so that the graph's stream can continue. But the
    /// background thread ends only after the graph is dropped, so drop all such graphs before you join the thread.
    pub fn abort_in_background(&self) -> JoinHandle<Result<(), CommError>> {
        let groups = self.0.clone();
        std::thread::spawn(move || {
            // Abort all groups in parallel, even if one abort fails.
            let aborting = groups.map(|group| std::thread::spawn(move || group.abort()));
            aborting.into_iter().try_for_each(|abort| abort.join().expect("an abort does not panic"))
        })
    }
}

impl Backend {
    /// Device of the tensors that the backend exchanges.
    pub fn device(&self) -> Device {
        match self {
            Self::Gloo(_) => Device::Cpu,
            Self::Nccl { device } => Device::Cuda(*device as usize),
        }
    }
}

/// Announces this rank in the store and waits until all ranks have announced themselves. Without this step, connecting
/// a group would wait for a rank that never joins, and no error could name that rank.
fn join_rendezvous(keys: &dyn Keys, rank: u32, layout: Layout, timeout: Duration) -> Result<(), CommError> {
    let started = Instant::now();
    let unreached = |error: String| connect_error(rank, "the store", &error);
    let rendezvous = |problem: String| CommError::Bad(format!("rendezvous of rank {rank}: {problem}"));
    if keys.add(&format!("claims/{rank}"), 1).map_err(unreached)? > 1 {
        return Err(rendezvous(format!("another process has already joined as rank {rank}")));
    }
    let mine = layout.to_string();
    keys.set(&arrival_key(rank), mine.as_bytes()).map_err(unreached)?;
    for peer in 0..layout.world() {
        let left = timeout.saturating_sub(started.elapsed());
        let Ok(theirs) = keys.get(&arrival_key(peer), left) else {
            return Err(missing_ranks(keys, rank, layout, timeout));
        };
        if theirs != mine.as_bytes() {
            let theirs = String::from_utf8_lossy(&theirs);
            return Err(rendezvous(format!(
                "rank {peer} joined with layout {theirs}, but this rank has layout {mine}"
            )));
        }
    }
    Ok(())
}

fn missing_ranks(keys: &dyn Keys, rank: u32, layout: Layout, after: Duration) -> CommError {
    let mut missing = Vec::new();
    for peer in 0..layout.world() {
        match keys.contains(&arrival_key(peer)) {
            Ok(true) => {}
            Ok(false) => missing.push(peer.to_string()),
            Err(error) => return connect_error(rank, "the store", &error),
        }
    }
    let (missing, seconds) = (missing.join(", "), after.as_secs_f64());
    CommError::Unreached(format!("rendezvous of rank {rank}: rank(s) {missing} did not join within {seconds:.1} s"))
}

fn arrival_key(rank: u32) -> String {
    format!("arrivals/{rank}")
}

fn connect_error(rank: u32, what: &str, error: &dyn Display) -> CommError {
    CommError::Unreached(format!("rank {rank}: the connection to {what} failed: {error}"))
}

fn open_group(
    backend: &Backend,
    store: &Store,
    name: &str,
    members: (u32, u32),
    timeout: Duration,
) -> Result<ProcessGroup, NativeError> {
    match backend {
        Backend::Gloo(address) => ProcessGroup::gloo(store, name, members, address, timeout),
        #[cfg(locdiff_cuda)]
        Backend::Nccl { device } => ProcessGroup::nccl(store, name, members, *device, timeout),
        #[cfg(not(locdiff_cuda))]
        Backend::Nccl { .. } => Err(NativeError {
            operation: "connect over nccl",
            text: "this build has no NCCL; rebuild with `LOCDIFF_CUDA=1 make build`".to_owned(),
        }),
    }
}
