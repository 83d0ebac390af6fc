//! The rendezvous: connects this rank with the other ranks of its groups, through the key-value store.
//!
//! Rank 0 serves the store on a listening socket, and the other ranks connect to the address of that socket. Each
//! attempt of a run has its own prefix for keys, so that the keys of a failed attempt cannot be mistaken for keys of
//! the current attempt.

use std::net::TcpListener;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tch::Device;

use super::error::CommError;
use super::group::Group;
use super::layout::{Layout, LayoutPosition};
use crate::native::c10d::ProcessGroup;
use crate::native::{NativeError, Store};

/// How this rank connects to the store: as the server or as a client.
#[derive(Debug)]
pub enum StoreEnd {
    /// For rank 0, which serves the store: a listening socket, bound to an address that the other ranks can reach.
    Serve(TcpListener),
    /// For all other ranks: the address on which rank 0 listens.
    Join {
        /// Host name or address.
        host: String,
        /// TCP port.
        port: u16,
    },
}

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
#[derive(Debug)]
pub struct Rendezvous {
    /// This process's rank in the world.
    pub rank: u32,
    /// How the ranks of the world are divided into groups. Must be the same on every rank.
    pub layout: Layout,
    /// The number of this attempt of the run. Must be the same on every rank.
    pub attempt: u32,
    /// This rank's connection to the store.
    pub store: StoreEnd,
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
    /// The store must exist as long as the groups do.
    _store: Store,
}

impl Communicator {
    /// Waits until every rank has joined, and connects the groups of this rank. If some ranks do not join in time, the
    /// error names them.
    pub fn connect(rendezvous: Rendezvous) -> Result<Self, CommError> {
        let Rendezvous { rank, layout, attempt, store, backend, connect_timeout, collective_timeout } = rendezvous;
        let place = layout.place(rank)?;
        let store = match store {
            StoreEnd::Serve(listener) => Store::serve(listener, connect_timeout),
            StoreEnd::Join { host, port } => Store::join(&host, port, connect_timeout),
        }
        .and_then(|store| store.with_prefix(&format!("attempt-{attempt}")))
        .map_err(|source| connect_error(rank, "the store", source))?;
        join_rendezvous(&store, rank, layout, connect_timeout)?;

        let connect = |name: &str, prefix: &str, members: (u32, u32)| {
            store
                .with_prefix(prefix)
                .and_then(|store| open_group(&backend, &store, name, members, connect_timeout))
                .map(|group| Group::new(group, name, members, backend.device(), collective_timeout))
                .map_err(|source| connect_error(rank, &format!("group {name}"), source))
        };
        // Every rank connects its groups in the same order. Otherwise, ranks could wait for each other forever.
        let world = connect("world", "world", (rank, layout.world()))?;
        let data = connect("data", &format!("data-{}", place.tensor_rank), (place.data_rank, layout.data_parallel()))?;
        let tensor =
            connect("tensor", &format!("tensor-{}", place.data_rank), (place.tensor_rank, layout.tensor_parallel()))?;
        // Rank 0 must serve the store until all ranks are connected.
        world.with_timeout(connect_timeout).barrier()?;
        Ok(Self { layout, rank, place, world, data, tensor, _store: store })
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
fn join_rendezvous(store: &Store, rank: u32, layout: Layout, timeout: Duration) -> Result<(), CommError> {
    let started = Instant::now();
    let store_error = |source| connect_error(rank, "the store", source);
    let rendezvous = |problem: String| CommError::Bad(format!("rendezvous of rank {rank}: {problem}"));
    if store.add(&format!("claims/{rank}"), 1).map_err(store_error)? > 1 {
        return Err(rendezvous(format!("another process has already joined as rank {rank}")));
    }
    let mine = layout.to_string();
    store.set(&arrival_key(rank), mine.as_bytes()).map_err(store_error)?;
    for peer in 0..layout.world() {
        let left = timeout.saturating_sub(started.elapsed());
        let Ok(theirs) = store.get(&arrival_key(peer), left) else {
            return Err(missing_ranks(store, rank, layout, timeout));
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

fn missing_ranks(store: &Store, rank: u32, layout: Layout, after: Duration) -> CommError {
    let mut missing = Vec::new();
    for peer in 0..layout.world() {
        match store.contains(&arrival_key(peer)) {
            Ok(true) => {}
            Ok(false) => missing.push(peer.to_string()),
            // The store cannot be reached, which means that rank 0 has ended.
            Err(source) => return connect_error(rank, "the store", source),
        }
    }
    let (missing, seconds) = (missing.join(", "), after.as_secs_f64());
    CommError::Unreached(format!("rendezvous of rank {rank}: rank(s) {missing} did not join within {seconds:.1} s"))
}

fn arrival_key(rank: u32) -> String {
    format!("arrivals/{rank}")
}

fn connect_error(rank: u32, what: &str, source: NativeError) -> CommError {
    CommError::Unreached(format!("rank {rank}: the connection to {what} failed: {source}"))
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
