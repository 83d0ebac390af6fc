//! Decides whether a failed job is restarted, and how long to wait before the restart. [`RestartPolicy`] reads no
//! clock: the caller passes the time.
//!
//! docs/OPERATIONS.md has the rules as a table. The first restart happens at once. The waits before later
//! restarts grow to at most a minute. A new checkpoint counts as progress: it resets the number of restarts and the
//! length of the waits.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use locdiff_core::config::SuperviseConfig;
use locdiff_core::exit_code::{FailureKind, HasExitCode};

use crate::error::{LaunchError, exit_code_of};
use crate::supervisor::Supervisor;

/// The longest wait before a restart.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Two failures that are further apart than this belong to different outages. The limit is long because a worker
/// retries reading data for minutes before it fails.
const OUTAGE_GAP: Duration = Duration::from_secs(600);

/// A failed attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::verbs) struct FailedAttempt {
    /// The kind of the failure.
    pub(in crate::verbs) kind: FailureKind,
    /// What happened, such as "panic".
    pub(in crate::verbs) what: String,
    /// The training step at which the attempt failed; 0 before the first step.
    pub(in crate::verbs) step: u64,
}

impl FailedAttempt {
    /// Takes from an error the facts that decide whether the workers are restarted.
    pub(in crate::verbs) fn new(error: &anyhow::Error) -> Self {
        let Some(known) = error.downcast_ref::<LaunchError>() else {
            return Self { kind: FailureKind::Final, what: "internal error".to_owned(), step: 0 };
        };
        let (what, step) = known.gang().map_or(("error", 0), |gang| (gang.what.as_str(), gang.step));
        Self { kind: known.failure_kind(), what: what.to_owned(), step }
    }
}

/// What to do after a failed attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::verbs) enum RestartVerdict {
    /// Wait, then start the workers again.
    Restart {
        /// Time to wait.
        wait: Duration,
        /// Text for the log, such as "restart 1 of at most 3 without progress".
        count: String,
    },
    /// End the command. The text is the reason; `None` if the error of the failure is reason enough.
    GiveUp(Option<String>),
}

/// Decides whether and when one command restarts its workers.
#[derive(Debug)]
pub(in crate::verbs) struct RestartPolicy {
    max_restarts: u32,
    outage_patience: Duration,
    /// The step that was last passed to [`RestartPolicy::begin`].
    began_at_step: u64,
    /// Highest step of a checkpoint so far. Only a checkpoint with a higher step is progress; a checkpoint that
    /// replaces a damaged one is not.
    best_step: u64,
    /// Restarts since the last new checkpoint, not counting restarts after outages.
    restarts: u32,
    /// Restarts since the last new checkpoint, including restarts after outages. The next wait depends on this number.
    waits: u32,
    /// Times of the first and the last failure of the current outage.
    outage: Option<(Duration, Duration)>,
    /// All crashes so far: what happened, and the step.
    crashes: BTreeSet<(String, u64)>,
    /// Ranks that were reported as corrupted so far.
    corrupted: BTreeSet<u32>,
}

impl RestartPolicy {
    /// A policy with the limits of the configuration.
    pub(in crate::verbs) fn new(config: &SuperviseConfig) -> Self {
        Self {
            max_restarts: config.max_restarts,
            outage_patience: Duration::from_secs_f64(config.outage_patience_s),
            began_at_step: 0,
            best_step: 0,
            restarts: 0,
            waits: 0,
            outage: None,
            crashes: BTreeSet::new(),
            corrupted: BTreeSet::new(),
        }
    }

    /// Records that an attempt begins at the checkpoint of `step`. If `step` is higher than in all earlier calls, there
    /// is a new checkpoint, which counts as progress.
    pub(in crate::verbs) fn begin(&mut self, step: u64) {
        if step > self.best_step {
            self.best_step = step;
            (self.restarts, self.waits, self.outage) = (0, 0, None);
        }
        self.began_at_step = step;
    }

    /// Decides what to do after a failure at the time `now`. `checkpoint` is the step of the newest checkpoint; `None`
    /// if it is not known.
    pub(in crate::verbs) fn judge(
        &mut self,
        failed: &FailedAttempt,
        checkpoint: Option<u64>,
        now: Duration,
    ) -> RestartVerdict {
        self.begin(checkpoint.unwrap_or(self.began_at_step));
        let (what, step) = (&failed.what, failed.step);
        if self.max_restarts == 0 {
            return RestartVerdict::GiveUp(None);
        }
        match failed.kind {
            FailureKind::Final => return RestartVerdict::GiveUp(None),
            FailureKind::Crash if !self.crashes.insert((what.clone(), step)) => {
                return give_up(format!("{what} at step {step} for the second time, so a restart would not help"));
            }
            FailureKind::Corruption { rank } if !self.corrupted.insert(rank) => {
                return give_up(format!(
                    "the state of rank {rank} differed from its peers' state for the second time: check all their GPUs"
                ));
            }
            FailureKind::Outage => return self.judge_outage(now),
            FailureKind::Crash | FailureKind::Lost | FailureKind::Corruption { .. } => {}
        }
        if self.restarts >= self.max_restarts {
            return give_up(format!(
                "{} restarts without progress, as many as supervise.max_restarts allows",
                self.restarts
            ));
        }
        self.restarts += 1;
        let count = format!("restart {} of at most {} without progress", self.restarts, self.max_restarts);
        RestartVerdict::Restart { wait: self.next_wait(), count }
    }

    /// Decides what to do when the node that caused the failure is left out: start again at once. Its failures do not
    /// count against the nodes that are left.
    pub(in crate::verbs) fn without_node(&mut self, node: u32) -> RestartVerdict {
        self.crashes.clear();
        self.corrupted.clear();
        (self.restarts, self.waits) = (0, 0);
        RestartVerdict::Restart { wait: Duration::ZERO, count: format!("without node {node}") }
    }

    /// Whether failed attempts are made again.
    pub(in crate::verbs) fn allows_restarts(&self) -> bool {
        self.max_restarts > 0
    }

    fn judge_outage(&mut self, now: Duration) -> RestartVerdict {
        // If the last failure was long ago, an attempt has worked for a while since then, so this failure begins a new
        // outage.
        let first =
            self.outage.filter(|(_, last)| now.saturating_sub(*last) < OUTAGE_GAP).map_or(now, |(first, _)| first);
        self.outage = Some((first, now));
        let lasted = now.saturating_sub(first);
        let (lasted_s, patience_s) = (lasted.as_secs(), self.outage_patience.as_secs());
        if lasted >= self.outage_patience {
            return give_up(format!("the outage has lasted {lasted_s} s; supervise.outage_patience_s is {patience_s}"));
        }
        let wait = self.next_wait().min(self.outage_patience - lasted);
        let count = format!("the outage has lasted {lasted_s} s of the {patience_s} s that are allowed");
        RestartVerdict::Restart { wait, count }
    }

    /// The wait before the next restart: 0, 1, 2, 4, ... seconds, at most [`WAIT_MAX`].
    fn next_wait(&mut self) -> Duration {
        let wait = match self.waits {
            0 => Duration::ZERO,
            waits => Duration::from_secs(1 << (waits - 1).min(6)).min(WAIT_MAX),
        };
        self.waits += 1;
        wait
    }
}

/// Makes attempts until one succeeds, a signal asks to stop, or [`RestartPolicy`] gives up. For jobs without
/// checkpoints: what an attempt keeps of earlier ones is up to `attempt`.
pub(in crate::verbs) fn try_again<T>(
    supervisor: &mut Supervisor,
    config: &SuperviseConfig,
    mut attempt: impl FnMut(&mut Supervisor) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let (began, mut policy) = (Instant::now(), RestartPolicy::new(config));
    loop {
        let error = match attempt(supervisor) {
            Ok(found) => return Ok(found),
            Err(error) => error,
        };
        match policy.judge(&FailedAttempt::new(&error), None, began.elapsed()) {
            RestartVerdict::Restart { wait, count } => {
                tracing::warn!("{error:#}");
                tracing::warn!("starting again{} ({count})", after(wait));
                supervisor.pause(wait.max(Duration::from_millis(1)))?;
            }
            RestartVerdict::GiveUp(None) => return Err(error),
            RestartVerdict::GiveUp(Some(reason)) => {
                let code = exit_code_of(&error);
                return Err(LaunchError::new(code, format!("{error:#}\n  not restarted: {reason}")).into());
            }
        }
    }
}

/// The wait before a restart as text, such as " after 4 s". Empty if there is no wait.
pub(in crate::verbs) fn after(wait: Duration) -> String {
    if wait.is_zero() { String::new() } else { format!(" after {} s", wait.as_secs()) }
}

fn give_up(reason: String) -> RestartVerdict {
    RestartVerdict::GiveUp(Some(reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(max_restarts: u32, outage_patience_s: f64) -> RestartPolicy {
        RestartPolicy::new(&SuperviseConfig { max_restarts, outage_patience_s, ..SuperviseConfig::default() })
    }

    fn failed(kind: FailureKind, what: &str, step: u64) -> FailedAttempt {
        FailedAttempt { kind, what: what.into(), step }
    }

    fn wait_s(verdict: &RestartVerdict) -> Option<u64> {
        match verdict {
            RestartVerdict::Restart { wait, .. } => Some(wait.as_secs()),
            RestartVerdict::GiveUp(_) => None,
        }
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn waits_grow_until_the_budget_is_spent_and_a_checkpoint_refills_it() {
        let mut policy = policy(4, 100.0);
        policy.begin(0);
        let lost = failed(FailureKind::Lost, "SIGKILL", 7);
        let mut waits = |checkpoint, times| -> Vec<Option<u64>> {
            (0..times).map(|_| wait_s(&policy.judge(&lost, Some(checkpoint), at(0)))).collect()
        };
        assert_eq!(waits(0, 3), [Some(0), Some(1), Some(2)]);
        assert_eq!(waits(10, 5), [Some(0), Some(1), Some(2), Some(4), None], "step 10 was not counted as progress");
        let mut long = RestartPolicy { max_restarts: 20, ..self::policy(1, 1.0) };
        let last = (0..12).map(|_| wait_s(&long.judge(&lost, None, at(0)))).last();
        assert_eq!(last, Some(Some(60)), "the longest wait is not one minute");
    }

    #[test]
    fn crash_of_the_same_sort_at_the_same_step_is_final_even_after_progress() {
        let mut policy = policy(9, 100.0);
        let mut restarts = |what, step, checkpoint| {
            wait_s(&policy.judge(&failed(FailureKind::Crash, what, step), Some(checkpoint), at(0))).is_some()
        };
        assert!(restarts("panic", 7, 5));
        assert!(restarts("SIGSEGV", 7, 5), "gave up after a crash of another sort");
        assert!(restarts("panic", 8, 5), "gave up after a crash at another step");
        assert!(!restarts("panic", 7, 6), "restarted after the same crash");
        let RestartVerdict::GiveUp(Some(reason)) = policy.judge(&failed(FailureKind::Crash, "panic", 8), None, at(0))
        else {
            panic!("the second panic at step 8 was not final, or no reason was given");
        };
        assert!(reason.contains("panic at step 8 for the second time"), "{reason}");
    }

    #[test]
    fn failures_of_a_node_that_is_left_out_do_not_count() {
        let mut policy = policy(1, 100.0);
        let crash = failed(FailureKind::Crash, "panic", 7);
        assert_eq!(wait_s(&policy.judge(&crash, None, at(0))), Some(0));
        assert_eq!(wait_s(&policy.without_node(3)), Some(0));
        assert_eq!(wait_s(&policy.judge(&crash, None, at(0))), Some(0), "the crash of another node counted");
        assert_eq!(wait_s(&policy.judge(&crash, None, at(0))), None);
    }

    #[test]
    fn outage_is_tried_again_until_the_patience_ends_and_costs_no_restart() {
        let mut policy = policy(1, 100.0);
        let outage = failed(FailureKind::Outage, "outage", 7);
        let mut wait = |seconds, checkpoint| wait_s(&policy.judge(&outage, Some(checkpoint), at(seconds)));
        assert_eq!([0, 1, 5, 98].map(|seconds| wait(seconds, 0)), [Some(0), Some(1), Some(2), Some(2)]);
        assert_eq!(wait(100, 0), None);
        assert_eq!(wait(101, 10), Some(0), "the new checkpoint did not end the outage");
        assert_eq!(wait_s(&policy.judge(&failed(FailureKind::Lost, "SIGKILL", 8), None, at(102))), Some(1));
    }

    #[test]
    fn final_failures_and_the_same_corrupted_rank_end_the_run() {
        let mut policy = policy(9, 100.0);
        let mut restarts = |kind| wait_s(&policy.judge(&failed(kind, "", 1), None, at(0))).is_some();
        assert!(!restarts(FailureKind::Final));
        assert!(restarts(FailureKind::Corruption { rank: 1 }) && restarts(FailureKind::Corruption { rank: 2 }));
        assert!(!restarts(FailureKind::Corruption { rank: 1 }));
        let mut never = self::policy(0, 100.0);
        for kind in [FailureKind::Lost, FailureKind::Outage, FailureKind::Crash] {
            assert_eq!(never.judge(&failed(kind, "", 1), None, at(0)), RestartVerdict::GiveUp(None));
        }
    }
}
