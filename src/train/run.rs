//! The training loop.

use std::collections::VecDeque;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use locdiff_core::files::Files;
use locdiff_core::metrics::Overlaps;
use locdiff_core::protocol::{FaultKind, PartsWritten, QuickEvaluation, ToLauncher, TrainJob, TrainSummary};
use locdiff_core::pulse::{self, WorkPhase};
use locdiff_core::stop;
use nix::errno::Errno;
use tch::Device;

use super::data::{TrainingData, open_validation, share};
use super::error::TrainError;
use super::faults::{RankFaults, break_cuda, exhaust_memory, file_error, read_error};
use super::observe::{Launcher, Meter, Observer, SendMessage, summary};
use super::quick::Quick;
use super::replicas::flip_bit;
use super::step::{StepOptions, StepOutcome, Trainer};
use super::work::Requests;
use crate::checkpoint::{Background, CheckpointError, Snapshot, WriteFault};
use crate::comm::Communicator;
use crate::infer::{Saved, SavedState, overlap};
use crate::native::cuda::{self, CudaEvent, CudaStream};
use crate::shards::{Batch, Batches, Mask, Position, Share};
use crate::shdd::{Codes, Filter};

/// How long a rank waits for its next batch after a request to stop. After this time, the rank gives up the step.
const DATA_PATIENCE: Duration = Duration::from_secs(1);

/// Trains up to the last step, `train.steps`, or until the launcher asks to stop. Every rank of `ranks` must call this
/// function. `checks_files` says whether this rank compares the checkpoint with its checksums.
pub fn run(
    job: &TrainJob,
    attempt: u32,
    ranks: &Communicator,
    checks_files: bool,
    mut launcher: Launcher<'_>,
) -> Result<TrainSummary, TrainError> {
    let mut training = Training::begin(job, attempt, ranks, checks_files)?;
    let overlap = (ranks.rank() == 0).then(|| OverlapCount::begin(job, training.data.plan.mask().clone()));
    let from_step = training.step;
    let (mut last, mut stopped) = (None, false);
    while training.step < job.config.train.steps && !stopped {
        let started = Instant::now();
        pulse::begin_step(training.launched + 1);
        let faults = training.faults.inject(training.launched + 1, &mut launcher)?;
        let flips_gradient = training.prepare_faults(&faults)?;
        let send = &mut *launcher.send;
        training.launch(faults.contains(&FaultKind::Hang { phase: WorkPhase::Data }), flips_gradient)?;
        let mut requests = Requests::default();
        while !requests.is_void && training.must_finish(requests) {
            let (outcome, launched) = training.finish()?;
            requests = outcome.requests;
            if !requests.is_void {
                training.count_step(&outcome, launched.next)?;
                training.observer.record(&outcome, training.skipped_steps, launched.waited, send)?;
                last = Some(outcome.loss);
            }
        }
        if requests.is_void {
            // The steps that are still in flight are void, too: a rank that gives up a step gives up all later steps.
            while training.trainer.in_flight() > 0 {
                training.finish()?;
            }
            if ranks.rank() == 0 {
                tracing::warn!("gave up step {}, because a rank was still waiting for its rows", training.step + 1);
            }
            stopped = true;
            training.save_again(send)?;
            break;
        }
        if training.trainer.in_flight() > 0 {
            report_parts(training.writer.poll()?, send)?;
            training.observer.add_times(started.elapsed(), Duration::ZERO, Duration::ZERO);
            continue;
        }
        let step_ended = Instant::now();
        training.observer.maybe_record_weights(training.step, &training.trainer)?;
        stopped = requests.stop > 0;
        let score = if stopped { None } else { training.maybe_evaluate(&mut stopped, send)? };
        let evaluation_time = step_ended.elapsed();
        training.maybe_save(score, stopped, requests.busy, send)?;
        let checkpoint_time = step_ended.elapsed() - evaluation_time;
        training.observer.add_times(started.elapsed() - evaluation_time, evaluation_time, checkpoint_time);
    }
    let _phase = pulse::enter(WorkPhase::Checkpoint);
    report_parts(training.writer.wait()?, launcher.send)?;
    if training.is_last() {
        training.observer.record_end();
    }
    stopped &= !training.is_last();
    let (step, skipped_steps, evaluation) = (training.step, training.skipped_steps, training.evaluation);
    let overlap = overlap.and_then(|counting| counting.end(stopped));
    Ok(TrainSummary { step, from_step, loss: last, skipped_steps, evaluation, stopped, overlap })
}

/// Counts test places near training places and gallery points on a thread of its own, so that the first step does not
/// wait.
struct OverlapCount(JoinHandle<Option<Overlaps>>);

impl OverlapCount {
    /// Starts to count. The thread logs the counts, except after a restart: the log then usually has them already.
    /// `mask` marks the training rows to skip.
    fn begin(job: &TrainJob, mask: Mask) -> Self {
        let (config, is_logging) = (job.config.clone(), !job.time_before.is_restart);
        Self(std::thread::spawn(move || {
            let found = overlap::of_training(&config, mask)?;
            if is_logging {
                found.lines().iter().for_each(|line| tracing::info!("{line}"));
            }
            Some(found)
        }))
    }

    /// The counts. If training was stopped early and they are not ready, `None`.
    fn end(self, is_stopped: bool) -> Option<Overlaps> {
        if is_stopped && !self.0.is_finished() { None } else { self.0.join().ok().flatten() }
    }
}

/// The batch of a step that was launched.
struct LaunchedStep {
    /// Position in the data after this batch.
    next: Position,
    /// How long the trainer waited for the batch.
    waited: Duration,
}

/// The state of a run.
struct Training<'a> {
    job: &'a TrainJob,
    attempt: u32,
    ranks: &'a Communicator,
    data: TrainingData,
    batches: Batches,
    trainer: Trainer,
    quick: Option<Quick>,
    observer: Observer,
    writer: Background,
    /// Number of steps that are finished.
    step: u64,
    /// Number of steps that were launched.
    launched: u64,
    in_flight: VecDeque<LaunchedStep>,
    /// Whether this rank has given up a step, because it was asked to stop while it waited for rows.
    gave_up: bool,
    skipped_steps: u64,
    skipped_in_a_row: u32,
    best_score: Option<f64>,
    evaluation: Option<QuickEvaluation>,
    faults: RankFaults,
    /// Whether a checkpoint is due but waits until all ranks have written the previous checkpoint.
    is_save_late: bool,
    /// Position in the data after the last step that `count_step` counted.
    position: Position,
    /// Step of the newest checkpoint; 0 if there is none.
    saved_step: u64,
}

impl<'a> Training<'a> {
    fn begin(job: &'a TrainJob, attempt: u32, ranks: &'a Communicator, checks_files: bool) -> Result<Self, TrainError> {
        let config = &job.config;
        if let Device::Cuda(index) = ranks.world().device() {
            cuda::set_device(index)?;
        }
        let _phase = pulse::enter(WorkPhase::Data);
        let resumed = job.resume.as_deref().map(|path| Saved::open_as(path, checks_files)).transpose()?;
        let initial = job.init_from.as_deref().map(Saved::open).transpose()?;
        let loaded = resumed.as_ref().or(initial.as_ref());
        let bookmark = resumed.as_ref().map(|saved| &saved.state.bookmark);
        let data = TrainingData::open(config, ranks, loaded.is_none(), bookmark)?;
        if let Some(saved) = loaded {
            saved.check_network(config, data.width)?;
        }
        let filter = match loaded {
            Some(saved) => saved.state.filter()?,
            None => data.filter.clone(),
        };
        let mut trainer = Trainer::new(config, data.width, filter, ranks)?;
        if let Some([mean, deviation]) = &data.statistics {
            trainer.work.method.standardisation_mut().set(mean, deviation)?;
        }
        if let Some(saved) = initial.as_ref().filter(|_| resumed.is_none()) {
            trainer.load_initial(saved)?;
            if let Some(warning) = saved.noise_warning(config).filter(|_| ranks.world().rank() == 0) {
                tracing::warn!("{warning}");
            }
        }
        let start = match &resumed {
            Some(saved) => {
                saved.check_threads(config)?;
                trainer.restore(saved)?;
                data.plan.resume(&saved.state.bookmark, &config.shards.train)?
            }
            None => data.plan.start(),
        };
        let state = resumed.map(|saved| saved.state);
        Self::assemble(job, attempt, ranks, (data, trainer), start, state.as_ref())
    }

    fn assemble(
        job: &'a TrainJob,
        attempt: u32,
        ranks: &'a Communicator,
        (data, trainer): (TrainingData, Trainer),
        start: Position,
        state: Option<&SavedState>,
    ) -> Result<Self, TrainError> {
        let config = &job.config;
        let step = state.map_or(0, |state| state.step);
        let skipped_steps = state.map_or(0, |state| state.skipped_steps);
        let is_first = ranks.rank() == 0;
        let meter = Meter::new(config, &trainer, ranks);
        let (batches, cache) = data.batches(config, ranks, start)?;
        if is_first {
            let steps_left = config.train.steps.saturating_sub(step);
            // A restart skips the estimate, to save time. If the estimate fails, the training continues without it.
            let seconds = if job.time_before.is_restart { None } else { meter.seconds_min(steps_left).ok() };
            summary::log(
                config,
                (&data, trainer.work.method.parameters().count()),
                ranks,
                &cache,
                (seconds, steps_left),
            );
        }
        let validation = Quick::is_wanted(config).then(|| open_validation(config, ranks.world())).transpose()?;
        let quick = |rows| Quick::new(config, data.width, &*trainer.work.method, ranks.world(), rows);
        Ok(Self {
            quick: validation.map(quick).transpose()?,
            observer: Observer::new(job, step, is_first.then_some(meter), ranks.world().size()),
            writer: Background::new(Files::real(), job.run_dir.clone(), ranks.world().device())?,
            skipped_in_a_row: state.map_or(0, |state| state.skipped_in_a_row),
            best_score: job.best_score,
            evaluation: None,
            faults: RankFaults::new(&job.faults, ranks.rank()),
            is_save_late: false,
            position: start,
            saved_step: step,
            job,
            attempt,
            ranks,
            data,
            batches,
            trainer,
            step,
            launched: step,
            in_flight: VecDeque::new(),
            gave_up: false,
            skipped_steps,
        })
    }

    /// Carries out or prepares the injected faults of this step. Returns whether the step must flip a bit of the
    /// gradient.
    fn prepare_faults(&mut self, faults: &[FaultKind]) -> Result<bool, TrainError> {
        for fault in faults {
            match fault {
                FaultKind::Eio => return Err(read_error(&self.job.config.shards.train)),
                FaultKind::Enospc => {
                    self.writer.inject(WriteFault::Error(file_error(&self.job.run_dir, Errno::ENOSPC)));
                }
                FaultKind::SlowDisk { seconds } => {
                    self.writer.inject(WriteFault::Delay(Duration::from_secs(*seconds)));
                }
                FaultKind::TensorboardEio => self.observer.fail_write(file_error(&self.job.run_dir, Errno::EIO)),
                FaultKind::CudaError => break_cuda(self.ranks.world().device())?,
                FaultKind::GpuMemory => exhaust_memory(self.ranks.world().device())?,
                FaultKind::FlipWeight => flip_bit(&self.trainer.work.replicated()[0])?,
                _ => {}
            }
        }
        Ok(faults.contains(&FaultKind::FlipGradient))
    }

    /// Whether the ranks check each other's gradients in the next step.
    fn is_replay_due(&self) -> bool {
        is_due(self.job.config.train.replay_check_every, self.launched + 1) && self.ranks.data().size() > 1
    }

    /// Whether a step that is in flight must be finished before the next step is launched. `requests` holds the
    /// requests of the last finished step. All ranks decide alike, so that all ranks launch the same steps: the
    /// decision depends only on the number of the step, the configuration, and results that are the same on all ranks.
    fn must_finish(&self, requests: Requests) -> bool {
        let (config, step) = (&self.job.config, self.launched);
        let is_alone = !self.trainer.work.can_run_ahead()
            || step == config.train.steps
            || self.is_save_late
            || requests.stop > 0
            || is_due(config.checkpoint.every, step)
            || is_due(config.train.replica_check_every, step)
            || self.is_replay_due()
            || (self.quick.is_some() && is_due(config.eval.every, step))
            || self.observer.records_weights(step);
        self.trainer.in_flight() > usize::from(!is_alone)
    }

    /// Waits for the next batch. Returns `None` if this rank has already given up a step, or if the launcher has asked
    /// to stop and the batch does not come within [`DATA_PATIENCE`]. In a step with a replay check, waits without a
    /// limit. `hangs` injects a fault: the batch never comes.
    fn next_batch(&mut self, hangs: bool) -> Result<Option<Batch>, TrainError> {
        let _phase = pulse::enter(WorkPhase::Data);
        if self.gave_up {
            return Ok(None);
        }
        let (can_be_void, mut asked_at) = (!self.is_replay_due(), None);
        let mut gives_up = || {
            let is_asked = can_be_void && stop::is_requested();
            is_asked && asked_at.get_or_insert_with(Instant::now).elapsed() >= DATA_PATIENCE
        };
        if hangs {
            while !gives_up() {
                std::thread::sleep(Duration::from_millis(10));
            }
            return Ok(None);
        }
        Ok(self.batches.next_unless(gives_up)?)
    }

    /// Launches the next step. If this rank has no batch, the step is void: no rank changes its weights. All ranks
    /// still run the step, so that no rank waits for this one. `data_hangs` injects a fault: the batch never comes.
    ///
    /// Every `train.replay_check_every` steps, the ranks also check each other's gradients. Fails if a checkpoint is
    /// still being written after `supervise.checkpoint_timeout_s`.
    fn launch(&mut self, data_hangs: bool, flips_gradient: bool) -> Result<(), TrainError> {
        let batch = self.next_batch(data_hangs)?;
        let busy = self.writer.busy();
        let limit_s = self.job.config.supervise.checkpoint_timeout_s;
        if let Some((step, since)) = busy.filter(|(_, since)| since.as_secs_f64() > limit_s) {
            self.writer.abandon();
            let path = self.job.run_dir.clone();
            return Err(CheckpointError::Stuck { step, seconds: since.as_secs_f64(), path }.into());
        }
        self.gave_up |= batch.is_none();
        let requests =
            Requests { stop: stop::is_requested().into(), busy: busy.is_some().into(), is_void: batch.is_none() };
        let (data, position, workers) = (&self.data, self.position, self.ranks.data().size());
        let rows_of = |worker: u32| data.one_batch(position, Share { worker, workers });
        let rows_of: Option<&dyn Fn(u32) -> Result<Batch, TrainError>> =
            if self.is_replay_due() { Some(&rows_of) } else { None };
        let options = StepOptions { requests, flips_gradient, rows_of };
        let waited = batch.as_ref().map_or(Duration::ZERO, |batch| batch.waited);
        match batch {
            Some(batch) => self.trainer.launch(self.launched, &batch, &options)?,
            None => {
                let slice = data.plan.slice(share(self.ranks))?;
                self.trainer.launch(self.launched, &Batch::void(position, slice, data.width)?, &options)?;
            }
        }
        self.launched += 1;
        self.in_flight.push_back(LaunchedStep { next: self.batches.position(), waited });
        Ok(())
    }

    /// Waits for the oldest step that is in flight. Every `train.replica_check_every` steps, the ranks compare their
    /// replicas.
    fn finish(&mut self) -> Result<(StepOutcome, LaunchedStep), TrainError> {
        let outcome = self.trainer.finish()?;
        let every = self.job.config.train.replica_check_every;
        if is_due(every, outcome.step) && !outcome.requests.is_void {
            self.trainer.check_replicas(outcome.step)?;
        }
        let launched = self.in_flight.pop_front().expect("every step in flight has an entry");
        Ok((outcome, launched))
    }

    /// Counts a finished step. The data continue at `next`. Fails if too many consecutive steps were skipped.
    fn count_step(&mut self, outcome: &StepOutcome, next: Position) -> Result<(), TrainError> {
        self.step = outcome.step;
        self.position = next;
        let Some(last) = &outcome.skipped else {
            self.skipped_in_a_row = 0;
            return Ok(());
        };
        self.skipped_steps += 1;
        self.skipped_in_a_row += 1;
        if self.skipped_in_a_row < self.job.config.train.nonfinite_steps_max {
            return Ok(());
        }
        Err(TrainError::Diverged(format!(
            "step {}: the gradient was not finite in {} steps in a row, the limit that train.nonfinite_steps_max sets; \
             the last reason is: {last}; lower train.learning_rate, or continue from an older checkpoint",
            self.step, self.skipped_in_a_row
        )))
    }

    fn is_last(&self) -> bool {
        self.step == self.job.config.train.steps
    }

    /// Runs the quick evaluation if it is due, and returns the validation score. Returns `None` if the evaluation is
    /// not due. If the launcher asks to stop during the evaluation, sets `stopped` and returns `None`.
    fn maybe_evaluate(&mut self, stopped: &mut bool, send: SendMessage<'_>) -> Result<Option<f64>, TrainError> {
        let _phase = pulse::enter(WorkPhase::Evaluation);
        let (every, is_last) = (self.job.config.eval.every, self.is_last());
        let Some(quick) = self.quick.as_mut().filter(|_| is_last || self.step.is_multiple_of(every)) else {
            return Ok(None);
        };
        let Some((found, seen)) = quick.evaluate(self.step, &self.trainer.averaged()?)? else {
            *stopped = true;
            return Ok(None);
        };
        self.observer.record_evaluation(&found, &seen, self.trainer.work.method.codes(), send)?;
        let score = found.score;
        self.evaluation = Some(found);
        Ok(Some(score))
    }

    /// Hands a checkpoint to the writer if one is due: every `checkpoint.every` steps, at every new best score, after
    /// the last step, and if the launcher asked to stop.
    ///
    /// `busy` is the number of ranks that are still writing the previous checkpoint. If `busy` is not 0, the checkpoint
    /// is put off to a later step. Otherwise, a rank with a slow disk would wait for the disk, and its peers would wait
    /// for this rank in a collective. A checkpoint after the last step or before a stop is not put off.
    fn maybe_save(
        &mut self,
        score: Option<f64>,
        stopped: bool,
        busy: u32,
        send: SendMessage<'_>,
    ) -> Result<(), TrainError> {
        let _phase = pulse::enter(WorkPhase::Checkpoint);
        let score = score.filter(|score| score.is_finite());
        let is_best = score.is_some_and(|score| self.best_score.is_none_or(|best| score > best));
        let is_due = is_best || self.is_save_late || self.step.is_multiple_of(self.job.config.checkpoint.every);
        let must_save = self.is_last() || stopped;
        if is_due && busy > 0 && !must_save {
            if !self.is_save_late && self.ranks.rank() == 0 {
                let step = self.step;
                tracing::warn!(
                    "the checkpoint of step {step} is put off: {busy} ranks are still writing the previous one"
                );
            }
            self.is_save_late = true;
        } else if is_due || must_save {
            self.best_score = if is_best { score } else { self.best_score };
            self.is_save_late = false;
            self.save(score, send)?;
        }
        report_parts(self.writer.poll()?, send)
    }

    /// After a step was given up: saves the state of the last complete step, unless that state is already saved.
    fn save_again(&mut self, send: SendMessage<'_>) -> Result<(), TrainError> {
        let _phase = pulse::enter(WorkPhase::Checkpoint);
        if self.step > self.saved_step { self.save(None, send) } else { Ok(()) }
    }

    fn save(&mut self, score: Option<f64>, send: SendMessage<'_>) -> Result<(), TrainError> {
        self.saved_step = self.step;
        self.trainer.check_replicas(self.step)?;
        // Wait for the previous checkpoint before the state is copied, so that there is never more than one copy of the
        // state.
        report_parts(self.writer.wait()?, send)?;
        let parts = self.trainer.parts(&self.saved_state()?, self.ranks.place(), self.ranks.layout())?;
        let ready = self.record_event()?;
        let snapshot = Snapshot { step: self.step, attempt: self.attempt, score, parts, ready };
        report_parts(self.writer.submit(snapshot)?, send)
    }

    /// An event that is signalled when the device has done all work submitted so far; `None` on the CPU.
    fn record_event(&self) -> Result<Option<CudaEvent>, TrainError> {
        if !self.ranks.world().device().is_cuda() {
            return Ok(None);
        }
        let mut event = CudaEvent::new()?;
        event.record(&CudaStream::current()?)?;
        Ok(Some(event))
    }

    fn saved_state(&self) -> Result<SavedState, TrainError> {
        let config = &self.job.config;
        Ok(SavedState {
            step: self.step,
            updates: self.trainer.updates,
            skipped_steps: self.skipped_steps,
            skipped_in_a_row: self.skipped_in_a_row,
            degree: config.model.degree,
            embedding_width: self.data.width,
            kept_dimensions: self.trainer.work.method.codes().and_then(Codes::filter).map(Filter::indices),
            bookmark: self.data.bookmark(self.position),
            seed: config.train.seed,
            threads: config.train.threads(),
            config: serde_json::to_value(config).map_err(|error| TrainError::Config(error.to_string()))?,
        })
    }
}

/// Whether something that happens every `every` steps (never, if 0) happens after step `step`.
fn is_due(every: u64, step: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}

fn report_parts(written: Option<PartsWritten>, send: SendMessage<'_>) -> Result<(), TrainError> {
    written.map_or(Ok(()), |written| send(ToLauncher::Parts(written)))
}
