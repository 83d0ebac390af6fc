//! The pulse of a worker: its phase, its training step and a counter of the work done. Any thread may read it.
//!
//! The working thread enters phases and advances the counter. Another thread sends the pulse to the launcher as
//! heartbeats. The launcher measures how long the counter stands still, not how long heartbeats are missing. So slow
//! work that advances the counter does not count as stuck. A stuck working thread is noticed even if the other thread
//! still sends heartbeats.
//!
//! A process has one pulse. Helper threads that do a part of the work (readers, the checkpoint writer) also advance the
//! counter.
//!
//! Heartbeats are sent a few times per second, so the last heartbeat of a worker that dies may be many steps old. The
//! step is therefore also written to a small file in the launcher's runtime folder, and the launcher reads it there.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// What a worker is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkPhase {
    /// Loading libraries, or waiting for the job.
    Start,
    /// Connecting to the other workers.
    Rendezvous,
    /// Opening data, scanning data, or waiting for data.
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

    /// Name of the configuration field that limits the time without progress in this phase.
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
    /// What the worker is doing.
    pub phase: WorkPhase,
    /// The current training step, counted from 1; 0 before the first step.
    pub step: u64,
    /// A counter that grows with every piece of work.
    pub counter: u64,
    /// The collective operation that the worker waits in, such as "all_reduce of group world"; `None` in other phases.
    pub waits_in: Option<String>,
    /// Time that the working thread has spent so far in the phases `data`, `step` and `collective`.
    pub spent: PhaseTimes,
}

/// Time that a working thread has spent in three phases. Time in a nested phase does not count for the outer phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PhaseTimes {
    /// Time in the phase `data`, microseconds.
    pub data_us: u64,
    /// Time in the phase `step`, microseconds.
    pub step_us: u64,
    /// Time in the phase `collective`, microseconds.
    pub collective_us: u64,
}

static PHASE: AtomicU8 = AtomicU8::new(0);
static STEP: AtomicU64 = AtomicU64::new(0);
static COUNTER: AtomicU64 = AtomicU64::new(0);
static WAITS_IN: Mutex<Option<String>> = Mutex::new(None);
static STEP_FILE: OnceLock<File> = OnceLock::new();
/// Time spent in each phase, microseconds.
static SPENT_US: [AtomicU64; WorkPhase::ALL.len()] = [const { AtomicU64::new(0) }; WorkPhase::ALL.len()];
/// When the phase last changed, microseconds after [`BEGAN`].
static CHANGED_AT_US: AtomicU64 = AtomicU64::new(0);
static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Changes the phase and returns the previous phase.
fn change_phase(to: u8) -> u8 {
    let now_us = u64::try_from(BEGAN.elapsed().as_micros()).unwrap_or(u64::MAX);
    let before = PHASE.swap(to, Ordering::Relaxed);
    let spent_us = now_us.saturating_sub(CHANGED_AT_US.swap(now_us, Ordering::Relaxed));
    SPENT_US[usize::from(before)].fetch_add(spent_us, Ordering::Relaxed);
    before
}

/// A guard that returns to the previous phase when it is dropped.
#[derive(Debug)]
#[must_use = "the phase ends when the guard is dropped"]
pub struct EnteredPhase {
    previous: u8,
}

impl Drop for EnteredPhase {
    fn drop(&mut self) {
        if change_phase(self.previous) == WorkPhase::Collective as u8 {
            *WAITS_IN.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        advance();
    }
}

/// Enters a phase, and leaves it when the returned guard is dropped. Only the working thread may call this function.
pub fn enter(phase: WorkPhase) -> EnteredPhase {
    advance();
    EnteredPhase { previous: change_phase(phase as u8) }
}

/// Enters a collective operation, and leaves it when the returned guard is dropped.
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
    if let Some(file) = STEP_FILE.get() {
        // Ignore errors, because the file only makes reports more exact.
        let _ = file.write_all_at(&step.to_le_bytes(), 0);
    }
    advance();
}

/// Path of the file with the step of the worker `rank`, in the folder of the control socket.
fn step_file(folder: &Path, rank: u32) -> PathBuf {
    folder.join(format!("step-{rank}"))
}

/// Makes [`begin_step`] write the step to a file in `folder`.
pub fn write_steps(folder: &Path, rank: u32) -> std::io::Result<()> {
    let file = File::create(step_file(folder, rank))?;
    file.write_all_at(&0_u64.to_le_bytes(), 0)?;
    let _ = STEP_FILE.set(file);
    Ok(())
}

/// The step that the worker `rank` began last, from its file in `folder`; `None` if there is no such file.
pub fn read_step(folder: &Path, rank: u32) -> Option<u64> {
    let bytes = std::fs::read(step_file(folder, rank)).ok()?;
    Some(u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?))
}

/// The pulse at this moment.
pub fn beat() -> Beat {
    let phase = WorkPhase::ALL[usize::from(PHASE.load(Ordering::Relaxed))];
    let waits_in = WAITS_IN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let waits_in = waits_in.filter(|_| phase == WorkPhase::Collective);
    let spent_us = |phase: WorkPhase| SPENT_US[phase as usize].load(Ordering::Relaxed);
    let spent = PhaseTimes {
        data_us: spent_us(WorkPhase::Data),
        step_us: spent_us(WorkPhase::Step),
        collective_us: spent_us(WorkPhase::Collective),
    };
    Beat { phase, step: STEP.load(Ordering::Relaxed), counter: COUNTER.load(Ordering::Relaxed), waits_in, spent }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_is_read_from_the_file_of_its_rank() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        assert_eq!(read_step(folder.path(), 3), None);
        write_steps(folder.path(), 3).expect("the folder is writable");
        assert_eq!(read_step(folder.path(), 3), Some(0));
        begin_step(41);
        assert_eq!(read_step(folder.path(), 3), Some(41));
    }

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
        let collective = enter_collective("barrier", "world");
        std::thread::sleep(std::time::Duration::from_millis(20));
        drop(collective);
        let spent = beat().spent;
        assert!(spent.collective_us >= before.spent.collective_us + 20_000, "{spent:?}");
        assert!(spent.data_us < before.spent.data_us + 20_000, "time in a nested phase counts twice: {spent:?}");
    }
}
