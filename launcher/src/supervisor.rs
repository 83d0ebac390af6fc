//! Runs the processes and sockets of a gang (the workers of one attempt). The supervisor spawns the workers, passes
//! events to the coordinator, and carries out the coordinator's actions until all workers have ended.
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
mod gang_nodes;
mod gang_run;
mod logs;
mod node;
mod observer;
mod orphans;
mod program;
mod runtime_folder;
mod signals;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use locdiff_core::config::RunConfig;
use locdiff_core::exit_code::{ExitCode, FailureKind};
use locdiff_core::protocol::{Job, JobResult, Meeting, ToWorker, TypedResult};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};

use crate::cluster::{Cluster, NodeFacts};
use crate::coordinator::Limits;
use crate::error::{LaunchError, exit_code_of, reported};
use crate::output::end_process;
use crate::pulses::PhaseLimits;
use crate::rendezvous::NodeWorkers;

pub use faults::{Injection, RandomFaults, parse as parse_fault};
pub use gang_run::GangResult;
pub use logs::CappedLog;
pub use node::{NodeSettings, run_node};
pub use observer::{Echo, GangObserver, Silence};

use gang_run::{GangRun, Sources};
use observer::{CloseOnDrop, Observations};
use program::worker_path;
use signals::Signals;
pub use signals::hold_signals;
use workers::{Gang, OUTPUT_GRACE};

/// Name of the thread that computes while the main thread waits for signals.
const COMPUTING_THREAD: &str = "computing";

/// How long to wait for a worker to end after SIGKILL. The kernel may need seconds to free the memory of a GPU.
const KILL_PATIENCE: Duration = Duration::from_secs(30);

/// Name of the observer's thread.
const OBSERVING_THREAD: &str = "observing";

/// Runs gangs one after another on this thread. A signal that arrives between two gangs is not lost: it interrupts the
/// next gang.
#[derive(Debug)]
pub struct Supervisor {
    runtime: Runtime,
    signals: Signals,
    /// The other nodes of the last gang; they pass on requests to stop.
    cluster: Option<Arc<Cluster>>,
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
        Ok(Self { runtime, signals, cluster: None, random_faults: None })
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
            kill: match &world.cluster {
                // A worker of a node that is cut off ends for node 0 when the node counts as lost.
                Some(_) => KILL_PATIENCE.max(Duration::from_secs_f64(supervise.node_timeout_s) + OUTPUT_GRACE),
                None => KILL_PATIENCE,
            },
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
        self.cluster.clone_from(&world.cluster);
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
            let sources = Sources { failures, orders, signals, random_faults };
            let ended =
                self.runtime.block_on(async { GangRun::begin(gang, &observations, sources)?.finish().await })?;
            if ended.is_observed {
                return ended.result;
            }
            let stuck = "the disk does not respond: some logs, events or checkpoints were not written";
            let error = match ended.result {
                _ if self.signals.code.is_some() => {
                    tracing::error!("{stuck}");
                    self.signals.error().into()
                }
                Ok(_) => reported!(Io, "{stuck}").into(),
                Err(error) => {
                    tracing::error!("{stuck}");
                    error
                }
            };
            if let Some(cluster) = &gang.world.cluster {
                cluster.end(exit_code_of(&error), &format!("{error:#}"));
            }
            end_process(&error)
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
        let (signals, cluster) = (&mut self.signals, self.cluster.as_deref());
        self.runtime.block_on(async {
            tokio::select! {
                found = result => found.context("the computing thread panicked: this is a bug")?,
                error = request_to_stop(signals, cluster) => Err(error.into()),
            }
        })
    }

    /// Fails if the user has asked to stop.
    pub fn check_interrupted(&mut self) -> Result<(), LaunchError> {
        self.pause(Duration::from_millis(1))
    }

    /// Waits for the time `wait`. Fails at once if the user asks to stop, or has already asked.
    pub fn pause(&mut self, wait: Duration) -> Result<(), LaunchError> {
        if self.signals.code.is_some() {
            return Err(self.signals.error());
        }
        let asked = request_to_stop(&mut self.signals, self.cluster.as_deref());
        self.runtime.block_on(async { tokio::time::timeout(wait, asked).await }).map_or(Ok(()), Err)
    }
}

/// Waits until the user or a scheduler asks to stop, at this node or another one. Returns the error of the command.
async fn request_to_stop(signals: &mut Signals, cluster: Option<&Cluster>) -> LaunchError {
    let elsewhere = async {
        match cluster {
            Some(cluster) => cluster.interrupted().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = signals.recv() => {}
        code = elsewhere => drop(signals.note(code)),
    }
    signals.error()
}
