//! Runs the processes and sockets of a gang (the workers of one attempt). The supervisor spawns the workers, passes
//! events to the [`Coordinator`], and carries out the coordinator's actions until all workers have ended.
//!
//! No worker outlives the launcher. The supervisor waits until all workers have ended, and kills workers that do not
//! end in time. If the supervisor itself fails, dropping it kills the workers. Each worker also asks the kernel to kill
//! it when its parent dies. The kernel does so when the thread that spawned the worker ends, so workers are spawned on
//! the main thread.
//!
//! The supervisor's thread never waits for a disk or a terminal. The observer's thread ([`GangObserver`]) writes logs,
//! events and checkpoints, and the terminal has threads of its own.

mod control;
mod faults;
mod logs;
mod node;
mod observer;
mod orphans;
mod program;
mod runtime_folder;
mod signals;
mod workers;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use locdiff_core::cgroup;
use locdiff_core::config::RunConfig;
use locdiff_core::exit_code::{ExitCode, FailureKind};
use locdiff_core::protocol::{
    Failure, Hello, Job, JobResult, MEMORY_EVENTS_VARIABLE, Meeting, ToLauncher, ToWorker, TypedResult, WorkerSlot,
};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;

use crate::cluster::{Cluster, FromCluster, FromNode, NodeFacts, NodeLoss, ToNode, WorkerEvent, WorkerSignal};
use crate::coordinator::{Action, Cause, Coordinator, GangEvent, Limits, Outcome};
use crate::error::{LaunchError, exit_code_of, reported};
use crate::output::end_process;
use crate::pulses::{PhaseLimits, StuckWorker, TICK};
use crate::rendezvous::NodeWorkers;
use crate::report::{self, EndedWorker};

pub use faults::{Injection, RandomFaults, parse as parse_fault};
pub use logs::CappedLog;
pub use node::{NodeSettings, run_node};
pub use observer::{Echo, GangObserver, Silence};

use control::{Notice, accept_worker};
use observer::{CloseOnDrop, DiskWatch, Observations};
use program::worker_path;
use runtime_folder::ControlSocket;
use signals::Signals;
pub use signals::hold_signals;
use workers::{Gang, OUTPUT_GRACE, RemoteNode, Seat, SpawnSettings, WorkerHandle, kill_running, spawn};

/// Capacity of the queue of lines and messages from the workers.
const NOTICES_MAX: usize = 1024;

/// Name of the thread that computes while the main thread waits for signals.
const COMPUTING_THREAD: &str = "computing";

/// Name of the observer's thread.
const OBSERVING_THREAD: &str = "observing";

/// How a gang ended.
struct Ended {
    result: anyhow::Result<GangResult<JobResult>>,
    /// Whether the observer has handled everything. If not, its thread is stuck.
    is_observed: bool,
}

/// The results of a gang that succeeded.
#[derive(Debug)]
pub struct GangResult<T> {
    /// The first message (hello) of each rank.
    pub hellos: Vec<Hello>,
    /// The result of each rank.
    pub results: Vec<T>,
}

impl<T> GangResult<T> {
    /// The result of rank 0.
    pub fn first(self) -> anyhow::Result<T> {
        self.results.into_iter().next().context("a gang has no workers: this is a bug")
    }
}

/// Runs gangs one after another on this thread. A signal that arrives between two gangs is not lost: it interrupts the
/// next gang.
#[derive(Debug)]
pub struct Supervisor {
    runtime: Runtime,
    signals: Signals,
    random_faults: Option<RandomFaults>,
}

impl Supervisor {
    /// Starts watching for SIGINT, SIGTERM and SIGUSR1.
    pub fn new() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("cannot start the async runtime")?;
        let within = runtime.enter();
        let signals = Signals::watch().context("cannot install signal handlers")?;
        drop(within);
        Ok(Self { runtime, signals, random_faults: None })
    }

    /// Starts the workers of `world`, gives each of them `job`, and waits for all results. `attempt` is the number of
    /// this attempt of the run. Fails if a worker returns a result that does not belong to `job`.
    pub fn run<T: TypedResult>(
        &mut self,
        config: &RunConfig,
        world: &NodeWorkers,
        job: Job,
        attempt: u32,
        observer: &mut dyn GangObserver,
    ) -> anyhow::Result<GangResult<T>> {
        self.run_with(config, world, job, attempt, observer, None)
    }

    /// Like [`Self::run`], but also passes the messages in `orders` to the first worker.
    pub fn run_with<T: TypedResult>(
        &mut self,
        config: &RunConfig,
        world: &NodeWorkers,
        job: Job,
        attempt: u32,
        observer: &mut dyn GangObserver,
        orders: Option<&mut mpsc::UnboundedReceiver<ToWorker>>,
    ) -> anyhow::Result<GangResult<T>> {
        if self.signals.code.is_some() {
            return Err(self.signals.error().into());
        }
        let supervise = &config.supervise;
        let limits = Limits {
            start: Duration::from_secs_f64(supervise.start_timeout_s),
            stop: Duration::from_secs_f64(supervise.stop_timeout_s),
            preempt: Duration::from_secs_f64(supervise.preempt_timeout_s),
            phases: PhaseLimits::new(supervise),
        };
        let meeting = Meeting {
            interface: config.network.interface.clone(),
            attempt,
            tensor_parallel: config.parallel.tensor,
            rendezvous_timeout_s: supervise.rendezvous_timeout_s,
            collective_timeout_s: supervise.collective_timeout_s,
            heartbeat_s: supervise.heartbeat_s,
        };
        self.wait_for_nodes(world)?;
        let observer_limit = Duration::from_secs_f64(supervise.checkpoint_timeout_s);
        let gang = Gang { worker: worker_path()?, world, meeting, job, limits, observer_limit };
        let GangResult { hellos, results } = match self.run_observed(&gang, observer, orders) {
            Err(error) if exit_code_of(&error) == ExitCode::Interrupted => return Err(self.signals.error().into()),
            outcome => outcome?,
        };
        let of_this_job = |(rank, result)| {
            let job = gang.job.name();
            T::try_from(result).map_err(|wrong| {
                reported!(WorkerIncompatible, "worker rank {rank} sent a wrong result for `{job}`: {wrong}")
            })
        };
        let results = results.into_iter().enumerate().map(of_this_job).collect::<Result<_, _>>()?;
        Ok(GangResult { hellos, results })
    }

    /// Runs a gang while the observer works on another thread. Ends the process if the observer is stuck, because the
    /// observer's thread cannot be stopped and may hold the run's files.
    fn run_observed(
        &mut self,
        gang: &Gang<'_>,
        observer: &mut dyn GangObserver,
        orders: Option<&mut mpsc::UnboundedReceiver<ToWorker>>,
    ) -> anyhow::Result<GangResult<JobResult>> {
        let observations = Observations::new();
        std::thread::scope(|scope| {
            let _closing = CloseOnDrop(&observations);
            let (sender, failures) = mpsc::unbounded_channel();
            let ranks = gang.world.slots.len();
            let to_observe = &observations;
            let observe = move || to_observe.serve(observer, ranks, sender);
            let thread = std::thread::Builder::new().name(OBSERVING_THREAD.into());
            thread.spawn_scoped(scope, observe).context("cannot start a thread")?;
            let (signals, random_faults) = (&mut self.signals, &mut self.random_faults);
            let ended =
                self.runtime.block_on(supervise(gang, &observations, failures, orders, signals, random_faults))?;
            if ended.is_observed {
                return ended.result;
            }
            let stuck = "the disk does not respond: some logs, events or checkpoints were not written";
            end_process(&match ended.result {
                _ if self.signals.code.is_some() => {
                    tracing::error!("{stuck}");
                    self.signals.error().into()
                }
                Ok(_) => reported!(Io, "{stuck}").into(),
                Err(error) => {
                    tracing::error!("{stuck}");
                    error
                }
            })
        })
    }

    /// Waits until all nodes are there, or those that are needed, and returns their workers. Each worker has as many
    /// threads as the first of `world`. Returns `world` if there is only one node.
    pub fn gather(&mut self, world: &NodeWorkers) -> anyhow::Result<NodeWorkers> {
        let Some(cluster) = &world.cluster else { return Ok(world.clone()) };
        Ok(world.of_nodes(&self.facts_of_nodes(cluster)?))
    }

    /// Waits until all nodes are there, or those that are needed. Returns what they say about themselves.
    pub(crate) fn facts_of_nodes(&mut self, cluster: &Cluster) -> Result<Vec<NodeFacts>, LaunchError> {
        self.unless_interrupted(cluster.gather())
    }

    /// Waits until all nodes with workers of `world` are there.
    fn wait_for_nodes(&mut self, world: &NodeWorkers) -> anyhow::Result<()> {
        let Some(cluster) = &world.cluster else { return Ok(()) };
        let others = world.other_nodes().map(|node| node.number).collect();
        let facts = self.unless_interrupted(cluster.wait_for_nodes(others))?;
        if facts.iter().any(|facts| !world.has_workers_of(facts)) {
            return Err(reported!(WorkerFailed, "a node came back with other workers")
                .with_kind(FailureKind::Lost)
                .into());
        }
        Ok(())
    }

    /// Waits for the result of `work`. Fails if the user asks to stop.
    fn unless_interrupted<T>(&mut self, work: impl Future<Output = Result<T, LaunchError>>) -> Result<T, LaunchError> {
        let signals = &mut self.signals;
        self.runtime.block_on(async {
            tokio::select! {
                found = work => found,
                () = signals.recv() => Err(signals.error()),
            }
        })
    }

    /// Makes training workers fail at random times.
    pub fn inject_at_random(&mut self, faults: RandomFaults) {
        self.random_faults = Some(faults);
    }

    /// Runs `work` on another thread and returns its result. Ctrl-C and SIGTERM make this function fail at once. They
    /// do not stop the thread, which ends with the process at the latest.
    pub fn compute<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
    ) -> anyhow::Result<T> {
        let (done, result) = oneshot::channel();
        // After an interrupt the receiver is gone, so sending fails. Ignore this error.
        let work = move || drop(done.send(work()));
        std::thread::Builder::new().name(COMPUTING_THREAD.into()).spawn(work).context("cannot start a thread")?;
        let signals = &mut self.signals;
        self.runtime.block_on(async {
            tokio::select! {
                found = result => found.context("the computing thread panicked: this is a bug")?,
                () = signals.recv() => Err(signals.error().into()),
            }
        })
    }

    /// Fails if the user has asked to stop.
    pub fn check_interrupted(&mut self) -> Result<(), LaunchError> {
        self.pause(Duration::from_millis(1))
    }

    /// Waits for the time `wait`. Fails at once if the user asks to stop, or has already asked.
    pub fn pause(&mut self, wait: Duration) -> Result<(), LaunchError> {
        let signals = &mut self.signals;
        let is_asked = async { signals.code.is_some() || tokio::time::timeout(wait, signals.recv()).await.is_ok() };
        if self.runtime.block_on(is_asked) { Err(self.signals.error()) } else { Ok(()) }
    }
}

async fn supervise(
    gang: &Gang<'_>,
    observations: &Observations,
    mut failures: mpsc::UnboundedReceiver<GangEvent>,
    mut orders: Option<&mut mpsc::UnboundedReceiver<ToWorker>>,
    signals: &mut Signals,
    random_faults: &mut Option<RandomFaults>,
) -> anyhow::Result<Ended> {
    let control = ControlSocket::bind()?;
    let oom_kills_before = oom_kills();
    let (events, mut inbox) = mpsc::channel(NOTICES_MAX);
    let (mut members, mut nodes) = begin(gang, &control, &events)?;
    let own = members.iter().enumerate().filter(|(_, member)| matches!(member.seat, Seat::Here { .. }));
    let own: Vec<(u32, usize)> = own.map(|(rank, member)| (member.pid, rank)).collect();
    let pids: Vec<u32> = own.iter().map(|(pid, _)| *pid).collect();
    let mut is_out_of_memory = false;
    let adopts_orphans = orphans::adopts_orphans();
    let began = Instant::now();
    let mut coordinator = Coordinator::new(members.len(), gang.meeting.attempt, gang.limits, Duration::ZERO);
    let (mut ended_at, mut interrupts) = (None, 0);
    let (mut disk, mut is_disk_stuck) = (DiskWatch::new(), false);
    let (mut newcomers, mut has_signal) = (BTreeSet::new(), false);
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let outcome = loop {
        if let Some(outcome) = coordinator.outcome() {
            let since = ended_at.get_or_insert_with(Instant::now).elapsed();
            if members.iter().all(WorkerHandle::is_drained) || since >= OUTPUT_GRACE {
                break outcome;
            }
        }
        let deadline = match ended_at {
            Some(_) => Duration::from_millis(50),
            None => coordinator.deadline().map_or(Duration::MAX, |at| at.saturating_sub(began.elapsed())),
        };
        let event = tokio::select! {
            Some(notice) = inbox.recv() => match handle_notice(notice, &mut members, observations) {
                Some(event) => event,
                None => continue,
            },
            Some(failure) = failures.recv() => failure,
            news = nodes.next() => match handle_node(news, &mut members, observations) {
                Some(NodeNews::Event(event)) => event,
                Some(NodeNews::Exited { event, is_out_of_memory: by_kernel }) => {
                    is_out_of_memory |= by_kernel;
                    event
                }
                Some(NodeNews::Interrupted(code)) if signals.note(code) => {
                    interrupts += 1;
                    interrupt(gang, &members, control.folder())
                }
                Some(NodeNews::Interrupted(_)) => continue,
                Some(NodeNews::Joined(node)) => {
                    newcomers.insert(node);
                    continue;
                }
                None => continue,
            },
            Some(order) = next_order(&mut orders) => {
                members.iter().take(1).for_each(|member| member.send(order.clone()));
                continue;
            }
            connection = control.listener.accept() => {
                let (stream, _) = connection.context("cannot accept a connection on the control socket")?;
                accept_worker(stream, &own, &events);
                continue;
            }
            () = signals.recv() => {
                let is_first = !std::mem::replace(&mut has_signal, true);
                if is_first && interrupts > 0 {
                    // A scheduler signals all nodes, and the request has arrived through another node already.
                    continue;
                }
                interrupts += 1;
                interrupt(gang, &members, control.folder())
            }
            () = tokio::time::sleep(deadline) => GangEvent::Tick,
            _ = ticks.tick() => {
                if adopts_orphans {
                    orphans::collect(&pids);
                }
                if !is_disk_stuck && disk.is_stuck(observations, gang.observer_limit) {
                    is_disk_stuck = true;
                    GangEvent::ObserverFailed(disk_failure(gang.observer_limit))
                } else if !newcomers.is_empty() && has_progress(gang, &members, control.folder()) {
                    let names: Vec<String> = std::mem::take(&mut newcomers).iter().map(u32::to_string).collect();
                    tracing::info!("stopping at a checkpoint, so that node(s) {} can take part", names.join(", "));
                    GangEvent::Regroup
                } else {
                    GangEvent::Tick
                }
            }
        };
        if let Some(fault) = random_faults.as_mut().and_then(|faults| faults.due(members.len()))
            && members[fault.rank as usize].step(fault.rank, control.folder()).unwrap_or(0) > 0
        {
            members[fault.rank as usize].send(ToWorker::Inject(fault));
        }
        match &event {
            GangEvent::Message { rank, message: ToLauncher::Beat(beat) } => {
                observations.beat(*rank as usize, beat.clone());
            }
            GangEvent::Beats(beats) => {
                beats.iter().for_each(|(rank, beat)| observations.beat(*rank as usize, beat.clone()));
            }
            _ => {}
        }
        for action in coordinator.step(event, began.elapsed()) {
            carry_out(action, gang, &mut members, observations);
        }
    };
    observations.close();
    let interrupts_before = interrupts;
    // If a signal asked the run to stop, do not wait long for a hung disk: at most the time that workers may take to
    // stop, plus a second.
    let preempt_limit = gang.limits.preempt + OUTPUT_GRACE;
    let limit = match interrupts {
        _ if is_disk_stuck => OUTPUT_GRACE,
        0 => gang.observer_limit,
        _ => gang.observer_limit.min(preempt_limit),
    };
    let observed = wait_for_observer(limit, &mut failures, signals, &mut interrupts).await;
    let outcome = match (outcome, &observed) {
        (Outcome::Done(_), Some(Some(failure))) => Outcome::Failed(vec![Cause::ObserverFailed(failure.clone())]),
        (Outcome::Done(_), _) if interrupts > interrupts_before => Outcome::Failed(vec![Cause::Interrupted]),
        (outcome, _) => outcome,
    };
    let result = match outcome {
        Outcome::Done(results) => Ok(GangResult { hellos: coordinator.hellos(), results }),
        Outcome::Failed(mut causes) => {
            // The last heartbeats may be many steps old, so read the step of each worker from its step file.
            for cause in &mut causes {
                if let Cause::Stuck { worker: StuckWorker { rank, last: Some(beat), .. }, .. } = cause {
                    beat.step = members[*rank as usize].step(*rank, control.folder()).unwrap_or(beat.step);
                }
            }
            let workers = members.into_iter().zip(&gang.world.slots).enumerate().map(|(rank, (member, slot))| {
                let (mut last_beat, exit) = coordinator.end_of(rank);
                if let (Some(beat), Some(step)) = (&mut last_beat, member.step(rank as u32, control.folder())) {
                    beat.step = step;
                }
                let (host, node) = (member.host(), slot.node);
                let (pid, last_lines) = (member.pid, member.last_lines.into());
                EndedWorker { host, node, pid, gpu: slot.gpu, last_beat, exit, last_lines }
            });
            let oom_killed = is_out_of_memory || oom_kills() > oom_kills_before;
            Err(report::failure(gang.job.name(), &causes, &workers.collect::<Vec<_>>(), oom_killed).into())
        }
    };
    let report = result.as_ref().err().map(anyhow::Error::to_string).unwrap_or_default();
    observations.show_errors(&report, gang.world.slots.len());
    Ok(Ended { result, is_observed: observed.is_some() })
}

/// The other nodes of a gang. When this value is dropped, they kill the workers that are still running.
struct GangNodes {
    attached: Option<(Arc<Cluster>, mpsc::Receiver<FromCluster>)>,
    gang: u64,
    nodes: Vec<u32>,
}

impl GangNodes {
    /// What a node reports. Waits forever if there are no other nodes.
    async fn next(&mut self) -> FromCluster {
        let Some((_, news)) = &mut self.attached else { return std::future::pending().await };
        match news.recv().await {
            Some(news) => news,
            None => std::future::pending().await,
        }
    }
}

impl Drop for GangNodes {
    fn drop(&mut self) {
        if let Some((cluster, _)) = &self.attached {
            cluster.detach();
            // Usually, all workers have ended.
            self.nodes.iter().for_each(|node| cluster.send(*node, ToNode::Kill { gang: self.gang }));
        }
    }
}

/// Starts the workers of this machine, and asks the other nodes to start theirs.
fn begin(
    gang: &Gang<'_>,
    control: &ControlSocket,
    events: &mpsc::Sender<Notice>,
) -> anyhow::Result<(Vec<WorkerHandle>, GangNodes)> {
    let (world, mut number) = (gang.world, 0);
    let mut nodes = GangNodes { attached: None, gang: 0, nodes: Vec::new() };
    if let Some(cluster) = &world.cluster {
        let (from_nodes, news) = mpsc::channel(NOTICES_MAX);
        number = cluster.attach(world.other_nodes().map(|node| node.number).collect(), from_nodes);
        for node in world.other_nodes() {
            let slots = world.slots.iter().filter(|slot| slot.node == node.number).cloned().collect();
            let (share_gpu, interface) = (world.share_gpu, node.interface.clone());
            cluster.send(node.number, ToNode::Begin { gang: number, slots, share_gpu, interface });
        }
        let others = world.other_nodes().map(|node| node.number).collect();
        nodes = GangNodes { attached: Some((Arc::clone(cluster), news)), gang: number, nodes: others };
    }
    let own_interface = world.slots.iter().find(|slot| slot.node == 0).and_then(|slot| world.interface_of(slot));
    let interface = own_interface.unwrap_or(&gang.meeting.interface);
    let settings = SpawnSettings { worker: &gang.worker, interface, share_gpu: world.share_gpu };
    let start = |slot: &WorkerSlot| match (&nodes.attached, world.node(slot.node)) {
        (Some((cluster, _)), Some(node)) if slot.node > 0 => {
            let (cluster, host) = (Arc::clone(cluster), node.host.clone());
            let node = RemoteNode { cluster, gang: number, number: slot.node, host };
            Ok(WorkerHandle::elsewhere(slot.rank, node))
        }
        _ => spawn(&settings, slot, control, events),
    };
    let members = world.slots.iter().map(start).collect::<anyhow::Result<_>>()?;
    Ok((members, nodes))
}

/// The event of a request to stop.
fn interrupt(gang: &Gang<'_>, members: &[WorkerHandle], folder: &Path) -> GangEvent {
    GangEvent::Interrupted { has_progress: has_progress(gang, members, folder) }
}

/// Whether the gang can stop early, and has begun a step.
fn has_progress(gang: &Gang<'_>, members: &[WorkerHandle], folder: &Path) -> bool {
    let has_begun = |(rank, member): (u32, &WorkerHandle)| member.step(rank, folder).unwrap_or(0) > 0;
    matches!(gang.job, Job::Train(_)) && (0..).zip(members).any(has_begun)
}

/// What the supervisor does about the news from a node.
enum NodeNews {
    Event(GangEvent),
    Exited { event: GangEvent, is_out_of_memory: bool },
    Interrupted(ExitCode),
    Joined(u32),
}

/// Updates `members`, and informs the observer. Returns what else is to be done.
fn handle_node(news: FromCluster, members: &mut [WorkerHandle], observations: &Observations) -> Option<NodeNews> {
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
        FromNode::Proof(_) => return None,
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

/// The next message for the first worker. Waits forever if there is no queue of such messages.
async fn next_order(orders: &mut Option<&mut mpsc::UnboundedReceiver<ToWorker>>) -> Option<ToWorker> {
    match orders {
        Some(orders) => orders.recv().await,
        None => std::future::pending().await,
    }
}

/// The failure of a gang whose logs, events or checkpoints cannot be written within `limit`.
fn disk_failure(limit: Duration) -> Failure {
    let limit_s = limit.as_secs_f64();
    let message = format!(
        "the disk has not responded for {limit_s} s, the limit of supervise.checkpoint_timeout_s; check the disk"
    );
    Failure { message, of_peer: false, exit_code: ExitCode::Io.code(), kind: FailureKind::Final }
}

/// Number of processes that the OOM killer has killed so far in this process's cgroup; `None` if it is unknown.
fn oom_kills() -> Option<u64> {
    match std::env::var_os(MEMORY_EVENTS_VARIABLE) {
        Some(made_up) => cgroup::oom_kills_in(Path::new(&made_up)),
        None => cgroup::oom_kills(Path::new("/")),
    }
}

/// Waits until the observer has handled everything. Returns `None` if that takes longer than `limit`. Otherwise returns
/// `Some(Some(failure))` for the first failure of the observer since the gang ended, or `Some(None)` without a failure.
/// Once two signals have arrived, the limit is [`OUTPUT_GRACE`] at most.
async fn wait_for_observer(
    limit: Duration,
    failures: &mut mpsc::UnboundedReceiver<GangEvent>,
    signals: &mut Signals,
    interrupts: &mut u32,
) -> Option<Option<Failure>> {
    let ended = Instant::now();
    let mut first = None;
    loop {
        let limit = if *interrupts > 1 { limit.min(OUTPUT_GRACE) } else { limit };
        tokio::select! {
            event = failures.recv() => match event {
                Some(GangEvent::ObserverFailed(failure)) => drop(first.get_or_insert(failure)),
                Some(_) => {}
                None => return Some(first),
            },
            () = signals.recv() => {
                *interrupts += 1;
                tracing::warn!("waiting until logs and checkpoints are written; interrupt again to end at once");
            }
            () = tokio::time::sleep(limit.saturating_sub(ended.elapsed())) => return None,
        }
    }
}

/// Updates `members` and informs the observer. If the notice contains an event for the coordinator, returns the event.
fn handle_notice(notice: Notice, members: &mut [WorkerHandle], observations: &Observations) -> Option<GangEvent> {
    match notice {
        Notice::Line { rank, line } => {
            members[rank].keep_line(line.clone());
            observations.line(rank, line);
            None
        }
        Notice::OutputEnded { rank } => {
            members[rank].open_outputs -= 1;
            None
        }
        Notice::Connected { rank, replies } => {
            members[rank].seat = Seat::Here { replies: Some(replies) };
            None
        }
        Notice::Happened(event) => {
            if let GangEvent::Exited { rank, .. } = event {
                let member = &mut members[rank as usize];
                member.running = false;
                // Kill the processes that the worker started. They must not outlive the worker or keep its pipes open.
                member.signal(WorkerSignal::Kill);
            }
            Some(event)
        }
    }
}

/// Carries out an action of the coordinator. A commit runs on the observer's thread, which sends an event if the commit
/// fails.
fn carry_out(action: Action, gang: &Gang<'_>, members: &mut [WorkerHandle], observations: &Observations) {
    match action {
        Action::Report(message) => observations.report(message),
        Action::Commit(parts) => observations.commit(parts),
        Action::StartAll => {
            for (member, slot) in members.iter().zip(&gang.world.slots) {
                let interface = gang.world.interface_of(slot).unwrap_or(&gang.meeting.interface).to_owned();
                let meeting = Meeting { interface, ..gang.meeting.clone() };
                member.send(ToWorker::Start { place: slot.clone(), meeting, job: gang.job.clone() });
            }
        }
        Action::Answer { rank, reply } => members[rank as usize].send(ToWorker::Stored(reply)),
        Action::AskToStop => members.iter().for_each(|member| member.send(ToWorker::Stop)),
        Action::AskForBacktrace(rank) => members[rank as usize].signal(WorkerSignal::Backtrace),
        Action::Kill => kill_running(members.iter()),
        Action::KillOne(rank) => kill_running(&members[rank as usize..=rank as usize]),
    }
}
