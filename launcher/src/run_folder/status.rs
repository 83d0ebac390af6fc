//! `RUN/status.json`: what a run is doing. The launcher replaces the file about once a second during training. The verb
//! `status` reads the file, also on another machine that can access the folder.
//!
//! The file is replaced atomically but not synced: after a power loss, an old or missing file does no harm. The file
//! also carries the [`Goodput`] of a run from one launcher to the next.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use locdiff_core::files::WRITING;
use locdiff_core::protocol::{CheckpointManifest, Goodput, Progress};
use locdiff_core::pulse::{Beat, WorkPhase};
use serde::{Deserialize, Serialize};

use super::goodput::GoodputClock;
use super::stragglers::{StepTimes, Stragglers};

/// Name of the status file in the folder of a run.
const STATUS: &str = "status.json";

/// Shortest time between two writes of `status.json`.
const INTERVAL: Duration = Duration::from_secs(1);

/// If `status.json` is older than this many seconds, `status` says that the file was not updated.
const STALE_S: f64 = 10.0;

/// A launcher on another machine counts as vanished if `status.json` is older than this many seconds. The limit is long
/// because a launcher does not write the file while it checks a large checkpoint, which can take minutes.
const VANISHED_S: f64 = 300.0;

/// A launcher on this machine counts as vanished if its process does not exist and `status.json` is older than this
/// many seconds.
const GONE_S: f64 = 2.0;

/// What a run is doing, or how it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunState {
    /// A launcher trains the run.
    Running,
    /// The run reached its last step and is being evaluated.
    Evaluating,
    /// The run reached its last step, and its evaluation, if it has one, is done.
    Ended,
    /// The run failed.
    Failed,
    /// The user stopped the run.
    Interrupted,
    /// The launcher is gone and did not record how it ended.
    Vanished,
}

impl RunState {
    /// The name of the state, as written in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Evaluating => "evaluating",
            Self::Ended => "ended",
            Self::Failed => "failed",
            Self::Interrupted => "interrupted",
            Self::Vanished => "vanished",
        }
    }

    /// Whether this state means that the launcher is still at work.
    fn is_alive(self) -> bool {
        matches!(self, Self::Running | Self::Evaluating)
    }
}

/// What a worker is doing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// Rank of the worker.
    pub rank: u32,
    /// Number of the worker's node.
    #[serde(default)]
    pub node: u32,
    /// Name of the worker's machine.
    #[serde(default)]
    pub host: String,
    /// Phase in the worker's last heartbeat; `start` before the first heartbeat.
    pub phase: WorkPhase,
    /// Step in the worker's last heartbeat; 0 before the first step.
    pub step: u64,
    /// Mean times per step, over at least twenty steps. `None` until times for twenty steps are known.
    pub times: Option<StepTimes>,
}

/// The content of `status.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunStatus {
    /// Name of the run.
    pub run: String,
    /// What the run is doing.
    pub state: RunState,
    /// Machine of the launcher.
    pub host: String,
    /// Process id of the launcher.
    pub pid: u32,
    /// When the file was written, seconds since 1970.
    pub unix_s: f64,
    /// Number of the current attempt.
    pub attempt: Option<u32>,
    /// Restarts by this launcher.
    pub restarts: u32,
    /// Steps done.
    pub step: u64,
    /// Steps to do.
    pub steps: u64,
    /// Loss of the last report; `None` if it is not finite.
    pub loss: Option<f64>,
    /// Rows per second over all workers.
    pub samples_per_s: Option<f64>,
    /// Estimated time to the last step, seconds.
    pub seconds_left: Option<f64>,
    /// The workers, in rank order.
    pub workers: Vec<WorkerStatus>,
    /// Step of the newest checkpoint.
    pub checkpoint_step: Option<u64>,
    /// When the newest checkpoint was committed, seconds since 1970; `None` if it is not known.
    #[serde(default)]
    pub checkpoint_unix_s: Option<f64>,
    /// The root cause of the last failure.
    pub failure: Option<String>,
    /// How the run has spent its time.
    pub goodput: Goodput,
    /// Time spent on steps that are not in a checkpoint yet, seconds.
    pub uncommitted_s: f64,
}

impl RunStatus {
    /// Reads the status as the launcher wrote it; `None` if the file cannot be read or parsed.
    fn read(run: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(run.join(STATUS)).ok()?).ok()
    }

    /// Reads the status of the run in the folder `run`, with the state as of now. `None` if the file cannot be read or
    /// parsed.
    pub fn current(run: &Path) -> Option<Self> {
        let mut status = Self::read(run)?;
        status.state = status.state_at(SystemTime::now(), &host(), is_launcher);
        Some(status)
    }

    /// Age of the status in seconds.
    pub fn age_s(&self, now: SystemTime) -> f64 {
        (exact_unix_s(now) - self.unix_s).max(0.0)
    }

    /// The state as of `now`: a run whose launcher is gone has vanished. `here` is the name of this machine. `is_alive`
    /// tells whether a launcher with a given process id runs on this machine.
    fn state_at(&self, now: SystemTime, here: &str, is_alive: impl Fn(u32) -> bool) -> RunState {
        let age_s = self.age_s(now);
        // The file is not updated during an evaluation, so an old file does not prove that the launcher is gone. On
        // this machine, its process must have ended too. On another machine, it counts as gone only if the state is
        // `Running`.
        let is_gone = match self.host == here {
            true => self.state.is_alive() && age_s > GONE_S && !is_alive(self.pid),
            false => self.state == RunState::Running && age_s > VANISHED_S,
        };
        if is_gone { RunState::Vanished } else { self.state }
    }

    /// Whether the status says that the run is running, but the file was not updated for some time.
    pub fn is_stale(&self, now: SystemTime) -> bool {
        self.state == RunState::Running && self.age_s(now) > STALE_S
    }
}

/// Keeps `status.json` up to date.
#[derive(Debug)]
pub struct StatusKeeper {
    path: PathBuf,
    status: RunStatus,
    clock: GoodputClock,
    began: Instant,
    written_at: Option<Instant>,
    global_batch: u32,
    has_warned: bool,
    stragglers: Stragglers,
}

impl StatusKeeper {
    /// Begins to keep the status of the run in the folder `run`, whose lock this launcher holds. If the previous
    /// launcher did not record how it ended, also returns the status that it left.
    pub fn new(run: &Path, steps: u64, global_batch: u32) -> (Self, Option<RunStatus>) {
        let before = RunStatus::read(run);
        let vanished = before.clone().filter(|before| before.state.is_alive());
        let mut goodput = before.as_ref().map(|before| before.goodput).unwrap_or_default();
        goodput.lose(vanished.as_ref().map_or(0.0, |vanished| vanished.uncommitted_s));
        let status = RunStatus {
            run: run.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            state: RunState::Running,
            host: host(),
            pid: std::process::id(),
            unix_s: 0.0,
            attempt: None,
            restarts: 0,
            step: 0,
            steps,
            loss: None,
            samples_per_s: None,
            seconds_left: None,
            workers: Vec::new(),
            checkpoint_step: None,
            checkpoint_unix_s: None,
            failure: before.and_then(|before| before.failure),
            goodput,
            uncommitted_s: 0.0,
        };
        let (path, clock) = (run.join(STATUS), GoodputClock::new(goodput, Duration::ZERO));
        let (began, written_at, has_warned) = (Instant::now(), None, false);
        let stragglers = Stragglers::default();
        (Self { path, status, clock, began, written_at, global_batch, has_warned, stragglers }, vanished)
    }

    /// Records that an attempt begins. `checkpoint` is what the attempt resumes from; `None` if it begins at the first
    /// step. `places` has the number and the machine of each worker's node.
    pub fn begin(
        &mut self,
        attempt: u32,
        restarts: u32,
        checkpoint: Option<&CheckpointManifest>,
        places: Vec<(u32, String)>,
    ) {
        self.stragglers = Stragglers::new(places.len());
        let start =
            |(rank, (node, host))| WorkerStatus { rank, node, host, phase: WorkPhase::Start, step: 0, times: None };
        self.status.workers = (0..).zip(places).map(start).collect();
        (self.status.attempt, self.status.restarts) = (Some(attempt), restarts);
        self.status.checkpoint_step = checkpoint.map(|found| found.step);
        self.status.checkpoint_unix_s = checkpoint.map(|found| found.committed_unix_s as f64);
        self.status.step = self.status.checkpoint_step.unwrap_or(0);
        self.write();
    }

    /// Records a heartbeat. Writes the file if the last write was at least a second ago. If a rank has been much slower
    /// than the others for some time, returns the rank and the ratio of its time per step to the median.
    pub fn beat(&mut self, rank: usize, beat: &Beat) -> Option<(usize, f64)> {
        if rank == 0 {
            self.clock.beat(beat, self.began.elapsed());
        }
        if let Some(worker) = self.status.workers.get_mut(rank) {
            (worker.phase, worker.step) = (beat.phase, beat.step);
        }
        let window = self.stragglers.beat(rank, beat);
        for (worker, times) in self.status.workers.iter_mut().zip(window.iter().flat_map(|window| &window.ranks)) {
            worker.times = Some(*times);
        }
        if self.written_at.is_none_or(|at| at.elapsed() >= INTERVAL) {
            self.write();
        }
        window.and_then(|window| window.slow)
    }

    /// Records a progress report of rank 0.
    pub fn progress(&mut self, progress: &Progress) {
        let status = &mut self.status;
        (status.step, status.loss) = (progress.step, Some(progress.loss).filter(|loss| loss.is_finite()));
        status.samples_per_s = Some(progress.samples_per_s).filter(|speed| *speed > 0.0 && speed.is_finite());
        let rows_left = progress.steps.saturating_sub(progress.step) as f64 * f64::from(self.global_batch);
        status.seconds_left = status.samples_per_s.map(|speed| rows_left / speed);
    }

    /// Records that the checkpoint of `step` was committed.
    pub fn committed(&mut self, step: u64) {
        self.status.checkpoint_step = Some(step);
        self.status.checkpoint_unix_s = Some(exact_unix_s(SystemTime::now()));
        self.status.step = self.status.step.max(step);
        self.clock.committed(step);
    }

    /// Records that an attempt failed. `cause` is the first line of the report.
    pub fn failed(&mut self, cause: &str) {
        self.clock.failed(self.began.elapsed());
        self.status.failure = Some(cause.to_owned());
        self.write();
    }

    /// Records that training is done and the evaluation begins.
    pub fn evaluating(&mut self) {
        (self.status.state, self.status.seconds_left) = (RunState::Evaluating, Some(0.0));
        self.write();
    }

    /// Records that the evaluation after training failed. `cause` is the first line of the error.
    pub fn evaluation_failed(&mut self, state: RunState, cause: &str) {
        (self.status.state, self.status.failure) = (state, Some(cause.to_owned()));
        self.write();
    }

    /// Records how the command ended.
    pub fn end(&mut self, state: RunState) {
        self.status.state = state;
        if state == RunState::Ended {
            (self.status.failure, self.status.seconds_left) = (None, Some(0.0));
        } else {
            self.clock.failed(self.began.elapsed());
        }
        self.write();
    }

    /// Whether any step was completed, as far as this launcher knows.
    pub fn has_trained(&self) -> bool {
        self.has_trained_since(0)
    }

    /// Whether the current attempt, which began at `step`, has completed a step. A worker at step `step + 1` has not
    /// completed it yet.
    pub fn has_trained_since(&self, step: u64) -> bool {
        self.status.step > step || self.status.workers.iter().any(|worker| worker.step > step + 1)
    }

    /// How the run has spent its time so far.
    pub fn goodput(&mut self) -> Goodput {
        self.clock.sample(self.began.elapsed());
        self.clock.spent()
    }

    fn write(&mut self) {
        self.written_at = Some(Instant::now());
        self.status.goodput = self.goodput();
        (self.status.uncommitted_s, self.status.unix_s) = (self.clock.uncommitted_s(), exact_unix_s(SystemTime::now()));
        let text = serde_json::to_vec_pretty(&self.status).expect("a status is plain data");
        let temporary = self.path.with_file_name(format!(".{STATUS}{WRITING}"));
        let written = std::fs::write(&temporary, text).and_then(|()| std::fs::rename(&temporary, &self.path));
        if let Err(error) = written
            && !std::mem::replace(&mut self.has_warned, true)
        {
            tracing::warn!("cannot write {}: {error}; `status` will not show this run", self.path.display());
        }
    }
}

/// Seconds since 1970; 0 before.
pub fn exact_unix_s(now: SystemTime) -> f64 {
    now.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Name of this machine.
pub fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

/// Whether a launcher with this process id runs on this machine.
fn is_launcher(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.starts_with("locdiff"))
}

#[cfg(test)]
mod tests {
    use locdiff_core::pulse::PhaseTimes;

    use super::*;

    fn keeper(run: &Path) -> (StatusKeeper, Option<RunStatus>) {
        StatusKeeper::new(run, 10, 240)
    }

    #[test]
    fn launcher_that_is_gone_has_vanished_and_its_unsaved_steps_are_lost() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let (mut first, vanished) = keeper(folder.path());
        assert_eq!(vanished, None);
        first.begin(0, 0, None, vec![(0, "here".to_owned()); 2]);
        first.status.goodput.steps_s = 8.0;
        first.clock = GoodputClock::new(first.status.goodput, Duration::ZERO);
        let spent = PhaseTimes::default();
        let beat = |step| Beat { phase: WorkPhase::Step, step, counter: 0, waits_in: None, spent };
        first.clock.beat(&beat(1), first.began.elapsed());
        first.clock.sample(first.began.elapsed() + Duration::from_secs(2));
        first.write();
        let found = RunStatus::read(folder.path()).expect("the status was written");
        let later = |seconds: f64| UNIX_EPOCH + Duration::from_secs_f64(found.unix_s + seconds);
        let state = |seconds, host: &str, is_alive: bool| found.state_at(later(seconds), host, |_| is_alive);
        assert_eq!(state(60.0, &found.host, true), RunState::Running);
        assert_eq!(state(1.0, &found.host, false), RunState::Running, "vanished, but it may be in another container");
        assert_eq!(state(3.0, &found.host, false), RunState::Vanished);
        assert_eq!(state(60.0, "elsewhere", false), RunState::Running);
        assert_eq!(state(400.0, "elsewhere", false), RunState::Vanished);
        assert!(found.is_stale(later(40.0)) && !found.is_stale(later(3.0)));

        let (second, vanished) = keeper(folder.path());
        assert_eq!(vanished.map(|status| status.pid), Some(std::process::id()));
        let spent = second.status.goodput;
        assert!(spent.lost_s >= 2.0 && (spent.steps_s - 8.0).abs() < 0.5, "{spent:?}");
    }

    #[test]
    fn ended_run_has_neither_vanished_nor_a_failure() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let (mut keeper, _) = keeper(folder.path());
        keeper.failed("worker rank 1 was killed");
        keeper.end(RunState::Ended);
        let found = RunStatus::read(folder.path()).expect("the status was written");
        assert_eq!((found.state, found.failure.clone()), (RunState::Ended, None));
        assert_eq!(found.state_at(SystemTime::now() + Duration::from_secs(900), "x", |_| false), RunState::Ended);
        assert_eq!(self::keeper(folder.path()).1, None);
    }
}
