//! Spawns the processes of a gang, waits for them and sends them signals.

use std::collections::VecDeque;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use locdiff_core::protocol::{CONTROL_VARIABLE, Job, LAUNCHER_PID_VARIABLE, Meeting, ToWorker, WorkerSlot};
use locdiff_core::pulse;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::sync::mpsc;

use super::control::{Notice, read_lines};
use super::program::spawn_error;
use super::runtime_folder::ControlSocket;
use crate::cluster::{Cluster, TOKEN_VARIABLE, ToNode, WorkerSignal};
use crate::coordinator::{Exit, GangEvent, Limits};
use crate::gpus;
use crate::rendezvous::NodeWorkers;
use crate::run_folder::host;

/// Largest number of lines of a worker's output that an error report quotes.
const LAST_LINES_MAX: usize = 32;

/// How long to wait for remaining output and messages after a worker has ended. A process that the worker started may
/// hold the worker's pipes and socket open forever.
pub(super) const OUTPUT_GRACE: Duration = Duration::from_secs(1);

/// Settings of glibc's `malloc`, in bytes: a worker keeps the memory of freed tensors and uses it again. By default, glibc
/// returns much of it to the kernel, and each training step on the CPU waits for hundreds of page faults. 32 MiB is the
/// largest threshold that glibc accepts; larger blocks are always returned.
const KEEP_FREED_MEMORY: [(&str, &str); 2] =
    [("MALLOC_MMAP_THRESHOLD_", "33554432"), ("MALLOC_TRIM_THRESHOLD_", "1099511627776")];

/// A gang to run: the workers of one attempt.
pub(super) struct Gang<'a> {
    /// Path of the worker program.
    pub(super) worker: PathBuf,
    /// Rank and device of each worker.
    pub(super) world: &'a NodeWorkers,
    /// How the workers connect to each other.
    pub(super) meeting: Meeting,
    /// The job that every worker gets.
    pub(super) job: Job,
    /// Time limits.
    pub(super) limits: Limits,
    /// How long the observer may work on one item, and how long it may take to finish after the gang has ended.
    pub(super) observer_limit: Duration,
}

/// A worker of a gang.
pub(super) struct WorkerHandle {
    /// The worker's process id on its machine; 0 if it is not known yet.
    pub(super) pid: u32,
    pub(super) seat: Seat,
    pub(super) running: bool,
    pub(super) open_outputs: usize,
    pub(super) last_lines: VecDeque<String>,
}

/// Where a worker runs.
pub(super) enum Seat {
    /// On this machine.
    Here {
        /// The queue of messages to the worker; `None` until it connects.
        replies: Option<mpsc::UnboundedSender<ToWorker>>,
    },
    /// On another node.
    There {
        rank: u32,
        node: RemoteNode,
        /// The step that the worker has begun.
        step: u64,
    },
}

/// Another node of a gang.
#[derive(Clone)]
pub(super) struct RemoteNode {
    pub(super) cluster: Arc<Cluster>,
    pub(super) gang: u64,
    pub(super) number: u32,
    pub(super) host: String,
}

impl WorkerHandle {
    fn new(pid: u32, seat: Seat) -> Self {
        Self { pid, seat, running: true, open_outputs: 2, last_lines: VecDeque::new() }
    }

    /// A worker that another node starts.
    pub(super) fn elsewhere(rank: u32, node: RemoteNode) -> Self {
        Self::new(0, Seat::There { rank, node, step: 0 })
    }

    /// Keeps a line of the worker's output for an error report.
    pub(super) fn keep_line(&mut self, line: String) {
        self.last_lines.push_back(line);
        if self.last_lines.len() > LAST_LINES_MAX {
            self.last_lines.pop_front();
        }
    }

    /// Whether the worker belongs to another node with this number.
    pub(super) fn is_of(&self, number: u32) -> bool {
        matches!(&self.seat, Seat::There { node, .. } if node.number == number)
    }

    /// Name of the worker's machine.
    pub(super) fn host(&self) -> String {
        match &self.seat {
            Seat::Here { .. } => host(),
            Seat::There { node, .. } => node.host.clone(),
        }
    }

    /// Records the step that a worker of another node has begun.
    pub(super) fn set_step(&mut self, begun: u64) {
        if let Seat::There { step, .. } = &mut self.seat {
            *step = begun;
        }
    }

    /// Sends a message to the worker. The message is dropped if the worker has not connected yet or has closed its
    /// socket. In the second case, the worker's exit status will show the reason.
    pub(super) fn send(&self, message: ToWorker) {
        match &self.seat {
            Seat::Here { replies: Some(replies) } => drop(replies.send(with_own_gpu(message))),
            Seat::Here { replies: None } => {}
            Seat::There { rank, node, .. } => {
                node.cluster.send(node.number, ToNode::Deliver { gang: node.gang, rank: *rank, message });
            }
        }
    }

    /// Sends a signal to the worker. SIGKILL also goes to the processes that it has started.
    pub(super) fn signal(&self, signal: WorkerSignal) {
        match &self.seat {
            Seat::Here { .. } => send_signal(self.pid, signal.number()),
            Seat::There { rank, node, .. } => {
                node.cluster.send(node.number, ToNode::Signal { gang: node.gang, rank: *rank, signal });
            }
        }
    }

    /// The step that the worker of this rank has begun. `folder` is the folder of the control socket.
    pub(super) fn step(&self, rank: u32, folder: &Path) -> Option<u64> {
        match &self.seat {
            Seat::Here { .. } => pulse::read_step(folder, rank),
            Seat::There { step, .. } => Some(*step),
        }
    }

    /// Whether the process has ended and all its output has been read.
    pub(super) fn is_drained(&self) -> bool {
        !self.running && self.open_outputs == 0
    }
}

/// A worker that was given a part of a GPU (a MIG instance) sees only this part, as GPU 0.
fn with_own_gpu(mut message: ToWorker) -> ToWorker {
    if let ToWorker::Start { place, .. } = &mut message
        && place.gpu.and_then(gpus::own_instance).is_some()
    {
        place.gpu = Some(0);
    }
    message
}

/// What the workers of one machine have in common.
pub(super) struct SpawnSettings<'a> {
    /// Path of the worker program.
    pub(super) worker: &'a Path,
    /// Network interface that NCCL uses; "": loopback.
    pub(super) interface: &'a str,
    /// Whether several workers share a GPU.
    pub(super) share_gpu: bool,
}

/// Starts a worker on this machine.
pub(super) fn spawn(
    settings: &SpawnSettings<'_>,
    slot: &WorkerSlot,
    control: &ControlSocket,
    events: &mpsc::Sender<Notice>,
) -> anyhow::Result<WorkerHandle> {
    let rank = slot.rank as usize;
    // On an error, the launcher drops the runtime and with it the children that were already spawned. Dropping a child
    // kills it.
    let spawned = command(settings, slot, &control.path()).spawn();
    let mut child = spawned.map_err(|error| spawn_error(settings.worker, error))?;
    let pid = child.id().context("a worker that was just spawned has no process id: this is a bug")?;
    let stdout = child.stdout.take().context("the stdout of a worker is not a pipe: this is a bug")?;
    let stderr = child.stderr.take().context("the stderr of a worker is not a pipe: this is a bug")?;
    tokio::spawn(read_lines(rank, stdout, events.clone()));
    tokio::spawn(read_lines(rank, stderr, events.clone()));
    tokio::spawn(wait(rank, child, events.clone()));
    Ok(WorkerHandle::new(pid, Seat::Here { replies: None }))
}

fn command(settings: &SpawnSettings<'_>, slot: &WorkerSlot, control: &Path) -> Command {
    let mut command = Command::new(settings.worker);
    command
        .env(CONTROL_VARIABLE, control)
        .env(LAUNCHER_PID_VARIABLE, std::process::id().to_string())
        .env("RANK", slot.rank.to_string())
        .env("WORLD_SIZE", slot.world.to_string())
        .env_remove(TOKEN_VARIABLE)
        .env("LOCAL_RANK", slot.local_rank.to_string())
        .env("OMP_NUM_THREADS", slot.threads.to_string())
        // Make CUDA number the GPUs in the order of the PCI bus, as NVML does. By default, CUDA puts the fastest GPU
        // first.
        .env("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        // Keep libtorch's profiler from logging an error on machines without a GPU.
        .env("KINETO_LOG_LEVEL", "99")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // A worker in its own process group does not receive Ctrl-C from the terminal. The launcher receives Ctrl-C and
        // stops the workers.
        .process_group(0)
        .kill_on_drop(true);
    for (name, value) in KEEP_FREED_MEMORY.iter().filter(|(name, _)| std::env::var_os(name).is_none()) {
        command.env(name, value);
    }
    if slot.gpu.is_some() && std::env::var_os("NCCL_SOCKET_IFNAME").is_none() {
        let interfaces = match settings.interface {
            "" | "lo" => "lo".to_owned(),
            // Without "=", NCCL takes every interface whose name begins like this.
            other => format!("={other}"),
        };
        command.env("NCCL_SOCKET_IFNAME", interfaces);
    }
    let own_instance = slot.gpu.and_then(gpus::own_instance);
    if let Some(instance) = &own_instance {
        command.env("CUDA_VISIBLE_DEVICES", instance);
    }
    // NCCL refuses two ranks on the same GPU of a host, and the MIG instances of a GPU count as one GPU. With a host id
    // of its own, each rank seems to be on a separate host.
    if (settings.share_gpu || own_instance.is_some()) && std::env::var_os("NCCL_HOSTID").is_none() {
        command.env("NCCL_HOSTID", format!("locdiff-{}-{}", std::process::id(), slot.rank));
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
    let _ = events.send(Notice::Happened(GangEvent::Exited { rank, exit })).await;
    // The socket usually closes when the process ends. If another process holds the socket open, report the socket as
    // closed nevertheless.
    tokio::time::sleep(OUTPUT_GRACE).await;
    let _ = events.send(Notice::Happened(GangEvent::Closed(rank))).await;
}

pub(super) fn kill_running<'a>(members: impl IntoIterator<Item = &'a WorkerHandle>) {
    members.into_iter().filter(|member| member.running).for_each(|member| member.signal(WorkerSignal::Kill));
}

/// Sends a signal to the process group of a worker, that is, to the worker and the processes that it started. It is not
/// an error if all of them have ended.
fn send_signal(pid: u32, signal: Signal) {
    if let Ok(group) = i32::try_from(pid) {
        let _ = killpg(Pid::from_raw(group), signal);
    }
}
