//! Finds workers that are slower than the others. The code is pure: it uses no clock.
//!
//! Workers that train together take equally long for a step, because the fast ones wait for the slow ones in collective
//! operations. So the time in the phases `data` and `step`, without these waits, tells which worker is slow. On a GPU,
//! the waits happen on the device and count as `step`, so only a worker with slow data is found.

use locdiff_core::pulse::{Beat, PhaseTimes};
use serde::{Deserialize, Serialize};

/// Steps over which times are averaged.
const WINDOW_STEPS: u64 = 20;

/// A worker is slow if its working time per step is more than this many times the median of all workers.
const SLOW_RATIO: f64 = 1.5;

/// Differences from the median below this many milliseconds are noise.
const SLOW_MS_MIN: f64 = 2.0;

/// A worker is reported after it was slow in this many windows in a row.
const SLOW_WINDOWS: u32 = 3;

/// Mean times of a worker per step.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct StepTimes {
    /// Time spent waiting for data, milliseconds.
    pub data_ms: f64,
    /// Time spent computing, milliseconds.
    pub step_ms: f64,
    /// Time spent waiting for other workers, milliseconds.
    pub collective_ms: f64,
}

impl StepTimes {
    fn work_ms(self) -> f64 {
        self.data_ms + self.step_ms
    }
}

#[derive(Debug, Clone, Default)]
struct RankWindow {
    first: Option<(u64, PhaseTimes)>,
    last: Option<(u64, PhaseTimes)>,
    slow_windows: u32,
}

/// The time measurements of all workers of an attempt in the current window of steps.
#[derive(Debug, Clone, Default)]
pub(super) struct Stragglers {
    ranks: Vec<RankWindow>,
}

/// The times of all workers in a window of [`WINDOW_STEPS`] steps or more.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct WindowTimes {
    /// One entry per rank.
    pub(super) ranks: Vec<StepTimes>,
    /// A rank that has now been slow in [`SLOW_WINDOWS`] windows in a row, and the ratio of its working time to the
    /// median. While the rank stays slow, it is not reported again.
    pub(super) slow: Option<(usize, f64)>,
}

impl Stragglers {
    /// Watches the workers of a new attempt.
    pub(super) fn new(workers: usize) -> Self {
        Self { ranks: vec![RankWindow::default(); workers] }
    }

    /// Records a heartbeat. If it completes a window, returns the times of the window.
    pub(super) fn beat(&mut self, rank: usize, beat: &Beat) -> Option<WindowTimes> {
        let window = self.ranks.get_mut(rank)?;
        if beat.step > 0 {
            window.first.get_or_insert((beat.step, beat.spent));
            window.last = Some((beat.step, beat.spent));
        }
        let steps = |window: &RankWindow| Some(window.last?.0 - window.first?.0);
        if !self.ranks.iter().all(|window| steps(window).is_some_and(|steps| steps >= WINDOW_STEPS)) {
            return None;
        }
        let ranks: Vec<StepTimes> = self.ranks.iter().filter_map(RankWindow::times).collect();
        let mut sorted: Vec<f64> = ranks.iter().map(|times| times.work_ms()).collect();
        sorted.sort_by(f64::total_cmp);
        let median = sorted[(sorted.len() - 1) / 2];
        let mut slow = None;
        for (rank, (window, times)) in self.ranks.iter_mut().zip(&ranks).enumerate() {
            let work = times.work_ms();
            let is_slow = work > SLOW_RATIO * median && work > median + SLOW_MS_MIN;
            window.slow_windows = if is_slow { window.slow_windows + 1 } else { 0 };
            if window.slow_windows == SLOW_WINDOWS {
                slow = Some((rank, work / median.max(1e-3)));
            }
            window.first = window.last;
        }
        Some(WindowTimes { ranks, slow })
    }
}

impl RankWindow {
    fn times(&self) -> Option<StepTimes> {
        let ((first, before), (last, after)) = (self.first?, self.last?);
        let per_step = |before: u64, after: u64| after.saturating_sub(before) as f64 / (last - first) as f64 / 1000.0;
        Some(StepTimes {
            data_ms: per_step(before.data_us, after.data_us),
            step_ms: per_step(before.step_us, after.step_us),
            collective_ms: per_step(before.collective_us, after.collective_us),
        })
    }
}

#[cfg(test)]
mod tests {
    use locdiff_core::pulse::WorkPhase;

    use super::*;

    fn beat(step: u64, step_us: u64, collective_us: u64) -> Beat {
        let spent = PhaseTimes { data_us: 0, step_us: step * step_us, collective_us: step * collective_us };
        Beat { phase: WorkPhase::Step, step, counter: step, waits_in: None, spent }
    }

    #[test]
    fn worker_that_stays_slow_is_named_once() {
        let mut stragglers = Stragglers::new(4);
        let mut named = Vec::new();
        for step in 1..400 {
            for rank in 0..4 {
                let times = if rank == 2 { (40_000, 1_000) } else { (10_000, 31_000) };
                let found = stragglers.beat(rank, &beat(step, times.0, times.1));
                if let Some(window) = &found {
                    assert!((window.ranks[2].step_ms - 40.0).abs() < 1e-9, "{window:?}");
                    assert!((window.ranks[0].collective_ms - 31.0).abs() < 1e-9, "{window:?}");
                }
                named.extend(found.and_then(|window| window.slow));
            }
        }
        assert_eq!(named, [(2, 4.0)]);
    }

    #[test]
    fn small_differences_and_a_single_slow_window_are_no_stragglers() {
        let mut stragglers = Stragglers::new(2);
        let mut total_us = 0;
        for step in 1..400 {
            total_us += if (105..115).contains(&step) { 90_000 } else { 1_500 };
            let mut slow = beat(step, 0, 0);
            slow.spent.step_us = total_us;
            for (rank, beat) in [slow, beat(step, 1_000, 0)].iter().enumerate() {
                let found = stragglers.beat(rank, beat);
                assert_eq!(found.and_then(|window| window.slow), None, "step {step}");
            }
        }
    }
}
