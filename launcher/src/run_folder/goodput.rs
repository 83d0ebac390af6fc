//! Measures the [`Goodput`] of a run.
//!
//! At each heartbeat of rank 0, the launcher adds the time since its previous measurement to the total of the activity
//! that rank 0 was doing. The code is pure: the caller passes the time. The time between the end of one launcher of a
//! run and the start of the next launcher does not count.

use std::collections::BTreeMap;
use std::time::Duration;

use locdiff_core::protocol::Goodput;
use locdiff_core::pulse::{Beat, WorkPhase};

/// What rank 0 is spending its time on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TimeSink {
    Start,
    Restart,
    Step(u64),
    Phase(WorkPhase),
}

/// Measures the [`Goodput`] of a run.
#[derive(Debug)]
pub(super) struct GoodputClock {
    spent: Goodput,
    sink: TimeSink,
    sampled_at: Duration,
    /// Seconds spent on each step that is not in a checkpoint yet.
    uncommitted: BTreeMap<u64, f64>,
    /// Step of the newest checkpoint of this attempt; 0 before the first one.
    committed_step: u64,
}

impl GoodputClock {
    /// Starts the clock of a launcher at the time `now`. `before` is the goodput of the run's earlier launchers.
    pub(super) fn new(before: Goodput, now: Duration) -> Self {
        Self { spent: before, sink: TimeSink::Start, sampled_at: now, uncommitted: BTreeMap::new(), committed_step: 0 }
    }

    /// Adds the time since the last sample to the total of the current activity of rank 0.
    pub(super) fn sample(&mut self, now: Duration) {
        let seconds = now.saturating_sub(self.sampled_at).as_secs_f64();
        self.sampled_at = now;
        match self.sink {
            TimeSink::Start => self.spent.start_s += seconds,
            TimeSink::Restart => self.spent.restart_s += seconds,
            TimeSink::Step(step) => {
                self.spent.steps_s += seconds;
                if step > self.committed_step {
                    *self.uncommitted.entry(step).or_default() += seconds;
                }
            }
            TimeSink::Phase(WorkPhase::Data) => self.spent.data_s += seconds,
            TimeSink::Phase(WorkPhase::Checkpoint) => self.spent.checkpoint_s += seconds,
            TimeSink::Phase(_) => self.spent.evaluation_s += seconds,
        }
    }

    /// Records a heartbeat of rank 0.
    pub(super) fn beat(&mut self, beat: &Beat, now: Duration) {
        self.sample(now);
        // All time before the first step of an attempt counts as start or restart.
        if beat.step > 0 {
            self.sink = match beat.phase {
                phase @ (WorkPhase::Data | WorkPhase::Checkpoint | WorkPhase::Evaluation) => TimeSink::Phase(phase),
                _ => TimeSink::Step(beat.step),
            };
        }
    }

    /// Records that the checkpoint of `step` was committed: this step and earlier ones can no longer be lost.
    pub(super) fn committed(&mut self, step: u64) {
        self.committed_step = step;
        self.uncommitted.retain(|made, _| *made > step);
    }

    /// Records that the attempt failed. Its steps that are not in a checkpoint are lost.
    pub(super) fn failed(&mut self, now: Duration) {
        self.sample(now);
        let lost_s = self.uncommitted_s();
        self.uncommitted.clear();
        self.committed_step = 0;
        self.spent.lose(lost_s);
        self.sink = TimeSink::Restart;
    }

    /// The goodput of the run up to the last call of [`Self::sample`].
    pub(super) fn spent(&self) -> Goodput {
        self.spent
    }

    /// Time spent on steps that are not in a checkpoint yet, seconds.
    pub(super) fn uncommitted_s(&self) -> f64 {
        self.uncommitted.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use locdiff_core::pulse::PhaseTimes;

    use super::*;

    fn beat(phase: WorkPhase, step: u64) -> Beat {
        Beat { phase, step, counter: 0, waits_in: None, spent: PhaseTimes::default() }
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn every_second_is_counted_once_and_steps_after_the_last_checkpoint_are_lost() {
        let mut clock = GoodputClock::new(Goodput { steps_s: 5.0, ..Goodput::default() }, at(100));
        clock.beat(&beat(WorkPhase::Data, 0), at(102));
        clock.beat(&beat(WorkPhase::Step, 1), at(104));
        clock.beat(&beat(WorkPhase::Collective, 2), at(110));
        clock.beat(&beat(WorkPhase::Data, 2), at(113));
        clock.beat(&beat(WorkPhase::Checkpoint, 2), at(114));
        clock.beat(&beat(WorkPhase::Step, 3), at(116));
        clock.committed(2);
        assert_eq!(clock.uncommitted_s(), 0.0);
        clock.failed(at(120));
        clock.beat(&beat(WorkPhase::Data, 0), at(121));
        clock.beat(&beat(WorkPhase::Step, 3), at(123));
        clock.beat(&beat(WorkPhase::Evaluation, 3), at(127));
        clock.sample(at(128));
        let spent = clock.spent();
        let wanted = Goodput {
            steps_s: 5.0 + 9.0 + 4.0,
            start_s: 4.0,
            data_s: 1.0,
            checkpoint_s: 2.0,
            evaluation_s: 1.0,
            restart_s: 3.0,
            lost_s: 4.0,
        };
        assert_eq!((spent, clock.uncommitted_s()), (wanted, 4.0));
        assert_eq!(spent.total_s(), 5.0 + 28.0, "a second is missing or counted twice");
    }

    #[test]
    fn stop_with_a_checkpoint_loses_no_step() {
        let mut clock = GoodputClock::new(Goodput::default(), at(0));
        clock.beat(&beat(WorkPhase::Step, 1), at(1));
        clock.beat(&beat(WorkPhase::Step, 2), at(3));
        // The checkpoint of step 2 is committed while the last heartbeat still says "step 2".
        clock.committed(2);
        clock.failed(at(6));
        assert_eq!((clock.spent().steps_s, clock.spent().lost_s), (5.0, 0.0));
    }
}
