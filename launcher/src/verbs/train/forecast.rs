//! Estimates how long training takes, from the heartbeats of rank 0. If steps are slow, the estimate comes long before
//! the first progress report.

use std::time::{Duration, Instant};

use locdiff_core::text::training_time;

/// The estimate is made after at least this many timed steps and this much time.
const STEPS_MIN: u64 = 3;
const TIME_MIN: Duration = Duration::from_secs(3);

/// Times the first steps of an attempt.
#[derive(Debug)]
pub(super) struct Forecast {
    /// Number of steps of the whole training.
    steps: u64,
    state: Timing,
}

#[derive(Debug, Clone, Copy)]
enum Timing {
    /// No step has begun.
    Waiting,
    /// The first step of the attempt, which is slower than the others and is not timed.
    First { step: u64 },
    /// Timing since the beginning of `step`. `first` is the first step of the attempt.
    Since { begun: Instant, step: u64, first: u64 },
    /// The estimate was made.
    Done,
}

/// An estimate of the time that the rest of a training takes.
#[derive(Debug, PartialEq)]
pub(super) struct Estimate {
    /// Number of steps that were timed.
    timed: u64,
    /// Number of steps from the first step of the attempt to the last step.
    steps: u64,
    seconds: f64,
}

impl Forecast {
    pub(super) fn new(steps: u64) -> Self {
        Self { steps, state: Timing::Waiting }
    }

    /// Handles a heartbeat of rank 0 during `step`, or before the first step if `step` is 0. Returns the estimate as
    /// soon as it is possible, and only once.
    pub(super) fn beat(&mut self, step: u64, now: Instant) -> Option<Estimate> {
        match self.state {
            Timing::Waiting if step > 0 => self.state = Timing::First { step },
            Timing::First { step: first } if step > first => {
                self.state = Timing::Since { begun: now, step, first };
            }
            Timing::Since { begun, step: from, first } => {
                let (made, passed) = (step.saturating_sub(from), now.saturating_duration_since(begun));
                if made >= STEPS_MIN && passed >= TIME_MIN {
                    self.state = Timing::Done;
                    let steps = (self.steps + 1).saturating_sub(first);
                    return Some(Estimate {
                        timed: made,
                        steps,
                        seconds: passed.as_secs_f64() / made as f64 * steps as f64,
                    });
                }
            }
            _ => {}
        }
        None
    }
}

impl Estimate {
    /// Logs the estimate, as a warning if the training takes very long.
    pub(super) fn log(&self) {
        match training_time("about", self.seconds, self.steps) {
            (text, true) => tracing::warn!("{text}"),
            (text, false) => tracing::info!("{text}, going by the speed of {} steps", self.timed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimate_leaves_out_the_first_step_and_comes_once() {
        let start = Instant::now();
        let after = |ms: u64| start + Duration::from_millis(ms);
        let mut forecast = Forecast::new(1000);
        // The attempt resumes after step 400, and its first step takes a minute.
        for (step, ms) in [(0, 0), (401, 1000), (401, 60_000), (402, 61_000), (403, 62_500), (404, 64_000)] {
            assert_eq!(forecast.beat(step, after(ms)), None, "step {step}");
        }
        assert_eq!(forecast.beat(405, after(65_500)), Some(Estimate { timed: 3, steps: 600, seconds: 900.0 }));
        assert_eq!(forecast.beat(410, after(80_000)), None);
    }

    #[test]
    fn fast_steps_are_timed_for_some_seconds() {
        let start = Instant::now();
        let mut forecast = Forecast::new(10_000);
        forecast.beat(1, start);
        forecast.beat(2, start);
        assert_eq!(forecast.beat(202, start + Duration::from_secs(2)), None);
        let found = forecast.beat(402, start + Duration::from_secs(4));
        assert_eq!(found, Some(Estimate { timed: 400, steps: 10_000, seconds: 100.0 }));
    }
}
