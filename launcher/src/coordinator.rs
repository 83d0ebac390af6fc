//! The state machine of a gang (the workers of one attempt). [`Coordinator::step`] takes an event and the time, changes
//! the state, and returns actions. It uses no clock, process or socket.
//!
//! The phases are Starting, Running and, after a failure, Stopping. If a worker blames a peer, or a stuck worker is
//! asked for a backtrace, the phase Waiting comes before Stopping, for a second at most. Workers are stopped with
//! SIGKILL. A gang always ends: every phase has a deadline, and a worker that does not end even after SIGKILL is
//! reported. While the job runs, each sign of progress in the heartbeats postpones the deadline ([`Pulses`]).
//!
//! If the user asks to stop (Ctrl-C, SIGTERM, SIGUSR1) and the job can stop early, the workers are asked to write a
//! checkpoint and return a result. They are killed if they take too long or if the user asks again. If the job cannot
//! stop early, they are killed at once.
//!
//! A checkpoint is committed when every rank of this attempt has written its parts. Parts from another attempt are
//! rejected and stop the gang.

use std::collections::BTreeMap;
use std::time::Duration;

use locdiff_core::protocol::{
    Failure, Hello, JobResult, KeyValues, PROTOCOL_VERSION, PartsWritten, StoreReply, ToLauncher,
};
use locdiff_core::pulse::Beat;
use locdiff_core::{REVISION, VERSION};
use serde::{Deserialize, Serialize};

use crate::pulses::{PhaseLimits, Pulses, StuckWorker};

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exit {
    /// The process exited with this code.
    Code(i32),
    /// The process was killed by this signal.
    Signal(i32),
    /// The connection to the node of the process was lost.
    Lost,
}

/// Number of the signal that kills workers, as fixed by POSIX.
const SIGKILL: i32 = 9;

/// How long to wait for the root cause after a worker has blamed a peer.
const DOUBT: Duration = Duration::from_secs(1);

/// How long to wait for the backtrace of a stuck worker.
const BACKTRACE_PATIENCE: Duration = Duration::from_millis(500);

/// Exit code of the dynamic linker and of shells when a program cannot be loaded.
const EXIT_NOT_LOADED: i32 = 127;

/// Something that happened to a gang.
#[derive(Debug, Clone, PartialEq)]
pub enum GangEvent {
    /// A worker sent a message.
    Message {
        /// Rank of the worker.
        rank: u32,
        /// The message.
        message: ToLauncher,
    },
    /// Heartbeats of several workers: rank and heartbeat.
    Beats(Vec<(u32, Beat)>),
    /// A worker sent a message that cannot be parsed.
    Garbled {
        /// Rank of the worker.
        rank: u32,
        /// Why the message cannot be parsed.
        reason: String,
    },
    /// The worker of this rank closed its control socket.
    Closed(u32),
    /// A worker process ended.
    Exited {
        /// Rank of the worker.
        rank: u32,
        /// How the process ended.
        exit: Exit,
    },
    /// The connection to a node was lost, or a node could not start its workers. They count as ended.
    NodeLost {
        /// Number of the node.
        node: u32,
        /// The ranks of its workers.
        ranks: Vec<u32>,
        /// What happened.
        failure: Failure,
    },
    /// A checkpoint could not be committed, a report could not be handled, or the disk does not respond.
    ObserverFailed(Failure),
    /// The user asked to stop (Ctrl-C, SIGTERM, SIGUSR1).
    Interrupted {
        /// Whether the job can stop early and has made progress that is worth a checkpoint.
        has_progress: bool,
    },
    /// More workers could take part, so the job should stop at a checkpoint.
    Regroup,
    /// Time has passed, and a deadline may have been reached.
    Tick,
}

/// An action that the supervisor must carry out.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Send every worker its job.
    StartAll,
    /// Send this reply of the key-value store to the worker of this rank.
    Answer {
        /// Rank of the worker.
        rank: u32,
        /// The reply.
        reply: StoreReply,
    },
    /// Pass a worker's report about its job to the observer.
    Report(ToLauncher),
    /// Commit a checkpoint that consists of these parts, one entry per rank in rank order.
    Commit(Vec<PartsWritten>),
    /// Ask every worker to write a checkpoint and to end its job.
    AskToStop,
    /// Ask the worker of this rank, which is stuck, for a backtrace.
    AskForBacktrace(u32),
    /// Send SIGKILL to all running workers.
    Kill,
    /// Send SIGKILL to the worker of this rank, which sent its result but did not exit.
    KillOne(u32),
}

/// Why a gang was stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// A worker is incompatible with the launcher.
    Incompatible {
        /// Rank of the worker.
        rank: u32,
        /// Why the worker is incompatible, such as a different version.
        reason: String,
    },
    /// Some workers did not say hello in time.
    Late {
        /// Ranks of the workers that were late.
        ranks: Vec<u32>,
        /// The time limit within which every worker had to send its hello.
        limit: Duration,
    },
    /// A worker reported a failure.
    Failed {
        /// Rank of the worker.
        rank: u32,
        /// The worker's report.
        failure: Failure,
    },
    /// A worker ended without a result.
    Died {
        /// Rank of the worker.
        rank: u32,
        /// How the process ended.
        exit: Exit,
    },
    /// The worker of this rank closed its control socket but kept running.
    Deserted(u32),
    /// The worker of this rank did not end even after SIGKILL. It is blocked inside the kernel, for example while it
    /// waits for a disk.
    Unkillable(u32),
    /// A worker made no progress for too long.
    Stuck {
        /// The worker, with its last heartbeat.
        worker: StuckWorker,
        /// The time limit that the worker exceeded; `None` if its peers gave up first.
        limit: Option<Duration>,
    },
    /// The connection to a node was lost, or a node could not start its workers.
    NodeLost {
        /// Number of the node.
        node: u32,
        /// What happened.
        failure: Failure,
    },
    /// A checkpoint could not be committed, a report could not be handled, or the disk does not respond.
    ObserverFailed(Failure),
    /// The user asked to stop.
    Interrupted,
}

impl Cause {
    /// Whether this failure is only a consequence of another worker's failure.
    fn is_consequence(&self) -> bool {
        matches!(self, Self::Failed { failure: Failure { of_peer: true, .. }, .. })
    }
}

/// How a gang ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The results of all ranks, in rank order.
    Done(Vec<JobResult>),
    /// All causes of the failure. The first is the root cause.
    Failed(Vec<Cause>),
}

/// Time limits of a gang.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest time from the start of the gang until all workers have said hello.
    pub start: Duration,
    /// Longest time that a worker may take to exit after it has sent its result or closed its socket.
    pub stop: Duration,
    /// Time from the user's request to stop until the workers are killed.
    pub preempt: Duration,
    /// How long to wait for a worker to end after SIGKILL. The kernel may need seconds to free the memory of a GPU.
    pub kill: Duration,
    /// Time without progress after which a worker counts as stuck. Each phase of the job has its own limit.
    pub phases: PhaseLimits,
}

#[derive(Debug, Clone, Default)]
struct Member {
    hello: Option<Hello>,
    result: Option<JobResult>,
    exit: Option<Exit>,
    /// How the process ended. The exit is handled later, after the messages that the socket may still hold.
    pending_exit: Option<Exit>,
    /// Whether the socket is closed and all messages from it have been handled.
    is_closed: bool,
    /// Deadline for the worker to exit, set when the worker has sent its result or closed its socket.
    exit_by: Option<Duration>,
    /// Whether the worker sent its result, did not exit in time, and was killed.
    killed_after_result: bool,
}

impl Member {
    /// Whether the worker must exit by a deadline, but has neither exited nor been killed yet.
    fn should_exit(&self) -> bool {
        self.exit_by.is_some() && self.exit.is_none() && !self.killed_after_result
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Starting,
    Running,
    /// A failure is known, and the launcher waits for more information: the root cause if a worker blamed a peer, or
    /// the backtrace of a stuck worker.
    Waiting {
        until: Duration,
    },
    /// The workers were killed.
    Stopping {
        give_up_at: Duration,
    },
}

/// State machine of one gang.
#[derive(Debug, Clone)]
pub struct Coordinator {
    attempt: u32,
    limits: Limits,
    started_at: Duration,
    phase: Phase,
    members: Vec<Member>,
    /// The parts of incomplete checkpoints, by step. Each list has one entry per rank.
    parts: BTreeMap<u64, Vec<Option<PartsWritten>>>,
    /// The key-value store of the workers.
    keys: KeyValues,
    pulses: Pulses,
    causes: Vec<Cause>,
    /// When to kill the workers that have not stopped after the user's request. `None` if the user has not asked to
    /// stop.
    stop_by: Option<Duration>,
    /// The worker that probably kept its peers waiting until they reported a failed collective.
    suspect: Option<StuckWorker>,
}

impl Coordinator {
    /// Creates the state of a gang of `workers` processes that were spawned at the time `now`. `attempt` is the number
    /// of the training attempt, or 0 for any other job.
    pub fn new(workers: usize, attempt: u32, limits: Limits, now: Duration) -> Self {
        let members = vec![Member::default(); workers];
        Self {
            attempt,
            limits,
            started_at: now,
            phase: Phase::Starting,
            members,
            parts: BTreeMap::new(),
            keys: KeyValues::default(),
            pulses: Pulses::new(workers, limits.phases, now),
            causes: Vec::new(),
            stop_by: None,
            suspect: None,
        }
    }

    /// Handles an event and returns the actions to take.
    pub fn step(&mut self, event: GangEvent, now: Duration) -> Vec<Action> {
        let pause = self.pulses.pass(now);
        if !pause.is_zero() {
            self.shift_deadlines(pause);
        }
        match event {
            GangEvent::Message { rank, message } => self.message(rank, message, now),
            GangEvent::Beats(beats) => {
                beats.into_iter().for_each(|(rank, beat)| self.pulses.beat(rank, beat, now));
                Vec::new()
            }
            GangEvent::Garbled { rank, reason } => self.stop(Cause::Incompatible { rank, reason }, now),
            GangEvent::Closed(rank) => self.closed(rank, now),
            GangEvent::Exited { rank, exit } => self.exited(rank, exit, now),
            GangEvent::NodeLost { node, ranks, failure } => self.node_lost(node, &ranks, failure, now),
            GangEvent::ObserverFailed(failure) => self.stop(Cause::ObserverFailed(failure), now),
            GangEvent::Interrupted { has_progress } => self.interrupted(has_progress, now),
            GangEvent::Regroup if self.phase == Phase::Running && self.stop_by.is_none() => vec![Action::AskToStop],
            GangEvent::Regroup => Vec::new(),
            GangEvent::Tick => self.tick(now),
        }
    }

    /// The latest time at which [`GangEvent::Tick`] must be sent. `None` if no deadline is pending.
    pub fn deadline(&self) -> Option<Duration> {
        match self.phase {
            Phase::Starting => Some(self.started_at + self.limits.start),
            Phase::Running => {
                let exits =
                    self.members.iter().filter(|member| member.should_exit()).filter_map(|member| member.exit_by);
                exits.chain(self.pulses.deadline()).chain(self.stop_by).min()
            }
            Phase::Waiting { until } => Some(until),
            Phase::Stopping { give_up_at } => self.outcome().is_none().then_some(give_up_at),
        }
    }

    /// How the gang ended. `None` until all processes have ended and all their messages have been handled.
    pub fn outcome(&self) -> Option<Outcome> {
        if !self.members.iter().all(|member| member.exit.is_some()) {
            return None;
        }
        if self.causes.is_empty() {
            return Some(Outcome::Done(self.members.iter().filter_map(|member| member.result.clone()).collect()));
        }
        // When a worker dies during a collective operation, its peers often report the broken operation before the
        // launcher notices the death. So reports that blame a peer go to the end of the list.
        let (consequences, mut causes): (Vec<_>, Vec<_>) = self.causes.iter().cloned().partition(Cause::is_consequence);
        if causes.is_empty() {
            // No worker died by itself, so the suspect was stuck while its peers waited for it.
            causes.extend(self.suspect.clone().map(|worker| Cause::Stuck { worker, limit: None }));
        }
        causes.extend(consequences);
        if self.stop_by.is_some() && !causes.contains(&Cause::Interrupted) {
            causes.push(Cause::Interrupted);
        }
        Some(Outcome::Failed(causes))
    }

    /// The last heartbeat of the worker `rank`, and how its process ended.
    pub fn end_of(&self, rank: usize) -> (Option<Beat>, Option<Exit>) {
        (self.pulses.last(rank), self.members.get(rank).and_then(|member| member.exit))
    }

    /// The `Hello` messages received so far, in rank order.
    pub fn hellos(&self) -> Vec<Hello> {
        self.members.iter().filter_map(|member| member.hello.clone()).collect()
    }

    fn message(&mut self, rank: u32, message: ToLauncher, now: Duration) -> Vec<Action> {
        let Some(member) = self.members.get_mut(rank as usize) else { return Vec::new() };
        match message {
            ToLauncher::Hello(hello) => {
                let mismatch = mismatch(&hello);
                member.hello = Some(hello);
                if let Some(reason) = mismatch {
                    return self.stop(Cause::Incompatible { rank, reason }, now);
                }
                let complete = self.members.iter().all(|member| member.hello.is_some());
                if self.phase == Phase::Starting && complete {
                    if let Some((rank, reason)) = different_libraries(&self.hellos()) {
                        return self.stop(Cause::Incompatible { rank, reason }, now);
                    }
                    self.phase = Phase::Running;
                    self.pulses = Pulses::new(self.members.len(), self.limits.phases, now);
                    return vec![Action::StartAll];
                }
                Vec::new()
            }
            ToLauncher::Store(request) => {
                let replies = self.keys.handle(rank, request).into_iter();
                replies.map(|(rank, reply)| Action::Answer { rank, reply }).collect()
            }
            ToLauncher::Result(result) => {
                member.result = Some(*result);
                member.exit_by = Some(now + self.limits.stop);
                self.pulses.done(rank);
                Vec::new()
            }
            ToLauncher::Beat(beat) => {
                self.pulses.beat(rank, beat, now);
                Vec::new()
            }
            ToLauncher::Failed(failure) => self.stop(Cause::Failed { rank, failure }, now),
            ToLauncher::Parts(written) => self.written(rank, written, now),
            ToLauncher::Progress(_)
            | ToLauncher::Evaluated(_)
            | ToLauncher::Breaking(_)
            | ToLauncher::Located(_)
            | ToLauncher::Nearest(_)
            | ToLauncher::Embedded { .. }
            | ToLauncher::Predicted(_)
            | ToLauncher::Serving(_)
            | ToLauncher::Refused(_)
            | ToLauncher::ReportPhoto(_) => vec![Action::Report(message)],
        }
    }

    /// Records the parts of one rank. Commits the checkpoint when the parts of all ranks are recorded.
    fn written(&mut self, rank: u32, written: PartsWritten, now: Duration) -> Vec<Action> {
        if written.attempt != self.attempt {
            let (got, want) = (written.attempt, self.attempt);
            let reason = format!("it wrote parts for attempt {got}, but the current attempt is {want}");
            return self.stop(Cause::Incompatible { rank, reason }, now);
        }
        let (step, ranks) = (written.step, self.members.len());
        let slots = self.parts.entry(step).or_insert_with(|| vec![None; ranks]);
        slots[rank as usize] = Some(written);
        if slots.iter().any(Option::is_none) {
            return Vec::new();
        }
        let parts = self.parts.remove(&step).unwrap_or_default().into_iter().flatten().collect();
        vec![Action::Commit(parts)]
    }

    /// Handles a closed socket. A closed socket is not a failure yet, because the exit status of the worker should
    /// follow and tell the reason.
    fn closed(&mut self, rank: u32, now: Duration) -> Vec<Action> {
        let Some(member) = self.members.get_mut(rank as usize) else { return Vec::new() };
        member.is_closed = true;
        member.exit_by.get_or_insert(now + self.limits.stop);
        match member.pending_exit.take() {
            Some(exit) => self.exited(rank, exit, now),
            None => Vec::new(),
        }
    }

    fn exited(&mut self, rank: u32, exit: Exit, now: Duration) -> Vec<Action> {
        let Some(member) = self.members.get_mut(rank as usize) else { return Vec::new() };
        if member.hello.is_some() && !member.is_closed {
            member.pending_exit = Some(exit);
            return Vec::new();
        }
        member.exit = Some(exit);
        self.pulses.done(rank);
        let said_hello = member.hello.is_some();
        let finished = member.result.is_some() && (exit == Exit::Code(0) || member.killed_after_result);
        let reported =
            self.causes.iter().any(|cause| matches!(cause, Cause::Failed { rank: known, .. } if *known == rank));
        // While the gang is being stopped, SIGKILL comes from the launcher. A worker that ends in any other way may be
        // the root cause.
        let is_killed_by_launcher = matches!(self.phase, Phase::Stopping { .. }) && exit == Exit::Signal(SIGKILL);
        if finished || reported || is_killed_by_launcher {
            return Vec::new();
        }
        if !said_hello && exit == Exit::Code(EXIT_NOT_LOADED) {
            let reason = "its libraries cannot be loaded".to_owned();
            return self.stop(Cause::Incompatible { rank, reason }, now);
        }
        self.stop(Cause::Died { rank, exit }, now)
    }

    /// Treats the workers of a node as ended, because nothing more will be heard of them.
    fn node_lost(&mut self, node: u32, ranks: &[u32], failure: Failure, now: Duration) -> Vec<Action> {
        let mut has_running = false;
        for rank in ranks {
            let Some(member) = self.members.get_mut(*rank as usize) else { continue };
            member.is_closed = true;
            if member.exit.is_none() {
                member.exit = Some(member.pending_exit.take().unwrap_or(Exit::Lost));
                has_running |= member.result.is_none();
                self.pulses.done(*rank);
            }
        }
        if has_running { self.stop(Cause::NodeLost { node, failure }, now) } else { Vec::new() }
    }

    /// Moves all deadlines, because the launcher itself was stopped for the time `pause`.
    fn shift_deadlines(&mut self, pause: Duration) {
        self.started_at += pause;
        self.stop_by = self.stop_by.map(|limit| limit + pause);
        for member in &mut self.members {
            member.exit_by = member.exit_by.map(|limit| limit + pause);
        }
        match &mut self.phase {
            Phase::Waiting { until: limit } | Phase::Stopping { give_up_at: limit } => *limit += pause,
            Phase::Starting | Phase::Running => {}
        }
    }

    fn interrupted(&mut self, has_progress: bool, now: Duration) -> Vec<Action> {
        if self.phase == Phase::Running && has_progress && self.stop_by.is_none() {
            self.stop_by = Some(now + self.limits.preempt);
            return vec![Action::AskToStop];
        }
        self.stop(Cause::Interrupted, now)
    }

    fn tick(&mut self, now: Duration) -> Vec<Action> {
        match &mut self.phase {
            Phase::Starting if now >= self.started_at + self.limits.start => {
                let late = |(rank, member): (usize, &Member)| member.hello.is_none().then_some(rank as u32);
                let ranks = self.members.iter().enumerate().filter_map(late).collect();
                self.stop(Cause::Late { ranks, limit: self.limits.start }, now)
            }
            Phase::Stopping { give_up_at } if now >= *give_up_at => self.give_up(),
            Phase::Waiting { until } if now >= *until => {
                // More workers may have reported failed operations in the meantime.
                self.suspect = self.find_suspect(now).or_else(|| self.suspect.take());
                self.kill(now)
            }
            Phase::Running if self.stop_by.is_some_and(|limit| now >= limit) => self.stop(Cause::Interrupted, now),
            Phase::Running => match self.pulses.stuck(now) {
                Some((worker, limit)) => self.stop(Cause::Stuck { worker, limit: Some(limit) }, now),
                None => self.kill_overdue(now),
            },
            _ => Vec::new(),
        }
    }

    /// Kills workers that sent their result but did not exit in time. Stops the gang if a worker closed its socket
    /// without a result and did not exit in time.
    fn kill_overdue(&mut self, now: Duration) -> Vec<Action> {
        let mut actions = Vec::new();
        for rank in 0..self.members.len() {
            let member = &mut self.members[rank];
            let rank = rank as u32;
            if !member.should_exit() || member.exit_by.is_none_or(|limit| now < limit) {
                continue;
            }
            if member.result.is_none() {
                return self.stop(Cause::Deserted(rank), now);
            }
            member.killed_after_result = true;
            actions.push(Action::KillOne(rank));
        }
        actions
    }

    fn stop(&mut self, cause: Cause, now: Duration) -> Vec<Action> {
        let (is_consequence, was_waiting) = (cause.is_consequence(), matches!(self.phase, Phase::Waiting { .. }));
        let stuck = if let Cause::Stuck { worker, .. } = &cause { Some(worker.rank) } else { None };
        self.causes.push(cause);
        match (self.phase, stuck) {
            (Phase::Stopping { .. }, _) => Vec::new(),
            // The peers of a dying worker may notice its death before it has exited. Wait for its exit status: SIGKILL
            // would hide the real cause of its death.
            _ if is_consequence && was_waiting => Vec::new(),
            _ if is_consequence => {
                self.suspect = self.find_suspect(now);
                self.phase = Phase::Waiting { until: now + DOUBT };
                self.suspect.iter().map(|worker| Action::AskForBacktrace(worker.rank)).collect()
            }
            (_, Some(rank)) => {
                self.phase = Phase::Waiting { until: now + BACKTRACE_PATIENCE };
                vec![Action::AskForBacktrace(rank)]
            }
            _ => self.kill(now),
        }
    }

    /// The worker that is probably stuck, judging by the failed operations that its peers have reported so far.
    fn find_suspect(&self, now: Duration) -> Option<StuckWorker> {
        let complained = |cause: &Cause| match cause {
            Cause::Failed { rank, .. } => Some(*rank),
            _ => None,
        };
        let complained: Vec<u32> = self.causes.iter().filter_map(complained).collect();
        self.pulses.suspect(&complained, now)
    }

    fn kill(&mut self, now: Duration) -> Vec<Action> {
        self.phase = Phase::Stopping { give_up_at: now + self.limits.kill };
        vec![Action::Kill]
    }

    /// Treats workers that did not end after SIGKILL as ended, so that the launcher can exit.
    fn give_up(&mut self) -> Vec<Action> {
        for (rank, member) in (0..).zip(&mut self.members) {
            if member.exit.is_none() {
                member.exit = Some(member.pending_exit.unwrap_or(Exit::Signal(SIGKILL)));
                self.causes.extend(member.pending_exit.is_none().then_some(Cause::Unkillable(rank)));
            }
        }
        Vec::new()
    }
}

/// The first rank whose libraries differ from those of rank 0, and how they differ.
fn different_libraries(hellos: &[Hello]) -> Option<(u32, String)> {
    let of = |hello: &Hello| {
        let version = |found: &Option<String>| found.clone().unwrap_or_else(|| "none".to_owned());
        format!("libtorch {}, CUDA {}, NCCL {}", hello.libtorch_loaded, version(&hello.cuda), version(&hello.nccl))
    };
    let wanted = of(hellos.first()?);
    let other = hellos.iter().find(|hello| of(hello) != wanted)?;
    Some((other.rank, format!("it has {}, but rank 0 has {wanted}", of(other))))
}

/// The reason why a worker is incompatible with this launcher. `None` if it is compatible.
fn mismatch(hello: &Hello) -> Option<String> {
    if hello.protocol != PROTOCOL_VERSION {
        return Some(format!("it uses protocol {}, but this launcher uses {PROTOCOL_VERSION}", hello.protocol));
    }
    if (hello.version.as_str(), hello.revision.as_str()) != (VERSION, REVISION) {
        return Some(format!(
            "it is version {} ({}), but this launcher is version {VERSION} ({REVISION})",
            hello.version, hello.revision
        ));
    }
    if hello.libtorch_built != hello.libtorch_loaded {
        return Some(format!(
            "it was built for libtorch {}, but {} is loaded",
            hello.libtorch_built, hello.libtorch_loaded
        ));
    }
    None
}

#[cfg(test)]
mod tests;
