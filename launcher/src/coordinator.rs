//! The life of a gang of workers as a state machine: (state, event, now) -> actions. Pure: no clock, no process, no socket.
//!
//! Starting -> Running -> Ended; on any failure or interrupt, Stopping in between. A gang always ends: every wait but that for
//! the job itself has a deadline, and after the last one comes SIGKILL.
//!
//! A checkpoint is committed when every rank of this very attempt has written its parts; what a worker of another attempt
//! says it has written is refused.

use std::collections::BTreeMap;
use std::time::Duration;

use locdiff_core::protocol::{Failure, Hello, JobResult, PROTOCOL_VERSION, PartsWritten, ToLauncher};
use locdiff_core::{REVISION, VERSION};

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// With a code.
    Code(i32),
    /// By a signal.
    Signal(i32),
}

/// Numbers of the signals that a launcher sends; POSIX fixes them.
const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

/// The dynamic linker and shells end with this code when a program cannot be loaded.
const EXIT_NOT_LOADED: i32 = 127;

/// What happened.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A worker spoke.
    Message {
        /// Which one.
        rank: u32,
        /// What it said.
        message: ToLauncher,
    },
    /// A worker said something that cannot be understood.
    Garbled {
        /// Which one.
        rank: u32,
        /// Why not.
        reason: String,
    },
    /// A worker closed its control socket.
    Closed(u32),
    /// A worker process ended.
    Exited {
        /// Which one.
        rank: u32,
        /// How.
        exit: Exit,
    },
    /// A checkpoint could not be committed.
    CommitFailed(Failure),
    /// The user asks to end (Ctrl-C, SIGTERM).
    Interrupted,
    /// Time has passed.
    Tick,
}

/// What the supervisor must do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Send every worker its job.
    StartAll,
    /// Tell every worker but the first where the store is: HOST:PORT.
    Announce(String),
    /// Pass on what a worker reports about its job.
    Report(ToLauncher),
    /// Commit a checkpoint: every rank has written its parts, here in order.
    Commit(Vec<PartsWritten>),
    /// Send SIGTERM to all that still run.
    Terminate,
    /// Send SIGKILL to all that still run.
    Kill,
    /// Send SIGKILL to one that has nothing left to do.
    KillOne(u32),
}

/// Why a gang was stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// A worker does not fit the launcher.
    Incompatible {
        /// Which one.
        rank: u32,
        /// Got and wanted.
        reason: String,
    },
    /// Workers did not report in time.
    Late {
        /// Which ones.
        ranks: Vec<u32>,
        /// The limit.
        limit: Duration,
    },
    /// A worker said that it failed.
    Failed {
        /// Which one.
        rank: u32,
        /// In its words.
        failure: Failure,
    },
    /// A worker ended without a result.
    Died {
        /// Which one.
        rank: u32,
        /// How.
        exit: Exit,
    },
    /// A worker left the control socket and went on running.
    Deserted(u32),
    /// A worker did not end when it was asked to, and was killed: it had been stopped, or hung.
    Unresponsive {
        /// Which one.
        rank: u32,
        /// How long it was waited for.
        limit: Duration,
    },
    /// A checkpoint could not be committed.
    CommitFailed(Failure),
    /// The user asked to end.
    Interrupted,
}

impl Cause {
    /// Whether something else must lie behind it.
    fn is_consequence(&self) -> bool {
        matches!(self, Self::Failed { failure: Failure { of_peer: true, .. }, .. })
    }
}

/// How a gang ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The result of every rank, in order.
    Done(Vec<JobResult>),
    /// All that went wrong, the first cause first.
    Failed(Vec<Cause>),
}

/// Deadlines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Until every worker has said hello.
    pub start: Duration,
    /// Between SIGTERM and SIGKILL.
    pub stop: Duration,
}

#[derive(Debug, Clone, Default)]
struct Member {
    hello: Option<Hello>,
    result: Option<JobResult>,
    exit: Option<Exit>,
    /// Has ended, but its socket may still hold what it said before.
    unheard_exit: Option<Exit>,
    /// Its socket is closed: all that it said has been heard.
    is_closed: bool,
    /// Has said its last word, or hung up, and must have ended by then.
    leave_by: Option<Duration>,
    /// Gave its result, did not end, and was killed.
    dismissed: bool,
}

impl Member {
    /// Ought to end and has not.
    fn is_leaving(&self) -> bool {
        self.leave_by.is_some() && self.exit.is_none() && !self.dismissed
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Starting,
    Running,
    Stopping { kill_at: Duration, killed: bool },
}

/// The state of one gang.
#[derive(Debug, Clone)]
pub struct Coordinator {
    attempt: u32,
    limits: Limits,
    started_at: Duration,
    phase: Phase,
    members: Vec<Member>,
    /// Parts of checkpoints that are not complete, by step; one place for each rank.
    parts: BTreeMap<u64, Vec<Option<PartsWritten>>>,
    causes: Vec<Cause>,
}

impl Coordinator {
    /// A gang of `workers` processes that were just spawned, for this attempt of the run.
    pub fn new(workers: usize, attempt: u32, limits: Limits, now: Duration) -> Self {
        let members = vec![Member::default(); workers];
        let (phase, parts, causes) = (Phase::Starting, BTreeMap::new(), Vec::new());
        Self { attempt, limits, started_at: now, phase, members, parts, causes }
    }

    /// Takes in what happened and says what to do about it.
    pub fn step(&mut self, event: Event, now: Duration) -> Vec<Action> {
        match event {
            Event::Message { rank, message } => self.message(rank, message, now),
            Event::Garbled { rank, reason } => self.stop(Cause::Incompatible { rank, reason }, now),
            Event::Closed(rank) => self.closed(rank, now),
            Event::Exited { rank, exit } => self.exited(rank, exit, now),
            Event::CommitFailed(failure) => self.stop(Cause::CommitFailed(failure), now),
            Event::Interrupted => self.interrupted(now),
            Event::Tick => self.tick(now),
        }
    }

    /// When [`Event::Tick`] is due at the latest.
    pub fn deadline(&self) -> Option<Duration> {
        match self.phase {
            Phase::Starting => Some(self.started_at + self.limits.start),
            Phase::Running => {
                self.members.iter().filter(|member| member.is_leaving()).filter_map(|member| member.leave_by).min()
            }
            Phase::Stopping { kill_at, killed } => (!killed).then_some(kill_at),
        }
    }

    /// How it ended, once every process has.
    pub fn outcome(&self) -> Option<Outcome> {
        if !self.members.iter().all(|member| member.exit.is_some()) {
            return None;
        }
        if self.causes.is_empty() {
            return Some(Outcome::Done(self.members.iter().filter_map(|member| member.result.clone()).collect()));
        }
        // Peers often report the broken collective before the death of the one that broke it is seen.
        let (consequences, mut causes): (Vec<_>, Vec<_>) = self.causes.iter().cloned().partition(Cause::is_consequence);
        causes.extend(consequences);
        Some(Outcome::Failed(causes))
    }

    /// What each worker has said of itself.
    pub fn hellos(&self) -> Vec<Hello> {
        self.members.iter().filter_map(|member| member.hello.clone()).collect()
    }

    fn message(&mut self, rank: u32, message: ToLauncher, now: Duration) -> Vec<Action> {
        let Some(member) = self.members.get_mut(rank as usize) else { return Vec::new() };
        match message {
            ToLauncher::Hello(hello) => {
                let misfit = misfit(&hello);
                member.hello = Some(hello);
                if let Some(reason) = misfit {
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
                let reason = "it keeps a store, which is for rank 0 alone".to_owned();
                self.stop(Cause::Incompatible { rank, reason }, now)
            }
            ToLauncher::Result(result) => {
                member.result = Some(*result);
                member.leave_by = Some(now + self.limits.stop);
                Vec::new()
            }
            ToLauncher::Failed(failure) => self.stop(Cause::Failed { rank, failure }, now),
            ToLauncher::Parts(written) => self.written(rank, written, now),
            ToLauncher::Progress(_) | ToLauncher::Evaluated(_) | ToLauncher::Breaking(_) | ToLauncher::Located(_) => {
                vec![Action::Report(message)]
            }
        }
    }

    /// The last rank's parts make a checkpoint whole.
    fn written(&mut self, rank: u32, written: PartsWritten, now: Duration) -> Vec<Action> {
        if written.attempt != self.attempt {
            let reason = format!("it has written for attempt {}, this is {}", written.attempt, self.attempt);
            return self.stop(Cause::Incompatible { rank, reason }, now);
        }
        let (step, ranks) = (written.step, self.members.len());
        let places = self.parts.entry(step).or_insert_with(|| vec![None; ranks]);
        places[rank as usize] = Some(written);
        if places.iter().any(Option::is_none) {
            return Vec::new();
        }
        let parts = self.parts.remove(&step).unwrap_or_default().into_iter().flatten().collect();
        vec![Action::Commit(parts)]
    }

    /// Its exit will tell why, if it comes.
    fn closed(&mut self, rank: u32, now: Duration) -> Vec<Action> {
        let Some(member) = self.members.get_mut(rank as usize) else { return Vec::new() };
        member.is_closed = true;
        member.leave_by.get_or_insert(now + self.limits.stop);
        match member.unheard_exit.take() {
            Some(exit) => self.exited(rank, exit, now),
            None => Vec::new(),
        }
    }

    fn exited(&mut self, rank: u32, exit: Exit, now: Duration) -> Vec<Action> {
        let Some(member) = self.members.get_mut(rank as usize) else { return Vec::new() };
        if member.hello.is_some() && !member.is_closed {
            member.unheard_exit = Some(exit);
            return Vec::new();
        }
        member.exit = Some(exit);
        let spoke = member.hello.is_some();
        let finished = member.result.is_some() && (exit == Exit::Code(0) || member.dismissed);
        let reported =
            self.causes.iter().any(|cause| matches!(cause, Cause::Failed { rank: known, .. } if *known == rank));
        if let (Phase::Stopping { killed: true, .. }, Exit::Signal(SIGKILL)) = (self.phase, exit) {
            // SIGTERM would have ended any worker that could still run.
            self.causes.push(Cause::Unresponsive { rank, limit: self.limits.stop });
            return Vec::new();
        }
        if finished || reported || self.is_our_doing(exit) {
            return Vec::new();
        }
        if !spoke && exit == Exit::Code(EXIT_NOT_LOADED) {
            let reason = "its libraries cannot be loaded".to_owned();
            return self.stop(Cause::Incompatible { rank, reason }, now);
        }
        self.stop(Cause::Died { rank, exit }, now)
    }

    /// An end that the signals of this launcher explain. A worker that dies of another signal while the gang is being
    /// stopped may well be the first cause.
    fn is_our_doing(&self, exit: Exit) -> bool {
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
            // Asked twice: no more patience.
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
            Phase::Running => self.see_out(now),
            _ => Vec::new(),
        }
    }

    /// Ends workers that have said their last word and did not leave.
    fn see_out(&mut self, now: Duration) -> Vec<Action> {
        let mut actions = Vec::new();
        for rank in 0..self.members.len() {
            let member = &mut self.members[rank];
            let rank = rank as u32;
            if !member.is_leaving() || member.leave_by.is_none_or(|limit| now < limit) {
                continue;
            }
            if member.result.is_none() {
                return self.stop(Cause::Deserted(rank), now);
            }
            member.dismissed = true;
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

/// Why a worker does not fit, if it does not.
fn misfit(hello: &Hello) -> Option<String> {
    if hello.protocol != PROTOCOL_VERSION {
        return Some(format!("it speaks protocol {}, this launcher {PROTOCOL_VERSION}", hello.protocol));
    }
    if (hello.version.as_str(), hello.revision.as_str()) != (VERSION, REVISION) {
        return Some(format!(
            "it is version {} ({}), this launcher {VERSION} ({REVISION})",
            hello.version, hello.revision
        ));
    }
    if hello.libtorch_built != hello.libtorch_loaded {
        return Some(format!(
            "it was built for libtorch {}, loaded is {}",
            hello.libtorch_built, hello.libtorch_loaded
        ));
    }
    None
}

#[cfg(test)]
#[path = "coordinator_tests.rs"]
mod tests;
