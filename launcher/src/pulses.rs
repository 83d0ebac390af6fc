//! Decides from heartbeats which worker of a gang is stuck. The code is pure: it uses no clock, process or socket.
//!
//! A worker makes progress when the counter in its heartbeats grows. Each phase has a limit on the time without
//! progress. A worker that exceeds the limit of its phase is stuck, even if it still sends heartbeats. There is one
//! exception: a worker that waits in a collective operation is not stuck as long as another worker does something else.
//! The limit of collective operations applies only if all workers wait in collective operations.

use std::time::Duration;

use locdiff_core::config::SuperviseConfig;
use locdiff_core::pulse::{Beat, WorkPhase};

/// While the launcher is running, it calls [`Pulses::pass`] at least once in this time.
pub const TICK: Duration = Duration::from_secs(1);

/// If this much time or more passes between two calls of [`Pulses::pass`], the launcher itself was stopped. Such a gap
/// does not count as time without progress.
const PAUSE_MIN: Duration = Duration::from_secs(4);

/// A worker counts as stopped if it sends no heartbeat for this long and for at least [`MISSED_BEATS`] heartbeat
/// intervals.
const SILENCE_MIN: Duration = Duration::from_secs(2);

/// If a worker sends no heartbeat for this many heartbeat intervals, it may count as stopped; see [`SILENCE_MIN`].
const MISSED_BEATS: u32 = 4;

/// Time that the launcher adds to the limits of collective operations and of the rendezvous. These operations time out
/// in the workers. The launcher gives the workers this time to report the error before it applies its own limit.
const COLLECTIVE_GRACE: Duration = Duration::from_secs(5);

/// For each phase, the longest time that a worker may make no progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PhaseLimits {
    start: Duration,
    rendezvous: Duration,
    data: Duration,
    step: Duration,
    collective: Duration,
    checkpoint: Duration,
    evaluation: Duration,
    /// Time without a heartbeat after which a worker counts as stopped.
    silence: Duration,
}

impl PhaseLimits {
    /// The limits from the configuration. The limits of operations that time out in the workers are extended by
    /// `COLLECTIVE_GRACE`.
    pub fn new(config: &SuperviseConfig) -> Self {
        Self {
            start: Duration::from_secs_f64(config.start_timeout_s),
            rendezvous: Duration::from_secs_f64(config.rendezvous_timeout_s) + COLLECTIVE_GRACE,
            data: Duration::from_secs_f64(config.data_timeout_s),
            step: Duration::from_secs_f64(config.step_timeout_s),
            collective: Duration::from_secs_f64(config.collective_timeout_s) + COLLECTIVE_GRACE,
            checkpoint: Duration::from_secs_f64(config.checkpoint_timeout_s),
            evaluation: Duration::from_secs_f64(config.evaluation_timeout_s),
            silence: SILENCE_MIN.max(MISSED_BEATS * Duration::from_secs_f64(config.heartbeat_s)),
        }
    }

    fn of(&self, phase: WorkPhase) -> Duration {
        match phase {
            WorkPhase::Start => self.start,
            WorkPhase::Rendezvous => self.rendezvous,
            WorkPhase::Data => self.data,
            WorkPhase::Step => self.step,
            WorkPhase::Collective => self.collective,
            WorkPhase::Checkpoint => self.checkpoint,
            WorkPhase::Evaluation => self.evaluation,
        }
    }
}

/// A worker that makes no progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StuckWorker {
    /// Rank of the worker.
    pub rank: u32,
    /// The last heartbeat of the worker; `None` if it never sent one.
    pub last: Option<Beat>,
    /// Time since the last progress of the worker.
    pub silent: Duration,
}

impl StuckWorker {
    /// The phase in the last heartbeat of the worker; [`WorkPhase::Start`] if it never sent one.
    pub fn phase(&self) -> WorkPhase {
        self.last.as_ref().map_or(WorkPhase::Start, |beat| beat.phase)
    }
}

/// Progress of all workers of a gang.
#[derive(Debug, Clone)]
pub struct Pulses {
    limits: PhaseLimits,
    workers: Vec<WorkerPulse>,
    looked_at: Duration,
}

#[derive(Debug, Clone)]
struct WorkerPulse {
    last: Option<Beat>,
    progressed_at: Duration,
    beat_at: Duration,
    is_done: bool,
}

impl Pulses {
    /// Starts to watch `workers` workers. The time without progress counts from `now`.
    pub fn new(workers: usize, limits: PhaseLimits, now: Duration) -> Self {
        let worker = WorkerPulse { last: None, progressed_at: now, beat_at: now, is_done: false };
        Self { limits, workers: vec![worker; workers], looked_at: now }
    }

    /// Records the current time, `now`. If at least `PAUSE_MIN` has passed since the last call, the launcher itself was
    /// stopped. All deadlines are then postponed by the time that has passed, and this duration is returned. Otherwise
    /// returns zero.
    pub fn pass(&mut self, now: Duration) -> Duration {
        let gap = now.saturating_sub(self.looked_at);
        self.looked_at = now;
        if gap < PAUSE_MIN {
            return Duration::ZERO;
        }
        for worker in &mut self.workers {
            worker.progressed_at += gap;
            worker.beat_at += gap;
        }
        gap
    }

    /// Records a heartbeat of the worker `rank`.
    pub fn beat(&mut self, rank: u32, beat: Beat, now: Duration) {
        let Some(worker) = self.workers.get_mut(rank as usize) else { return };
        if worker.last.as_ref().map(|last| last.counter) != Some(beat.counter) {
            worker.progressed_at = now;
        }
        worker.beat_at = now;
        worker.last = Some(beat);
    }

    /// The last heartbeat of the worker `rank`.
    pub fn last(&self, rank: usize) -> Option<Beat> {
        self.workers.get(rank)?.last.clone()
    }

    /// Stops watching the worker `rank`, because it has sent its result or has ended.
    pub fn done(&mut self, rank: u32) {
        if let Some(worker) = self.workers.get_mut(rank as usize) {
            worker.is_done = true;
        }
    }

    /// The earliest time at which a worker will count as stuck if it makes no progress before then. `None` if no worker
    /// is watched.
    pub fn deadline(&self) -> Option<Duration> {
        self.judged().map(|(_, worker, since)| since + self.limits.of(worker.phase())).min()
    }

    /// A stuck worker and the limit that it exceeded; `None` if no worker is stuck. Of several stuck workers, returns
    /// one at the lowest step.
    ///
    /// In a rendezvous, all workers wait for each other, so the step does not tell which worker is at fault. If a
    /// worker has then stopped sending heartbeats, returns that worker.
    pub fn stuck(&self, now: Duration) -> Option<(StuckWorker, Duration)> {
        let overdue = self.judged().filter(|(_, worker, since)| now >= *since + self.limits.of(worker.phase()));
        let (rank, worker, _) = overdue.min_by_key(|(_, worker, _)| (worker.step(), worker.progressed_at))?;
        let is_mute = |worker: &WorkerPulse| worker.last.is_some() && self.is_silent(worker, now);
        let mute = self.watched().filter(|(_, worker)| is_mute(worker)).min_by_key(|(_, worker)| worker.beat_at);
        let (rank, worker) = mute.filter(|_| worker.phase() == WorkPhase::Rendezvous).unwrap_or((rank, worker));
        Some((worker.stuck(rank, now), self.limits.of(worker.phase())))
    }

    fn is_silent(&self, worker: &WorkerPulse, now: Duration) -> bool {
        now.saturating_sub(worker.beat_at) >= self.limits.silence
    }

    /// The worker that probably kept its peers waiting, after the peers in `complained` reported a failed collective
    /// operation. A worker that did not complain is a candidate if it is not in a collective operation, is behind the
    /// furthest worker, or has stopped sending heartbeats. Of several candidates, returns the one whose last progress
    /// is oldest. If there is no candidate, but several workers complained and only one worker did not, returns the
    /// worker that did not complain.
    pub fn suspect(&self, complained: &[u32], now: Duration) -> Option<StuckWorker> {
        let others = || self.watched().filter(|(rank, _)| !complained.contains(rank));
        let most = self.watched().map(|(_, worker)| worker.step()).max()?;
        let is_late = |worker: &WorkerPulse| {
            worker.phase() != WorkPhase::Collective || worker.step() < most || self.is_silent(worker, now)
        };
        let is_candidate = |worker: &WorkerPulse| match &worker.last {
            Some(_) => is_late(worker),
            // The worker may have been stopped before its first heartbeat.
            None => self.is_silent(worker, now),
        };
        let late = others().filter(|(_, worker)| is_candidate(worker));
        let only = others().next().filter(|_| others().count() == 1 && complained.len() > 1);
        let (rank, worker) = late.min_by_key(|(_, worker)| worker.progressed_at).or(only)?;
        Some(worker.stuck(rank, now))
    }

    /// The workers that may be stuck, each with the time from which its limit counts: the time of its last progress.
    /// Workers that wait in a collective operation are left out. If all workers wait in a collective operation, none is
    /// left out, and every limit counts from the latest progress of any worker.
    fn judged(&self) -> impl Iterator<Item = (u32, &WorkerPulse, Duration)> {
        let is_waiting = |worker: &WorkerPulse| worker.phase() == WorkPhase::Collective;
        let all_wait = self.watched().all(|(_, worker)| is_waiting(worker));
        let latest = self.watched().map(|(_, worker)| worker.progressed_at).max().unwrap_or_default();
        self.watched()
            .filter(move |(_, worker)| all_wait || !is_waiting(worker))
            .map(move |(rank, worker)| (rank, worker, if all_wait { latest } else { worker.progressed_at }))
    }

    fn watched(&self) -> impl Iterator<Item = (u32, &WorkerPulse)> {
        let ranked = self.workers.iter().enumerate().map(|(rank, worker)| (rank as u32, worker));
        ranked.filter(|(_, worker)| !worker.is_done)
    }
}

impl WorkerPulse {
    fn phase(&self) -> WorkPhase {
        self.last.as_ref().map_or(WorkPhase::Start, |beat| beat.phase)
    }

    fn step(&self) -> u64 {
        self.last.as_ref().map_or(0, |beat| beat.step)
    }

    fn stuck(&self, rank: u32, now: Duration) -> StuckWorker {
        StuckWorker { rank, last: self.last.clone(), silent: now.saturating_sub(self.progressed_at) }
    }
}

#[cfg(test)]
mod tests {
    use locdiff_core::pulse::PhaseTimes;

    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn limits() -> PhaseLimits {
        let [start, rendezvous, data, step, collective, checkpoint, evaluation] = [60, 50, 10, 20, 15, 40, 30].map(at);
        PhaseLimits { start, rendezvous, data, step, collective, checkpoint, evaluation, silence: SILENCE_MIN }
    }

    fn beat(phase: WorkPhase, step: u64, counter: u64) -> Beat {
        Beat { phase, step, counter, waits_in: None, spent: PhaseTimes::default() }
    }

    #[test]
    fn worker_that_stops_in_the_rendezvous_is_named_instead_of_those_that_wait_for_it() {
        let mut pulses = Pulses::new(2, limits(), at(0));
        pulses.beat(0, beat(WorkPhase::Rendezvous, 0, 1), at(1));
        pulses.beat(1, beat(WorkPhase::Rendezvous, 0, 1), at(2));
        for second in 3..=51 {
            pulses.beat(0, beat(WorkPhase::Rendezvous, 0, 1), at(second));
        }
        assert_eq!(pulses.stuck(at(50)), None, "a worker counts as stuck before the limit has passed");
        assert_eq!(pulses.stuck(at(51)).map(|(worker, _)| worker.rank), Some(1));
    }

    #[test]
    fn worker_whose_counter_stands_still_is_stuck_even_if_it_beats() {
        let mut pulses = Pulses::new(1, limits(), at(0));
        for second in 0..=9 {
            pulses.pass(at(second));
            pulses.beat(0, beat(WorkPhase::Data, 1, 7), at(second));
            assert_eq!(pulses.stuck(at(second)), None);
        }
        assert_eq!(pulses.deadline(), Some(at(10)));
        let (stuck, limit) = pulses.stuck(at(10)).expect("the worker is stuck");
        assert_eq!((stuck.rank, stuck.phase(), stuck.silent, limit), (0, WorkPhase::Data, at(10), at(10)));
        pulses.beat(0, beat(WorkPhase::Data, 1, 8), at(10));
        assert_eq!(pulses.stuck(at(19)), None, "a worker that makes slow progress counts as stuck");
    }

    #[test]
    fn waiting_for_a_worker_that_computes_is_not_being_stuck() {
        let mut pulses = Pulses::new(2, limits(), at(0));
        pulses.beat(0, beat(WorkPhase::Collective, 3, 1), at(0));
        for second in 0..100 {
            pulses.beat(1, beat(WorkPhase::Data, 3, second), at(second));
            assert_eq!(pulses.stuck(at(second)), None, "a worker counts as stuck at second {second}");
        }
        pulses.beat(1, beat(WorkPhase::Collective, 3, 100), at(100));
        assert_eq!(pulses.stuck(at(114)), None);
        assert!(pulses.stuck(at(115)).is_some(), "no worker counts as stuck, although all wait for each other");
    }

    /// NCCL has no time limit of its own for joining a group.
    #[test]
    fn workers_that_do_not_finish_joining_are_stuck() {
        let mut pulses = Pulses::new(2, limits(), at(0));
        pulses.beat(0, beat(WorkPhase::Rendezvous, 0, 1), at(1));
        pulses.beat(1, beat(WorkPhase::Rendezvous, 0, 1), at(2));
        assert_eq!(pulses.stuck(at(50)), None);
        let (stuck, limit) = pulses.stuck(at(51)).expect("rank 0 is stuck");
        assert_eq!((stuck.rank, stuck.phase(), limit), (0, WorkPhase::Rendezvous, at(50)));
    }

    #[test]
    fn worker_that_keeps_the_others_waiting_is_the_suspect() {
        let mut pulses = Pulses::new(3, limits(), at(0));
        pulses.beat(0, beat(WorkPhase::Collective, 5, 9), at(1));
        pulses.beat(1, beat(WorkPhase::Step, 5, 8), at(2));
        pulses.beat(2, beat(WorkPhase::Collective, 5, 9), at(7));
        let suspect = pulses.suspect(&[0], at(8)).expect("rank 1 is suspected");
        assert_eq!((suspect.rank, suspect.phase(), suspect.silent), (1, WorkPhase::Step, at(6)));
        pulses.beat(2, beat(WorkPhase::Collective, 5, 9), at(8));
        let only = pulses.suspect(&[0, 1], at(8)).expect("only rank 2 did not complain");
        assert_eq!(only.rank, 2);
        pulses.done(1);
        assert_eq!(pulses.suspect(&[0], at(8)), None);
    }

    #[test]
    fn worker_that_is_stopped_inside_a_collective_is_the_suspect() {
        let mut pulses = Pulses::new(3, limits(), at(0));
        for second in 1..8 {
            for rank in (0..3).filter(|rank| *rank != 1 || second < 3) {
                pulses.beat(rank, beat(WorkPhase::Collective, 5, 9), at(second));
            }
        }
        assert_eq!(pulses.suspect(&[0], at(7)).map(|suspect| suspect.rank), Some(1));
    }

    #[test]
    fn worker_that_is_stopped_before_its_first_heartbeat_is_the_suspect() {
        let mut pulses = Pulses::new(2, limits(), at(0));
        pulses.beat(0, beat(WorkPhase::Collective, 0, 1), at(1));
        assert_eq!(pulses.suspect(&[0], at(1)), None, "a worker may need a moment to send its first heartbeat");
        assert_eq!(pulses.suspect(&[0], at(3)).map(|suspect| suspect.rank), Some(1));
    }

    #[test]
    fn pause_of_the_launcher_is_not_counted() {
        let mut pulses = Pulses::new(1, limits(), at(0));
        pulses.beat(0, beat(WorkPhase::Data, 1, 1), at(0));
        for second in 1..=5 {
            pulses.pass(at(second));
        }
        pulses.pass(at(65));
        assert_eq!(pulses.stuck(at(69)), None);
        assert!(pulses.stuck(at(70)).is_some(), "the worker is not stuck after ten seconds plus the pause");
    }
}
