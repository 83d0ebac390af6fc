//! State machine of a gang, the workers of one attempt: (state, event, now) -> actions. Pure: no clock, no process, no
//! socket.
//!
//! The phases are Starting, Running and, after a failure or an interrupt, Stopping. A gang always ends: every wait
//! except the one for the job itself has a deadline, and the last resort is SIGKILL.
//!
//! A checkpoint is committed when every rank of this attempt has written its parts. Parts from another attempt are
//! rejected.

use std::collections::BTreeMap;
use std::time::Duration;

use locdiff_core::protocol::{Failure, Hello, JobResult, PROTOCOL_VERSION, PartsWritten, ToLauncher};
use locdiff_core::{REVISION, VERSION};

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// It exited with this code.
    Code(i32),
    /// It was killed by this signal.
    Signal(i32),
}

/// Numbers of the signals that the launcher sends, as fixed by POSIX.
const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

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
    /// A worker sent a message that cannot be parsed.
    Garbled {
        /// Rank of the worker.
        rank: u32,
        /// Why it cannot be parsed.
        reason: String,
    },
    /// A worker closed its control socket.
    Closed(u32),
    /// A worker process ended.
    Exited {
        /// Rank of the worker.
        rank: u32,
        /// How it ended.
        exit: Exit,
    },
    /// A checkpoint could not be committed.
    CommitFailed(Failure),
    /// The user asked to stop (Ctrl-C, SIGTERM).
    Interrupted,
    /// A deadline may have passed.
    Tick,
}

/// What the supervisor must do next.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Send every worker its job.
    StartAll,
    /// Send the store's address (HOST:PORT) to every worker except rank 0.
    Announce(String),
    /// Pass a worker's report about its job to the observer.
    Report(ToLauncher),
    /// Commit a checkpoint. The parts of all ranks are in rank order.
    Commit(Vec<PartsWritten>),
    /// Send SIGTERM to all running workers.
    Terminate,
    /// Send SIGKILL to all running workers.
    Kill,
    /// Send SIGKILL to a worker that sent its result but did not exit.
    KillOne(u32),
}

/// Why a gang was stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// A worker is incompatible with the launcher.
    Incompatible {
        /// Rank of the worker.
        rank: u32,
        /// What differs: got and wanted.
        reason: String,
    },
    /// Workers did not say hello in time.
    Late {
        /// Ranks of the workers.
        ranks: Vec<u32>,
        /// The time that they had.
        limit: Duration,
    },
    /// A worker reported a failure.
    Failed {
        /// Rank of the worker.
        rank: u32,
        /// Its report.
        failure: Failure,
    },
    /// A worker ended without a result.
    Died {
        /// Rank of the worker.
        rank: u32,
        /// How it ended.
        exit: Exit,
    },
    /// A worker closed its control socket but kept running.
    Deserted(u32),
    /// A worker did not exit after SIGTERM, because it was stopped or hung, and was killed.
    Unresponsive {
        /// Rank of the worker.
        rank: u32,
        /// How long the launcher waited for it.
        limit: Duration,
    },
    /// A checkpoint could not be committed.
    CommitFailed(Failure),
    /// The user asked to stop.
    Interrupted,
}

impl Cause {
    /// Whether the failure of another worker must have caused this one.
    fn is_consequence(&self) -> bool {
        matches!(self, Self::Failed { failure: Failure { of_peer: true, .. }, .. })
    }
}

/// How a gang ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The result of every rank, in order.
    Done(Vec<JobResult>),
    /// Everything that went wrong, the root cause first.
    Failed(Vec<Cause>),
}

/// Time limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// For every worker to say hello.
    pub start: Duration,
    /// Between SIGTERM and SIGKILL, and for a worker to exit after its result.
    pub stop: Duration,
}

#[derive(Debug, Clone, Default)]
struct Member {
    hello: Option<Hello>,
    result: Option<JobResult>,
    exit: Option<Exit>,
    /// The process has ended, but its socket may still hold messages.
    pending_exit: Option<Exit>,
    /// The socket is closed: all messages have been handled.
    is_closed: bool,
    /// It sent its result or closed its socket, and must have exited by then.
    exit_by: Option<Duration>,
    /// It sent its result, did not exit in time, and was killed.
    killed_after_result: bool,
}

impl Member {
    /// Whether it should exit but has not done so.
    fn should_exit(&self) -> bool {
        self.exit_by.is_some() && self.exit.is_none() && !self.killed_after_result
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Starting,
    Running,
    Stopping { kill_at: Duration, killed: bool },
}

/// State machine of one gang.
#[derive(Debug, Clone)]
pub struct Coordinator {
    attempt: u32,
    limits: Limits,
    started_at: Duration,
    phase: Phase,
    members: Vec<Member>,
    /// Parts of incomplete checkpoints by step, with one slot per rank.
    parts: BTreeMap<u64, Vec<Option<PartsWritten>>>,
    causes: Vec<Cause>,
}

impl Coordinator {
    /// Starts with `workers` processes that were just spawned for this attempt of the run.
    pub fn new(workers: usize, attempt: u32, limits: Limits, now: Duration) -> Self {
        let members = vec![Member::default(); workers];
        let (phase, parts, causes) = (Phase::Starting, BTreeMap::new(), Vec::new());
        Self { attempt, limits, started_at: now, phase, members, parts, causes }
    }

    /// Handles an event and returns the actions to take.
    pub fn step(&mut self, event: GangEvent, now: Duration) -> Vec<Action> {
        match event {
            GangEvent::Message { rank, message } => self.message(rank, message, now),
            GangEvent::Garbled { rank, reason } => self.stop(Cause::Incompatible { rank, reason }, now),
            GangEvent::Closed(rank) => self.closed(rank, now),
            GangEvent::Exited { rank, exit } => self.exited(rank, exit, now),
            GangEvent::CommitFailed(failure) => self.stop(Cause::CommitFailed(failure), now),
            GangEvent::Interrupted => self.interrupted(now),
            GangEvent::Tick => self.tick(now),
        }
    }

    /// When [`GangEvent::Tick`] is due at the latest, if there is a deadline.
    pub fn deadline(&self) -> Option<Duration> {
        match self.phase {
            Phase::Starting => Some(self.started_at + self.limits.start),
            Phase::Running => {
                self.members.iter().filter(|member| member.should_exit()).filter_map(|member| member.exit_by).min()
            }
            Phase::Stopping { kill_at, killed } => (!killed).then_some(kill_at),
        }
    }

    /// How the gang ended, once every process has ended.
    pub fn outcome(&self) -> Option<Outcome> {
        if !self.members.iter().all(|member| member.exit.is_some()) {
            return None;
        }
        if self.causes.is_empty() {
            return Some(Outcome::Done(self.members.iter().filter_map(|member| member.result.clone()).collect()));
        }
        // Peers often report a broken collective before the launcher sees the death of the worker that broke it.
        let (consequences, mut causes): (Vec<_>, Vec<_>) = self.causes.iter().cloned().partition(Cause::is_consequence);
        causes.extend(consequences);
        Some(Outcome::Failed(causes))
    }

    /// The hellos received so far, in rank order.
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
                    self.phase = Phase::Running;
                    return vec![Action::StartAll];
                }
                Vec::new()
            }
            ToLauncher::Listening { address } if rank == 0 => vec![Action::Announce(address)],
            ToLauncher::Listening { .. } => {
                let reason = "it announced a store, which only rank 0 may do".to_owned();
                self.stop(Cause::Incompatible { rank, reason }, now)
            }
            ToLauncher::Result(result) => {
                member.result = Some(*result);
                member.exit_by = Some(now + self.limits.stop);
                Vec::new()
            }
            ToLauncher::Failed(failure) => self.stop(Cause::Failed { rank, failure }, now),
            ToLauncher::Parts(written) => self.written(rank, written, now),
            ToLauncher::Progress(_) | ToLauncher::Evaluated(_) | ToLauncher::Breaking(_) | ToLauncher::Located(_) => {
                vec![Action::Report(message)]
            }
        }
    }

    /// Records the parts of one rank. The parts of the last rank complete the checkpoint.
    fn written(&mut self, rank: u32, written: PartsWritten, now: Duration) -> Vec<Action> {
        if written.attempt != self.attempt {
            let (got, want) = (written.attempt, self.attempt);
            let reason = format!("it wrote parts for attempt {got}, the current attempt is {want}");
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

    /// Not a failure yet: the exit status that should follow tells the reason.
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
        let said_hello = member.hello.is_some();
        let finished = member.result.is_some() && (exit == Exit::Code(0) || member.killed_after_result);
        let reported =
            self.causes.iter().any(|cause| matches!(cause, Cause::Failed { rank: known, .. } if *known == rank));
        if let (Phase::Stopping { killed: true, .. }, Exit::Signal(SIGKILL)) = (self.phase, exit) {
            // A worker that was able to run would have ended on SIGTERM.
            self.causes.push(Cause::Unresponsive { rank, limit: self.limits.stop });
            return Vec::new();
        }
        if finished || reported || self.is_caused_by_launcher(exit) {
            return Vec::new();
        }
        if !said_hello && exit == Exit::Code(EXIT_NOT_LOADED) {
            let reason = "its libraries cannot be loaded".to_owned();
            return self.stop(Cause::Incompatible { rank, reason }, now);
        }
        self.stop(Cause::Died { rank, exit }, now)
    }

    /// Whether the launcher's own signals explain this exit. A worker that dies of another signal while the gang is
    /// being stopped may be the root cause.
    fn is_caused_by_launcher(&self, exit: Exit) -> bool {
        match self.phase {
            Phase::Stopping { killed, .. } => match exit {
                Exit::Signal(signal) => signal == SIGTERM || (killed && signal == SIGKILL),
                Exit::Code(_) => true,
            },
            _ => false,
        }
    }

    fn interrupted(&mut self, now: Duration) -> Vec<Action> {
        if let Phase::Stopping { killed, .. } = &mut self.phase
            && self.causes.contains(&Cause::Interrupted)
        {
            // The user asked twice, so do not wait for the deadline.
            *killed = true;
            return vec![Action::Kill];
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
            Phase::Stopping { kill_at, killed } if !*killed && now >= *kill_at => {
                *killed = true;
                vec![Action::Kill]
            }
            Phase::Running => self.kill_overdue(now),
            _ => Vec::new(),
        }
    }

    /// Kills workers that sent their result but did not exit in time. A worker that closed its socket without a result
    /// is a failure.
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
        self.causes.push(cause);
        if matches!(self.phase, Phase::Stopping { .. }) {
            return Vec::new();
        }
        self.phase = Phase::Stopping { kill_at: now + self.limits.stop, killed: false };
        vec![Action::Terminate]
    }
}

/// Why a worker is incompatible with this launcher, if it is.
fn mismatch(hello: &Hello) -> Option<String> {
    if hello.protocol != PROTOCOL_VERSION {
        return Some(format!("it uses protocol {}, this launcher uses {PROTOCOL_VERSION}", hello.protocol));
    }
    if (hello.version.as_str(), hello.revision.as_str()) != (VERSION, REVISION) {
        return Some(format!(
            "it is version {} ({}), this launcher is {VERSION} ({REVISION})",
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
#[path = "coordinator_tests.rs"]
mod tests;
