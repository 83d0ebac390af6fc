//! Reports the progress of training to TensorBoard and the launcher. Only rank 0 reports.

mod meter;
mod pictures;
pub(super) mod summary;
mod weights;

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use locdiff_core::config::{RunConfig, ShardsConfig, TrainConfig};
use locdiff_core::draw::answers_map;
use locdiff_core::files::FileError;
use locdiff_core::metrics::THRESHOLDS_KM;
use locdiff_core::protocol::{
    Goodput, InjectedFault, Method, Progress, QuickEvaluation, TimeBefore, ToLauncher, TrainJob,
};
use locdiff_core::tensorboard::{Hyperparameter, Hyperparameters, SteadyBoard, board_folder};
use serde_json::Value as Json;

use super::error::TrainError;
use super::step::{StepOutcome, Trainer};
use crate::shdd::Codes;

pub(super) use meter::Meter;
pub(super) use pictures::PictureData;

/// Hyperparameters that TensorBoard's HPARAMS page shows by default.
const SHOWN_FIRST: [&str; 5] =
    ["loss.anchors", "model.degree", "train.global_batch", "train.learning_rate", "train.steps"];

/// Sends a message to the launcher.
pub type SendMessage<'a> = &'a mut dyn FnMut(ToLauncher) -> Result<(), TrainError>;

/// The connection of a rank to the launcher.
pub struct Launcher<'a> {
    /// Sends a message to the launcher.
    pub send: SendMessage<'a>,
    /// Returns the next fault that the launcher has requested during training; `None` if no request is pending.
    pub next_fault: &'a mut dyn FnMut() -> Option<InjectedFault>,
}

/// Records the progress of a run. Only rank 0 reports it.
pub(super) struct Observer {
    board: Option<(SteadyBoard, Meter)>,
    train: TrainConfig,
    restarts: u32,
    nodes: u32,
    workers: u32,
    time_before: TimeBefore,
    /// How this attempt has spent its time since its first step.
    spent: Goodput,
    since: Instant,
    steps_since: u64,
    waited_since: Duration,
    slowest_since: Duration,
}

impl Observer {
    /// An observer for a run that is at `step`. Only rank 0 has a `meter`.
    pub(super) fn new(job: &TrainJob, step: u64, meter: Option<Meter>, workers: u32) -> Self {
        let board = meter.map(|meter| {
            let (folder, shown) = (board_folder(&job.run_dir), hyperparameters(&job.config, workers));
            (SteadyBoard::open(folder, step, shown, as_markdown(&job.config)), meter)
        });
        Self {
            board,
            train: job.config.train.clone(),
            restarts: job.restarts,
            nodes: job.nodes,
            workers,
            time_before: job.time_before,
            spent: Goodput::default(),
            since: Instant::now(),
            steps_since: 0,
            waited_since: Duration::ZERO,
            slowest_since: Duration::ZERO,
        }
    }

    /// Records a step. Reports progress every `train.log_every` steps and after the last step.
    pub(super) fn record(
        &mut self,
        outcome: &StepOutcome,
        skipped_steps: u64,
        waited: Duration,
        send: SendMessage<'_>,
    ) -> Result<(), TrainError> {
        self.steps_since += 1;
        self.waited_since += waited;
        let Some((board, meter)) = &mut self.board else { return Ok(()) };
        if let Some(reason) = &outcome.skipped {
            tracing::warn!("step {} skipped: the gradient is not finite ({reason})", outcome.step);
        }
        if !outcome.step.is_multiple_of(self.train.log_every) && outcome.step != self.train.steps {
            return Ok(());
        }
        let seconds = self.since.elapsed().as_secs_f64().max(1e-9);
        let waited_s = self.waited_since.as_secs_f64().min(seconds);
        self.spent.data_s += waited_s;
        self.spent.steps_s += seconds - waited_s;
        let progress = Progress {
            step: outcome.step,
            steps: self.train.steps,
            loss: outcome.loss,
            gradient_norm: outcome.gradient_norm,
            learning_rate: outcome.learning_rate,
            samples_per_s: self.steps_since as f64 * f64::from(self.train.global_batch) / seconds,
            data_wait: (self.waited_since.as_secs_f64() / seconds).min(1.0),
            slowest_step_ms: 1000.0 * self.slowest_since.as_secs_f64(),
            skipped_steps,
        };
        let mut scalars = scalars(outcome, &progress, self.restarts);
        scalars.extend([("run/nodes", f64::from(self.nodes)), ("run/workers", f64::from(self.workers))]);
        scalars.extend(goodput_scalars(&time_spent(&self.time_before, &self.spent, SystemTime::now())));
        scalars.extend(meter.scalars(self.steps_since, seconds));
        (self.since, self.steps_since, self.waited_since) = (Instant::now(), 0, Duration::ZERO);
        self.slowest_since = Duration::ZERO;
        board.write(|board| board.scalars(outcome.step, &scalars));
        send(ToLauncher::Progress(progress))
    }

    /// Injected fault: makes a write of TensorBoard events fail with `error`.
    pub(super) fn fail_write(&mut self, error: FileError) {
        if let Some((board, _)) = &mut self.board {
            board.write(|_| Err(error.into()));
        }
    }

    /// Records a quick evaluation and draws its pictures.
    pub(super) fn record_evaluation(
        &mut self,
        found: &QuickEvaluation,
        seen: &PictureData,
        codes: Option<&Codes>,
        send: SendMessage<'_>,
    ) -> Result<(), TrainError> {
        let Some((board, _)) = &mut self.board else { return Ok(()) };
        let numbers = std::iter::once(found.score).chain(found.within_percent);
        let tags = validation_tags();
        let scalars: Vec<(&str, f64)> = tags.iter().map(String::as_str).zip(numbers).collect();
        board.write(|board| board.scalars(found.step, &scalars));
        send(ToLauncher::Evaluated(found.clone()))?;
        board.write(|board| board.image(found.step, "validation/answers", &answers_map(&seen.answers)));
        let density = codes.map(|codes| pictures::density(codes, seen)).transpose()?;
        if let Some(density) = density.flatten() {
            board.write(|board| board.image(found.step, "validation/density_of_first_row", &density));
        }
        Ok(())
    }

    /// Records the durations of an iteration of the training loop. `step` is the whole iteration, including the
    /// checkpoint, but without `evaluation`. `evaluation` includes the histograms. `evaluation` and `checkpoint` do not
    /// count as training time.
    pub(super) fn add_times(&mut self, step: Duration, evaluation: Duration, checkpoint: Duration) {
        self.slowest_since = self.slowest_since.max(step);
        self.since += evaluation + checkpoint;
        self.spent.evaluation_s += evaluation.as_secs_f64();
        self.spent.checkpoint_s += checkpoint.as_secs_f64();
    }

    /// Whether rank 0 records histograms of the weights after step `step`: every `train.histogram_every` steps and
    /// after the last step. Never, if that setting is 0.
    pub(super) fn records_weights(&self, step: u64) -> bool {
        let every = self.train.histogram_every;
        every > 0 && (step.is_multiple_of(every) || step == self.train.steps)
    }

    /// Records histograms of the weights if they are due.
    pub(super) fn maybe_record_weights(&mut self, step: u64, trainer: &Trainer) -> Result<(), TrainError> {
        let is_due = self.records_weights(step);
        let Some((board, _)) = self.board.as_mut().filter(|_| is_due) else { return Ok(()) };
        let histograms = weights::histograms(trainer.work.method.parameters().iter())?;
        board.write(|board| board.histograms(step, &histograms));
        Ok(())
    }

    /// Records that the run reached its last step.
    pub(super) fn record_end(&mut self) {
        if let Some((board, _)) = &mut self.board {
            board.write(|board| board.mark_ended());
        }
    }
}

/// How the run has spent its time up to `now`. `attempt` has the times of this attempt since its first step.
fn time_spent(before: &TimeBefore, attempt: &Goodput, now: SystemTime) -> Goodput {
    let now_s = now.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    let to_first_step_s = (now_s - before.began_unix_s - attempt.total_s()).max(0.0);
    let (start_s, restart_s) = if before.is_restart { (0.0, to_first_step_s) } else { (to_first_step_s, 0.0) };
    let earlier = before.spent;
    Goodput {
        steps_s: earlier.steps_s + attempt.steps_s,
        start_s: earlier.start_s + start_s,
        data_s: earlier.data_s + attempt.data_s,
        checkpoint_s: earlier.checkpoint_s + attempt.checkpoint_s,
        evaluation_s: earlier.evaluation_s + attempt.evaluation_s,
        restart_s: earlier.restart_s + restart_s,
        lost_s: earlier.lost_s,
    }
}

/// The goodput and the shares of the time that went into all other activities, in percent.
fn goodput_scalars(spent: &Goodput) -> impl Iterator<Item = (&'static str, f64)> {
    const TAGS: [&str; 6] = [
        "run/start_percent",
        "run/data_percent",
        "run/checkpoint_percent",
        "run/evaluation_percent",
        "run/restart_percent",
        "run/lost_steps_percent",
    ];
    let total_s = spent.total_s();
    let shares = TAGS.into_iter().zip(spent.losses()).map(move |(tag, (_, seconds))| (tag, 100.0 * seconds / total_s));
    spent.percent().map(|percent| ("run/goodput_percent", percent)).into_iter().chain(shares)
}

fn scalars(outcome: &StepOutcome, progress: &Progress, restarts: u32) -> Vec<(&'static str, f64)> {
    let mut scalars = vec![
        ("loss/total", outcome.loss),
        ("train/learning_rate", outcome.learning_rate),
        ("train/gradient_norm", outcome.gradient_norm),
        ("train/samples_per_s", progress.samples_per_s),
        ("train/data_wait_percent", 100.0 * progress.data_wait),
        ("train/slowest_step_ms", progress.slowest_step_ms),
        ("train/restarts", f64::from(restarts)),
        ("train/skipped_steps", progress.skipped_steps as f64),
    ];
    scalars.extend(&outcome.loss_parts);
    scalars
}

/// TensorBoard tags of a quick evaluation: the score and the accuracies.
fn validation_tags() -> Vec<String> {
    let accuracies = THRESHOLDS_KM.iter().map(|threshold| format!("validation/acc_{threshold}km"));
    std::iter::once("validation/geo_score".to_owned()).chain(accuracies).collect()
}

/// TensorBoard tags of the evaluation on the test rows after training, for LocDiff and LocDiff-H.
fn test_tags(thresholds_km: &[f64]) -> impl Iterator<Item = String> + '_ {
    [Method::Locdiff, Method::LocdiffH].into_iter().flat_map(|method| {
        let tag = move |name: &str| format!("test/{}/{name}", method.name());
        let accuracies = thresholds_km.iter().map(move |threshold| tag(&format!("acc_{threshold}km")));
        std::iter::once(tag("geo_score")).chain(accuracies)
    })
}

/// The content of TensorBoard's HPARAMS page: all settings of the model and its training, and the final loss and scores
/// as metrics.
fn hyperparameters(config: &RunConfig, workers: u32) -> Hyperparameters {
    let mut metrics = vec!["loss/total".to_owned()];
    if !config.shards.validation.is_empty() && config.eval.every > 0 {
        metrics.extend(validation_tags());
    }
    if config.eval.after_train && ShardsConfig::may_exist_at(&config.shards.test) {
        metrics.extend(test_tags(&config.eval.thresholds_km));
    }
    let mut values = BTreeMap::from([("workers".to_owned(), Hyperparameter::Number(f64::from(workers)))]);
    let sections = serde_json::to_value(config).unwrap_or_default();
    for section in ["model", "diffusion", "loss", "train"] {
        let fields = sections.get(section).and_then(Json::as_object).into_iter().flatten();
        values.extend(fields.map(|(field, value)| (format!("{section}.{field}"), hyperparameter(value))));
    }
    Hyperparameters { values, shown_first: SHOWN_FIRST.map(str::to_owned).to_vec(), metrics }
}

fn hyperparameter(value: &Json) -> Hyperparameter {
    match value {
        Json::Bool(flag) => Hyperparameter::Flag(*flag),
        Json::String(text) => Hyperparameter::Text(text.clone()),
        other => other.as_f64().map_or_else(|| Hyperparameter::Text(other.to_string()), Hyperparameter::Number),
    }
}

/// The configuration as Markdown, for TensorBoard's text page.
fn as_markdown(config: &RunConfig) -> String {
    let text = serde_json::to_string_pretty(config).unwrap_or_else(|error| error.to_string());
    format!("```json\n{text}\n```")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goodput_adds_this_attempt_to_the_time_before() {
        let spent = Goodput { steps_s: 30.0, start_s: 25.0, lost_s: 5.0, ..Goodput::default() };
        let before = TimeBefore { spent, began_unix_s: 1000.0, is_restart: true };
        let attempt = Goodput { steps_s: 20.0, data_s: 4.0, checkpoint_s: 2.0, ..Goodput::default() };
        let at = |seconds| time_spent(&before, &attempt, UNIX_EPOCH + Duration::from_secs(seconds));
        let wanted = Goodput {
            steps_s: 50.0,
            start_s: 25.0,
            data_s: 4.0,
            checkpoint_s: 2.0,
            restart_s: 14.0,
            lost_s: 5.0,
            evaluation_s: 0.0,
        };
        assert_eq!(at(1040), wanted);
        let shown: Vec<(&str, f64)> = goodput_scalars(&wanted).collect();
        assert_eq!(
            (shown.len(), shown[0], shown[5]),
            (7, ("run/goodput_percent", 50.0), ("run/restart_percent", 14.0))
        );
        // The clock was set back to a time before the attempt began.
        assert_eq!(at(900), Goodput { restart_s: 0.0, ..wanted });
    }
}
