//! The rendezvous: from an address to connected groups.
//!
//! Rank 0 holds the store's listener; the others know its address. Keys of one attempt stand under a prefix of their
//! own, so that what a failed attempt left behind cannot be mistaken for a peer.

use std::net::TcpListener;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tch::Device;

use super::error::CommError;
use super::group::Group;
use super::layout::{Layout, Place};
use crate::native::c10d::ProcessGroup;
use crate::native::{NativeError, Store};

/// This rank's end of the store.
#[derive(Debug)]
pub enum StoreEnd {
    /// Rank 0: a socket bound to the interface on which the store is to be reached, and listening.
    Serve(TcpListener),
    /// The others: where rank 0 listens.
    Join {
        /// Host name or address.
        host: String,
        /// TCP port.
        port: u16,
    },
}

/// What carries the collectives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backend {
    /// CPU tensors, over TCP, on an address of this host.
    Gloo(String),
    /// CUDA tensors of one GPU. Which interface it uses between nodes is NCCL's own setting, `NCCL_SOCKET_IFNAME`.
    Nccl {
        /// Index of the GPU among those that this process sees.
        device: u32,
    },
}

/// All that a rank must know to find the others.
#[derive(Debug)]
pub struct Rendezvous {
    /// This process's rank in the world.
    pub rank: u32,
    /// How the world is divided; the same on every rank.
    pub layout: Layout,
    /// Counts restarts; the same on every rank.
    pub attempt: u32,
    /// This rank's end of the store.
    pub store: StoreEnd,
    /// What carries the collectives.
    pub backend: Backend,
    /// How long to wait for the others to arrive and connect.
    pub connect_timeout: Duration,
    /// How long each collective may take, unless it is given another.
    pub collective_timeout: Duration,
}

/// The groups that this rank belongs to.
///
/// Each group has connections of its own: collectives of two groups may be under way at once, in any order.
#[derive(Debug)]
pub struct Communicator {
    layout: Layout,
    rank: u32,
    place: Place,
    world: Group,
    data: Group,
    tensor: Group,
    /// Serves or joins until the groups are gone.
    _store: Store,
}

impl Communicator {
    /// Waits for every rank and connects the groups. On failure the error names who is missing.
    pub fn connect(rendezvous: Rendezvous) -> Result<Self, CommError> {
        let Rendezvous { rank, layout, attempt, store, backend, connect_timeout, collective_timeout } = rendezvous;
        let place = layout.place(rank)?;
        let store = match store {
            StoreEnd::Serve(listener) => Store::serve(listener, connect_timeout),
            StoreEnd::Join { host, port } => Store::join(&host, port, connect_timeout),
        }
        .and_then(|store| store.with_prefix(&format!("attempt-{attempt}")))
        .map_err(|source| connect_error(rank, "store", source))?;
        arrive(&store, rank, layout, connect_timeout)?;

        let connect = |name: &str, prefix: &str, members: (u32, u32)| {
            store
                .with_prefix(prefix)
                .and_then(|store| open(&backend, &store, name, members, connect_timeout))
                .map(|group| Group::new(group, name, members, backend.device(), collective_timeout))
                .map_err(|source| connect_error(rank, name, source))
        };
        // Every rank goes through the kinds of groups in the same order, so that nobody waits in a circle.
        let world = connect("world", "world", (rank, layout.world()))?;
        let data = connect("data", &format!("data-{}", place.tensor_rank), (place.data_rank, layout.data_parallel()))?;
        let tensor =
            connect("tensor", &format!("tensor-{}", place.data_rank), (place.tensor_rank, layout.tensor_parallel()))?;
        // Rank 0 serves the store until all are through.
        world.with_timeout(connect_timeout).barrier()?;
        Ok(Self { layout, rank, place, world, data, tensor, _store: store })
    }

    /// How the world is divided.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// This process's rank in the world.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Where this rank stands in the layout.
    pub fn place(&self) -> Place {
        self.place
    }

    /// All ranks.
    pub fn world(&self) -> &Group {
        &self.world
    }

    /// The ranks that hold the same slice of the model: gradients are reduced there.
    pub fn data(&self) -> &Group {
        &self.data
    }

    /// The ranks that hold one replica together.
    pub fn tensor(&self) -> &Group {
        &self.tensor
    }

    /// What can end the collectives of this rank from elsewhere.
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle([self.tensor.clone(), self.data.clone(), self.world.clone()])
    }
}

/// Ends every collective of a rank.
#[derive(Debug, Clone)]
pub struct AbortHandle([Group; 3]);

impl AbortHandle {
    /// How many ranks there are.
    pub fn size(&self) -> u32 {
        self.0[2].size()
    }

    /// Ends every pending collective of every group with an error, on a thread of its own: where CUDA graphs hold collectives of
    /// NCCL, that frees their streams at once but ends only when the graphs are gone. Drop them before joining it.
    pub fn abort_in_background(&self) -> JoinHandle<Result<(), CommError>> {
        let groups = self.0.clone();
        std::thread::spawn(move || {
            // All are aborted, whatever the first one says, and none waits for another.
            let aborting = groups.map(|group| std::thread::spawn(move || group.abort()));
            aborting.into_iter().try_for_each(|abort| abort.join().expect("an abort does not panic"))
        })
    }
}

impl Backend {
    /// Where its tensors live.
    pub fn device(&self) -> Device {
        match self {
            Self::Gloo(_) => Device::Cpu,
            Self::Nccl { device } => Device::Cuda(*device as usize),
        }
    }
}

/// Tells the others that this rank is there, and waits until all are. Connecting before that would hang where a rank
/// never comes, and could not say which.
fn arrive(store: &Store, rank: u32, layout: Layout, timeout: Duration) -> Result<(), CommError> {
    let started = Instant::now();
    let store_error = |source| connect_error(rank, "store", source);
    let rendezvous = |problem: String| CommError::Bad(format!("rendezvous of rank {rank}: {problem}"));
    if store.add(&format!("claims/{rank}"), 1).map_err(store_error)? > 1 {
        return Err(rendezvous(format!("another process has come as rank {rank} already")));
    }
    let mine = layout.to_string();
    store.set(&arrival_key(rank), mine.as_bytes()).map_err(store_error)?;
    for peer in 0..layout.world() {
        let left = timeout.saturating_sub(started.elapsed());
        let Ok(theirs) = store.get(&arrival_key(peer), left) else {
            return Err(missing(store, rank, layout, timeout));
        };
        if theirs != mine.as_bytes() {
            let theirs = String::from_utf8_lossy(&theirs);
            return Err(rendezvous(format!("rank {peer} has come for a world of {theirs}, this one for {mine}")));
        }
    }
    Ok(())
}

fn missing(store: &Store, rank: u32, layout: Layout, after: Duration) -> CommError {
    let mut missing = Vec::new();
    for peer in 0..layout.world() {
        match store.contains(&arrival_key(peer)) {
            Ok(true) => {}
            Ok(false) => missing.push(peer.to_string()),
            // The store itself is gone, and rank 0 with it.
            Err(source) => return connect_error(rank, "store", source),
        }
    }
    let (missing, seconds) = (missing.join(", "), after.as_secs_f64());
    CommError::Unreached(format!("rendezvous of rank {rank}: no sign of rank(s) {missing} after {seconds:.1} s"))
}

fn arrival_key(rank: u32) -> String {
    format!("arrivals/{rank}")
}

fn connect_error(rank: u32, group: &str, source: NativeError) -> CommError {
    CommError::Unreached(format!("rank {rank}, group {group}: {source}"))
}

fn open(
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
            text: "this build has no NCCL; build the CUDA variant".to_owned(),
        }),
    }
}
