//! The loop.

use std::time::Instant;

use locdiff_core::files::Files;
use locdiff_core::protocol::{Fault, PartsWritten, QuickEvaluation, ToLauncher, TrainJob, TrainSummary};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tch::Device;

use super::data::{Data, open_validation};
use super::error::TrainError;
use super::meter::Meter;
use super::observe::{Observer, Tell};
use super::quick::Quick;
use super::step::{StepOutcome, Trainer};
use crate::checkpoint::{Background, Snapshot};
use crate::comm::Communicator;
use crate::infer::{Saved, SavedState};
use crate::native::cuda::{self, Event, Stream};
use crate::shards::{Batches, Position};

/// Trains to the last step of the configuration, on every rank of `ranks`.
pub fn run(job: &TrainJob, attempt: u32, ranks: &Communicator, tell: Tell<'_>) -> Result<TrainSummary, TrainError> {
    let mut training = Training::begin(job, attempt, ranks)?;
    let from_step = training.step;
    let mut last = None;
    while training.step < job.config.train.steps {
        let started = Instant::now();
        training.break_on_purpose(tell)?;
        let batch = training.batches.next()?;
        let outcome = training.trainer.step(training.step, &batch)?;
        training.take_in(&outcome)?;
        training.observer.record(&outcome, training.skipped_steps, batch.waited, tell)?;
        let away = Instant::now();
        training.observer.maybe_weights(training.step, &training.trainer)?;
        let score = training.maybe_evaluate(tell)?;
        let evaluated = away.elapsed();
        training.maybe_save(score, tell)?;
        training.observer.took(started.elapsed() - evaluated, away.elapsed());
        last = Some(outcome.loss);
    }
    tell_written(training.writer.wait()?, tell)?;
    training.observer.ended()?;
    let (step, skipped_steps, evaluation) = (training.step, training.skipped_steps, training.evaluation);
    Ok(TrainSummary { step, from_step, loss: last, skipped_steps, evaluation })
}

/// A run under way.
struct Training<'a> {
    job: &'a TrainJob,
    attempt: u32,
    ranks: &'a Communicator,
    data: Data,
    batches: Batches,
    trainer: Trainer,
    quick: Option<Quick>,
    observer: Observer,
    writer: Background,
    step: u64,
    skipped_steps: u64,
    skipped_in_a_row: u32,
    best_score: Option<f64>,
    evaluation: Option<QuickEvaluation>,
}

impl<'a> Training<'a> {
    fn begin(job: &'a TrainJob, attempt: u32, ranks: &'a Communicator) -> Result<Self, TrainError> {
        let config = &job.config;
        if let Device::Cuda(index) = ranks.world().device() {
            cuda::set_device(index)?;
        }
        let resumed = job.resume.as_deref().map(Saved::open).transpose()?;
        let initial = job.init_from.as_deref().map(Saved::open).transpose()?;
        let known = resumed.as_ref().or(initial.as_ref());
        let then = resumed.as_ref().map(|saved| &saved.state.bookmark);
        let data = Data::open(config, ranks, known.is_none(), then)?;
        if let Some(saved) = known {
            saved.check_network(config, data.width)?;
        }
        let filter = match known {
            Some(saved) => saved.state.filter()?,
            None => data.filter.clone(),
        };
        let mut trainer = Trainer::new(config, data.width, filter, ranks)?;
        if let Some([mean, deviation]) = &data.statistics {
            trainer.work.network.standardise(mean, deviation)?;
        }
        if let Some(saved) = initial.as_ref().filter(|_| resumed.is_none()) {
            trainer.start_from(saved)?;
            if let Some(words) = saved.other_noise(config).filter(|_| ranks.world().rank() == 0) {
                tracing::warn!("{words}");
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
        (data, trainer): (Data, Trainer),
        start: Position,
        state: Option<&SavedState>,
    ) -> Result<Self, TrainError> {
        let config = &job.config;
        let step = state.map_or(0, |state| state.step);
        let skipped_steps = state.map_or(0, |state| state.skipped_steps);
        let is_first = ranks.rank() == 0;
        let meter = Meter::new(config, &trainer, ranks);
        let (batches, words) = data.batches(config, ranks, start)?;
        if is_first {
            let (plan, views) = (&data.plan, data.plan.layout().views);
            let (rows, steps) = (plan.rows(), plan.steps());
            let tail = match (plan.dropped_rows(), plan.padded_rows()) {
                (0, 0) => String::new(),
                (dropped, 0) => format!(", {dropped} rows left out of each"),
                (_, padded) => format!(", {padded} rows shown twice in each"),
            };
            tracing::info!("{rows} rows of {views} views from {}: {words}", config.shards.train);
            tracing::info!("epochs of {steps} steps{tail}");
        }
        let validation = Quick::is_wanted(config).then(|| open_validation(config, ranks.world())).transpose()?;
        let quick = |rows| Quick::new(config, data.width, trainer.work.codes.filter(), ranks.world(), rows);
        Ok(Self {
            quick: validation.map(quick).transpose()?,
            observer: Observer::new(job, step, is_first.then_some(meter), ranks.world().size())?,
            writer: Background::new(Files::real(), job.run_dir.clone(), ranks.world().device())?,
            skipped_in_a_row: state.map_or(0, |state| state.skipped_in_a_row),
            best_score: job.best_score,
            evaluation: None,
            job,
            attempt,
            ranks,
            data,
            batches,
            trainer,
            step,
            skipped_steps,
        })
    }

    /// Does what was asked for with `--inject`; the launcher is told first, so that a fault happens once.
    fn break_on_purpose(&self, tell: Tell<'_>) -> Result<(), TrainError> {
        let is_due = |fault: &&Fault| match fault {
            Fault::Kill { rank, step } => *rank == self.ranks.rank() && *step == self.step + 1,
        };
        if let Some(fault) = self.job.faults.iter().find(is_due) {
            tell(ToLauncher::Breaking(*fault))?;
            let _ = kill(Pid::this(), Signal::SIGKILL);
        }
        Ok(())
    }

    fn take_in(&mut self, outcome: &StepOutcome) -> Result<(), TrainError> {
        self.step = outcome.step;
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
            "step {}: the gradient was not finite in {} steps in a row (train.nonfinite_steps_max); {last}; lower \
             train.learning_rate, or go back to an older checkpoint",
            self.step, self.skipped_in_a_row
        )))
    }

    fn is_last(&self) -> bool {
        self.step == self.job.config.train.steps
    }

    /// The validation score of this step, where it is due.
    fn maybe_evaluate(&mut self, tell: Tell<'_>) -> Result<Option<f64>, TrainError> {
        let (every, is_last) = (self.job.config.eval.every, self.is_last());
        let Some(quick) = self.quick.as_mut().filter(|_| is_last || self.step.is_multiple_of(every)) else {
            return Ok(None);
        };
        let (found, seen) = quick.evaluate(self.step, &self.trainer.averaged()?)?;
        self.observer.evaluated(&found, &seen, &self.trainer.work.codes, tell)?;
        let score = found.score;
        self.evaluation = Some(found);
        Ok(Some(score))
    }

    /// Hands a checkpoint to the writer where one is due: every so many steps, after the last, and at every new best score.
    fn maybe_save(&mut self, score: Option<f64>, tell: Tell<'_>) -> Result<(), TrainError> {
        let score = score.filter(|score| score.is_finite());
        let is_best = score.is_some_and(|score| self.best_score.is_none_or(|best| score > best));
        if is_best {
            self.best_score = score;
        }
        if is_best || self.is_last() || self.step.is_multiple_of(self.job.config.checkpoint.every) {
            // First, so that there is never more than one copy of the state.
            tell_written(self.writer.wait()?, tell)?;
            self.trainer.work.agree()?;
            let parts = self.trainer.parts(&self.saved_state()?, self.ranks.place(), self.ranks.layout())?;
            let ready = self.mark()?;
            let snapshot = Snapshot { step: self.step, attempt: self.attempt, score, parts, ready };
            tell_written(self.writer.submit(snapshot)?, tell)?;
        }
        tell_written(self.writer.poll()?, tell)
    }

    /// Where the device stands now.
    fn mark(&self) -> Result<Option<Event>, TrainError> {
        if !self.ranks.world().device().is_cuda() {
            return Ok(None);
        }
        let mut event = Event::new()?;
        event.record(&Stream::current()?)?;
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
            kept_dimensions: self.trainer.work.codes.filter().map(crate::shdd::Filter::indices),
            bookmark: self.data.bookmark(self.batches.position()),
            seed: config.train.seed,
            threads: config.train.threads,
            config: serde_json::to_value(config).map_err(|error| TrainError::Config(error.to_string()))?,
        })
    }
}

fn tell_written(written: Option<PartsWritten>, tell: Tell<'_>) -> Result<(), TrainError> {
    written.map_or(Ok(()), |written| tell(ToLauncher::Parts(written)))
}
