//! What the working thread of a worker is doing, in three numbers that other threads may read at any time.
//!
//! The working thread enters phases and advances a counter. Another thread sends the numbers to the launcher as heartbeats. The
//! launcher times the counter, not the heartbeats: slow work that advances the counter is not stuck, and a heartbeat
//! thread beside a stuck working thread hides nothing.
//!
//! A process has one pulse. Helper threads that do a part of the work (readers, the checkpoint writer) advance it too.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

/// What a worker is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkPhase {
    /// Loading libraries, waiting for the job.
    Start,
    /// Joining the other workers.
    Rendezvous,
    /// Opening, scanning or waiting for data.
    Data,
    /// Computing.
    Step,
    /// Waiting for the other workers in a collective operation.
    Collective,
    /// Writing a checkpoint, or waiting for one to be written.
    Checkpoint,
    /// Locating photos.
    Evaluation,
}

impl WorkPhase {
    const ALL: [Self; 7] =
        [Self::Start, Self::Rendezvous, Self::Data, Self::Step, Self::Collective, Self::Checkpoint, Self::Evaluation];

    /// The configuration field that limits the phase.
    pub fn limit_name(self) -> String {
        format!("supervise.{self}_timeout_s")
    }
}

impl fmt::Display for WorkPhase {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Start => "start",
            Self::Rendezvous => "rendezvous",
            Self::Data => "data",
            Self::Step => "step",
            Self::Collective => "collective",
            Self::Checkpoint => "checkpoint",
            Self::Evaluation => "evaluation",
        })
    }
}

/// The pulse of a worker at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beat {
    /// What it is doing.
    pub phase: WorkPhase,
    /// Training step, counted from 1; 0 before the first.
    pub step: u64,
    /// Grows with every piece of work.
    pub counter: u64,
    /// The collective operation that it waits in, such as "all_reduce of group world".
    pub waits_in: Option<String>,
}

static PHASE: AtomicU8 = AtomicU8::new(0);
static STEP: AtomicU64 = AtomicU64::new(0);
static COUNTER: AtomicU64 = AtomicU64::new(0);
static WAITS_IN: Mutex<Option<String>> = Mutex::new(None);

/// Returns to the previous phase when it is dropped.
#[derive(Debug)]
#[must_use = "the phase ends when this is dropped"]
pub struct EnteredPhase {
    previous: u8,
}

impl Drop for EnteredPhase {
    fn drop(&mut self) {
        if PHASE.swap(self.previous, Ordering::Relaxed) == WorkPhase::Collective as u8 {
            *WAITS_IN.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        advance();
    }
}

/// Enters a phase until the returned guard is dropped. Only the working thread calls this.
pub fn enter(phase: WorkPhase) -> EnteredPhase {
    advance();
    EnteredPhase { previous: PHASE.swap(phase as u8, Ordering::Relaxed) }
}

/// Enters a collective operation.
pub fn enter_collective(operation: &str, group: &str) -> EnteredPhase {
    *WAITS_IN.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("{operation} of group {group}"));
    enter(WorkPhase::Collective)
}

/// Records that a piece of work was done.
pub fn advance() {
    COUNTER.fetch_add(1, Ordering::Relaxed);
}

/// Records the training step that begins.
pub fn begin_step(step: u64) {
    STEP.store(step, Ordering::Relaxed);
    advance();
}

/// The pulse at this moment.
pub fn beat() -> Beat {
    let phase = WorkPhase::ALL[usize::from(PHASE.load(Ordering::Relaxed))];
    let waits_in = WAITS_IN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let waits_in = waits_in.filter(|_| phase == WorkPhase::Collective);
    Beat { phase, step: STEP.load(Ordering::Relaxed), counter: COUNTER.load(Ordering::Relaxed), waits_in }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_nest_and_every_change_advances_the_counter() {
        let before = beat();
        let data = enter(WorkPhase::Data);
        begin_step(7);
        let waiting = enter_collective("all_reduce", "world");
        let inside = beat();
        assert_eq!((inside.phase, inside.step), (WorkPhase::Collective, 7));
        assert_eq!(inside.waits_in.as_deref(), Some("all_reduce of group world"));
        drop(waiting);
        assert_eq!((beat().phase, beat().waits_in), (WorkPhase::Data, None));
        drop(data);
        assert_eq!(beat().phase, before.phase);
        assert!(beat().counter >= before.counter + 5);
    }
}
