//! Runs a gang: waits for events, passes them to the [`Coordinator`], and carries out its actions until all workers have
//! ended.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use locdiff_core::cgroup;
use locdiff_core::exit_code::{ExitCode, FailureKind};
use locdiff_core::protocol::{
    Failure, Hello, Job, JobResult, MEMORY_EVENTS_VARIABLE, Meeting, ToLauncher, ToWorker, WorkerSlot,
};
use tokio::sync::mpsc;
use tokio::time::{Interval, MissedTickBehavior};

use super::control::{NOTICES_MAX, Notice, accept_worker};
use super::faults::RandomFaults;
use super::gang_nodes::{GangNodes, NodeNews, handle_node};
use super::observer::{DiskWatch, Observations};
use super::orphans;
use super::runtime_folder::ControlSocket;
use super::signals::Signals;
use super::workers::{Gang, OUTPUT_GRACE, Seat, SpawnSettings, WorkerHandle, kill_running, spawn};
use crate::cluster::WorkerSignal;
use crate::coordinator::{Action, Cause, Coordinator, GangEvent, Outcome};
use crate::pulses::{StuckWorker, TICK};
use crate::report::{self, EndedWorker};

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

/// How a gang ended.
pub(super) struct Ended {
    pub(super) result: anyhow::Result<GangResult<JobResult>>,
    /// Whether the observer has handled everything. If not, its thread is stuck.
    pub(super) is_observed: bool,
}

/// Where a running gang gets its events from, besides its workers.
pub(super) struct Sources<'a> {
    /// Failures of the observer.
    pub(super) failures: mpsc::UnboundedReceiver<GangEvent>,
    /// Messages for the first worker.
    pub(super) orders: Option<&'a mut mpsc::UnboundedReceiver<ToWorker>>,
    pub(super) signals: &'a mut Signals,
    pub(super) random_faults: &'a mut Option<RandomFaults>,
}

/// A running gang.
pub(super) struct GangRun<'a> {
    gang: &'a Gang<'a>,
    observations: &'a Observations,
    sources: Sources<'a>,
    control: ControlSocket,
    /// The queue of what workers on this machine do; `events` is its other end.
    inbox: mpsc::Receiver<Notice>,
    events: mpsc::Sender<Notice>,
    members: Vec<WorkerHandle>,
    nodes: Option<GangNodes>,
    /// The process ids and ranks of the workers on this machine.
    own: Vec<(u32, usize)>,
    coordinator: Coordinator,
    began: Instant,
    /// When the coordinator first knew the outcome.
    ended_at: Option<Instant>,
    ticks: Interval,
    adopts_orphans: bool,
    oom_kills_before: Option<u64>,
    /// Whether the kernel of another node has killed a worker for lack of memory.
    is_out_of_memory: bool,
    disk: DiskWatch,
    is_disk_stuck: bool,
    /// Number of requests to stop.
    interrupts: u32,
    /// Nodes that have joined and are not in the gang.
    newcomers: BTreeSet<u32>,
}

impl<'a> GangRun<'a> {
    /// Starts the workers of this machine, and asks the other nodes to start theirs.
    pub(super) fn begin(
        gang: &'a Gang<'a>,
        observations: &'a Observations,
        sources: Sources<'a>,
    ) -> anyhow::Result<Self> {
        let (control, oom_kills_before) = (ControlSocket::bind()?, oom_kills());
        let (events, inbox) = mpsc::channel(NOTICES_MAX);
        let world = gang.world;
        let nodes = GangNodes::begin(world);
        let own_interface = world.slots.iter().find(|slot| slot.node == 0).and_then(|slot| world.interface_of(slot));
        let interface = own_interface.unwrap_or(&gang.meeting.interface);
        let settings = SpawnSettings { worker: &gang.worker, interface, share_gpu: world.share_gpu };
        let start = |slot: &WorkerSlot| match nodes.as_ref().and_then(|nodes| nodes.worker(world, slot)) {
            Some(elsewhere) => Ok(elsewhere),
            None => spawn(&settings, slot, &control, &events),
        };
        let members: Vec<WorkerHandle> = world.slots.iter().map(start).collect::<anyhow::Result<_>>()?;
        let own = members.iter().enumerate().filter(|(_, member)| matches!(member.seat, Seat::Here { .. }));
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Ok(Self {
            own: own.map(|(rank, member)| (member.pid, rank)).collect(),
            coordinator: Coordinator::new(members.len(), gang.meeting.attempt, gang.limits, Duration::ZERO),
            gang,
            observations,
            sources,
            control,
            inbox,
            events,
            members,
            nodes,
            began: Instant::now(),
            ended_at: None,
            ticks,
            adopts_orphans: orphans::adopts_orphans(),
            oom_kills_before,
            is_out_of_memory: false,
            disk: DiskWatch::new(),
            is_disk_stuck: false,
            interrupts: 0,
            newcomers: BTreeSet::new(),
        })
    }

    /// Runs the gang to its end.
    pub(super) async fn finish(mut self) -> anyhow::Result<Ended> {
        let outcome = loop {
            if let Some(outcome) = self.coordinator.outcome() {
                let since = self.ended_at.get_or_insert_with(Instant::now).elapsed();
                if self.members.iter().all(WorkerHandle::is_drained) || since >= OUTPUT_GRACE {
                    break outcome;
                }
            }
            if let Some(event) = self.next_event().await? {
                self.handle(event);
            }
        };
        self.observations.close();
        let interrupts_before = self.interrupts;
        let observed = self.wait_for_observer().await;
        let outcome = match (outcome, &observed) {
            (Outcome::Done(_), Some(Some(failure))) => Outcome::Failed(vec![Cause::ObserverFailed(failure.clone())]),
            (Outcome::Done(_), _) if self.interrupts > interrupts_before => Outcome::Failed(vec![Cause::Interrupted]),
            (outcome, _) => outcome,
        };
        let (observations, ranks) = (self.observations, self.gang.world.slots.len());
        let result = match outcome {
            Outcome::Done(results) => Ok(GangResult { hellos: self.coordinator.hellos(), results }),
            Outcome::Failed(causes) => Err(self.failure(causes)),
        };
        let report = result.as_ref().err().map(anyhow::Error::to_string).unwrap_or_default();
        observations.show_errors(&report, ranks);
        Ok(Ended { result, is_observed: observed.is_some() })
    }

    /// Waits until something happens. Returns `None` if it does not concern the coordinator.
    async fn next_event(&mut self) -> anyhow::Result<Option<GangEvent>> {
        let deadline = match self.ended_at {
            Some(_) => Duration::from_millis(50),
            None => self.coordinator.deadline().map_or(Duration::MAX, |at| at.saturating_sub(self.began.elapsed())),
        };
        Ok(tokio::select! {
            Some(notice) = self.inbox.recv() => handle_notice(notice, &mut self.members, self.observations),
            Some(failure) = self.sources.failures.recv() => Some(failure),
            news = GangNodes::next(&mut self.nodes) => {
                let news = handle_node(news, &mut self.members, self.observations);
                news.and_then(|news| self.event_of_node(news))
            }
            Some(order) = next_order(&mut self.sources.orders) => {
                self.members.iter().take(1).for_each(|member| member.send(order.clone()));
                None
            }
            connection = self.control.listener.accept() => {
                let (stream, _) = connection.context("cannot accept a connection on the control socket")?;
                accept_worker(stream, &self.own, &self.events);
                None
            }
            () = self.sources.signals.recv() => Some(self.interrupt()),
            () = tokio::time::sleep(deadline) => Some(GangEvent::Tick),
            _ = self.ticks.tick() => Some(self.event_of_tick()),
        })
    }

    fn event_of_node(&mut self, news: NodeNews) -> Option<GangEvent> {
        match news {
            NodeNews::Event(event) => Some(event),
            NodeNews::Exited { event, is_out_of_memory } => {
                self.is_out_of_memory |= is_out_of_memory;
                Some(event)
            }
            NodeNews::Interrupted(code) => self.sources.signals.note(code).then(|| self.interrupt()),
            NodeNews::Joined(node) => {
                self.newcomers.insert(node);
                None
            }
        }
    }

    fn event_of_tick(&mut self) -> GangEvent {
        if self.adopts_orphans {
            orphans::collect(&self.own.iter().map(|(pid, _)| *pid).collect::<Vec<u32>>());
        }
        if !self.is_disk_stuck && self.disk.is_stuck(self.observations, self.gang.observer_limit) {
            self.is_disk_stuck = true;
            GangEvent::ObserverFailed(disk_failure(self.gang.observer_limit))
        } else if !self.newcomers.is_empty() && self.has_progress() {
            let names: Vec<String> = std::mem::take(&mut self.newcomers).iter().map(u32::to_string).collect();
            tracing::info!("stopping at a checkpoint, so that node(s) {} can take part", names.join(", "));
            GangEvent::Regroup
        } else {
            GangEvent::Tick
        }
    }

    /// Counts a request to stop, and returns its event.
    fn interrupt(&mut self) -> GangEvent {
        self.interrupts += 1;
        GangEvent::Interrupted { has_progress: self.has_progress() }
    }

    /// Whether the gang can stop early, and has begun a step.
    fn has_progress(&self) -> bool {
        let has_begun = |rank: usize| self.step(rank).unwrap_or(0) > 0;
        matches!(self.gang.job, Job::Train(_)) && (0..self.members.len()).any(has_begun)
    }

    /// The step that a worker has begun.
    fn step(&self, rank: usize) -> Option<u64> {
        self.members[rank].step(rank as u32, self.control.folder())
    }

    /// Passes an event to the observer and to the coordinator, and carries out what the coordinator wants.
    fn handle(&mut self, event: GangEvent) {
        let fault = self.sources.random_faults.as_mut().and_then(|faults| faults.due(self.members.len()));
        if let Some(fault) = fault
            && self.step(fault.rank as usize).unwrap_or(0) > 0
        {
            self.members[fault.rank as usize].send(ToWorker::Inject(fault));
        }
        match &event {
            GangEvent::Message { rank, message: ToLauncher::Beat(beat) } => {
                self.observations.beat(*rank as usize, beat.clone());
            }
            GangEvent::Beats(beats) => {
                beats.iter().for_each(|(rank, beat)| self.observations.beat(*rank as usize, beat.clone()));
            }
            _ => {}
        }
        for action in self.coordinator.step(event, self.began.elapsed()) {
            carry_out(action, self.gang, &mut self.members, self.observations);
        }
    }

    /// Waits until the observer has handled everything. Returns `None` if that takes too long. Otherwise returns
    /// `Some(Some(failure))` for the first failure of the observer since the gang ended, or `Some(None)` without a
    /// failure. If a signal asked the run to stop, a hung disk gets as long as workers may take to stop, plus a second;
    /// once two signals have arrived, [`OUTPUT_GRACE`] at most.
    async fn wait_for_observer(&mut self) -> Option<Option<Failure>> {
        let (ended, mut first) = (Instant::now(), None);
        let whole_limit = match self.interrupts {
            _ if self.is_disk_stuck => OUTPUT_GRACE,
            0 => self.gang.observer_limit,
            _ => self.gang.observer_limit.min(self.gang.limits.preempt + OUTPUT_GRACE),
        };
        loop {
            let limit = if self.interrupts > 1 { whole_limit.min(OUTPUT_GRACE) } else { whole_limit };
            tokio::select! {
                event = self.sources.failures.recv() => match event {
                    Some(GangEvent::ObserverFailed(failure)) => drop(first.get_or_insert(failure)),
                    Some(_) => {}
                    None => return Some(first),
                },
                () = self.sources.signals.recv() => {
                    self.interrupts += 1;
                    tracing::warn!("waiting until logs and checkpoints are written; interrupt again to end at once");
                }
                () = tokio::time::sleep(limit.saturating_sub(ended.elapsed())) => return None,
            }
        }
    }

    /// The error of a gang that has failed.
    fn failure(mut self, mut causes: Vec<Cause>) -> anyhow::Error {
        // The last heartbeats may be many steps old, so read the step of each worker from its step file.
        for cause in &mut causes {
            if let Cause::Stuck { worker: StuckWorker { rank, last: Some(beat), .. }, .. } = cause {
                beat.step = self.step(*rank as usize).unwrap_or(beat.step);
            }
        }
        let gang = self.gang;
        let ended = |(rank, slot): (usize, &WorkerSlot)| {
            let (mut last_beat, exit) = self.coordinator.end_of(rank);
            if let (Some(beat), Some(step)) = (&mut last_beat, self.step(rank)) {
                beat.step = step;
            }
            let last_lines = std::mem::take(&mut self.members[rank].last_lines).into();
            let member = &self.members[rank];
            let (host, node, pid) = (member.host(), slot.node, member.pid);
            EndedWorker { host, node, pid, gpu: slot.gpu, last_beat, exit, last_lines }
        };
        let workers: Vec<EndedWorker> = gang.world.slots.iter().enumerate().map(ended).collect();
        let oom_killed = self.is_out_of_memory || oom_kills() > self.oom_kills_before;
        report::failure(gang.job.name(), &causes, &workers, oom_killed).into()
    }
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
pub(super) fn oom_kills() -> Option<u64> {
    match std::env::var_os(MEMORY_EVENTS_VARIABLE) {
        Some(made_up) => cgroup::oom_kills_in(Path::new(&made_up)),
        None => cgroup::oom_kills(Path::new("/")),
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
