//! What rank 0 tells TensorBoard and the launcher.

use std::time::{Duration, Instant};

use locdiff_launch::config::RunConfig;
use locdiff_launch::protocol::{Progress, QuickEvaluation, ToLauncher, TrainJob};

use super::error::TrainError;
use super::step::StepOutcome;
use crate::metrics::THRESHOLDS_KM;
use crate::tensorboard::Board;

/// Tells the launcher something.
pub(super) type Tell<'a> = &'a mut dyn FnMut(ToLauncher) -> Result<(), TrainError>;

/// The observer of a run; on other ranks than 0 it says nothing.
pub(super) struct Observer {
    board: Option<Board>,
    steps: u64,
    log_every: u64,
    global_batch: u32,
    restarts: u32,
    since: Instant,
    steps_since: u64,
    waited_since: Duration,
    slowest_since: Duration,
    skipped_steps: u64,
}

impl Observer {
    /// For a run that stands at `step`; `is_first` on rank 0.
    pub(super) fn new(job: &TrainJob, step: u64, skipped_steps: u64, is_first: bool) -> Result<Self, TrainError> {
        let mut board = match is_first {
            true => Some(Board::open(&job.run_dir.join("tensorboard"), Some(step))?),
            false => None,
        };
        if let Some(board) = &mut board {
            board.text(board.step(), "config", &as_markdown(&job.config))?;
        }
        let train = &job.config.train;
        Ok(Self {
            board,
            steps: train.steps,
            log_every: train.log_every,
            global_batch: train.global_batch,
            restarts: job.restarts,
            since: Instant::now(),
            steps_since: 0,
            waited_since: Duration::ZERO,
            slowest_since: Duration::ZERO,
            skipped_steps,
        })
    }

    /// Takes a step in; every `log_every` steps, and after the last, says how it goes.
    pub(super) fn record(&mut self, outcome: &StepOutcome, waited: Duration, tell: Tell<'_>) -> Result<(), TrainError> {
        self.steps_since += 1;
        self.waited_since += waited;
        self.skipped_steps += u64::from(outcome.skipped.is_some());
        let Some(board) = &mut self.board else { return Ok(()) };
        if let Some(reason) = &outcome.skipped {
            tracing::warn!("step {} skipped: its gradient is not finite ({reason})", outcome.step);
        }
        if !outcome.step.is_multiple_of(self.log_every) && outcome.step != self.steps {
            return Ok(());
        }
        let seconds = self.since.elapsed().as_secs_f64().max(1e-9);
        let progress = Progress {
            step: outcome.step,
            steps: self.steps,
            loss: outcome.loss.total,
            gradient_norm: outcome.gradient_norm,
            learning_rate: outcome.learning_rate,
            samples_per_s: self.steps_since as f64 * f64::from(self.global_batch) / seconds,
            data_wait: (self.waited_since.as_secs_f64() / seconds).min(1.0),
            slowest_step_ms: 1000.0 * self.slowest_since.as_secs_f64(),
            skipped_steps: self.skipped_steps,
        };
        (self.since, self.steps_since, self.waited_since) = (Instant::now(), 0, Duration::ZERO);
        self.slowest_since = Duration::ZERO;
        board.scalars(outcome.step, &scalars(outcome, &progress, self.restarts))?;
        tell(ToLauncher::Progress(progress))
    }

    /// Takes a quick evaluation in.
    pub(super) fn evaluated(&mut self, found: &QuickEvaluation, tell: Tell<'_>) -> Result<(), TrainError> {
        let Some(board) = &mut self.board else { return Ok(()) };
        let mut scalars = vec![("validation/geo_score".to_owned(), found.score)];
        for (threshold, percent) in THRESHOLDS_KM.iter().zip(found.within_percent) {
            scalars.push((format!("validation/acc_{threshold}km"), percent));
        }
        board.scalars(found.step, &borrowed(&scalars))?;
        tell(ToLauncher::Evaluated(found.clone()))
    }

    /// Takes in how long a step took in all.
    pub(super) fn took(&mut self, whole: Duration) {
        self.slowest_since = self.slowest_since.max(whole);
    }

    /// Leaves out what went by: evaluation and checkpoints are none of training's time.
    pub(super) fn resume_clock(&mut self, away: Duration) {
        self.since += away;
    }
}

fn scalars(outcome: &StepOutcome, progress: &Progress, restarts: u32) -> Vec<(&'static str, f64)> {
    let mut scalars = vec![
        ("loss/total", outcome.loss.total),
        ("train/learning_rate", outcome.learning_rate),
        ("train/gradient_norm", outcome.gradient_norm),
        ("train/samples_per_s", progress.samples_per_s),
        ("train/data_wait_percent", 100.0 * progress.data_wait),
        ("train/slowest_step_ms", progress.slowest_step_ms),
        ("train/restarts", f64::from(restarts)),
        ("train/skipped_steps", progress.skipped_steps as f64),
    ];
    let loss = &outcome.loss;
    let parts = [("loss/kl", loss.kl), ("loss/l2", loss.l2), ("loss/l1", loss.l1), ("loss/cosine", loss.cosine)];
    scalars.extend(parts.into_iter().filter_map(|(name, value)| Some((name, value?))));
    scalars
}

fn borrowed(scalars: &[(String, f64)]) -> Vec<(&str, f64)> {
    scalars.iter().map(|(name, value)| (name.as_str(), *value)).collect()
}

/// The configuration as TensorBoard's text shows it.
fn as_markdown(config: &RunConfig) -> String {
    let text = serde_json::to_string_pretty(config).unwrap_or_else(|error| error.to_string());
    format!("```json\n{text}\n```")
}
