//! One optimiser step, as the host sees it: feed the device, let it work, read six numbers back.
//!
//! On CUDA the first steps run eagerly; then the step is recorded once and replayed, with its collectives, as one graph. A replay
//! is waited for with a limit: a peer that died in the middle would keep the stream for ever.

use std::time::Duration;

use locdiff_launch::config::{RunConfig, TrainConfig};
use tch::{Device, Tensor};

use super::codes::Codes;
use super::error::TrainError;
use super::feed::{Form, Settings};
use super::schedule::{ema_decay, learning_rate};
use super::work::{Report, Work};
use crate::comm::{AbortHandle, CommError, Communicator, Failure};
use crate::diffusion::NoiseSchedule;
use crate::geo::UnitVector;
use crate::loss::Losses;
use crate::model::CsUnet;
use crate::native::cuda::{self, Graph, GraphError};
use crate::shards::Batch;
use crate::shdd::{Filter, uniform_points};

/// Eager steps before a step is recorded: libraries that set themselves up at first use must not do so in a recording.
const EAGER_STEPS: u32 = 5;
/// How long the end of aborted collectives is waited for.
const ABORT_PATIENCE: Duration = Duration::from_secs(1);

/// Means over the global batch; none: the part has no weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossParts {
    /// The weighted sum.
    pub total: f64,
    /// Anchor KL.
    pub kl: Option<f64>,
    /// Mean squared error.
    pub l2: Option<f64>,
    /// Mean absolute error.
    pub l1: Option<f64>,
    /// One minus cosine similarity.
    pub cosine: Option<f64>,
}

/// What a step did.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutcome {
    /// Steps made, this one included.
    pub step: u64,
    /// Losses over the global batch.
    pub loss: LossParts,
    /// Norm of the whole gradient before clipping.
    pub gradient_norm: f64,
    /// Learning rate of the step.
    pub learning_rate: f64,
    /// The gradient was not finite: nothing was updated. What is known of it.
    pub skipped: Option<String>,
}

/// A replica of the model, or a rank's piece of one, and how it is trained.
#[derive(Debug)]
pub struct Trainer {
    /// Before the work, whose communicators end only when no graph holds them.
    recorded: Option<Recorded>,
    pub(super) work: Work,
    pub(super) updates: u64,
    /// Eager steps made in the present form.
    eager_steps: u32,
    train: TrainConfig,
    /// How many anchors this rank has, and the first of them.
    anchors: (usize, u64),
    rank: u32,
    timeout: Duration,
    abort: AbortHandle,
}

/// A step that can be replayed.
#[derive(Debug)]
struct Recorded {
    form: Form,
    report: Report,
    graph: Graph,
}

impl Trainer {
    /// First weights, for the place of this rank in the layout.
    pub fn new(
        config: &RunConfig,
        embedding_width: u32,
        filter: Option<Filter>,
        ranks: &Communicator,
    ) -> Result<Self, TrainError> {
        let anchors = config.loss.anchors as usize / ranks.tensor().size() as usize;
        Ok(Self {
            recorded: None,
            work: Work::new(config, embedding_width, filter, ranks)?,
            updates: 0,
            eager_steps: 0,
            train: config.train.clone(),
            anchors: (anchors, u64::from(ranks.tensor().rank()) * anchors as u64),
            rank: ranks.rank(),
            timeout: ranks.world().timeout(),
            abort: ranks.abort_handle(),
        })
    }

    /// The network with the weights of the last step, or this rank's pieces.
    pub fn network(&self) -> &CsUnet {
        &self.work.network
    }

    /// Codes as the network sees them.
    pub fn codes(&self) -> &Codes {
        &self.work.codes
    }

    /// The noise schedule.
    pub fn schedule(&self) -> &NoiseSchedule {
        &self.work.schedule
    }

    /// Whether steps are replayed by now.
    pub fn is_recorded(&self) -> bool {
        self.recorded.is_some()
    }

    /// Makes the step with this number, from 0, on this rank's slice of its global batch.
    pub fn step(&mut self, step: u64, batch: &Batch) -> Result<StepOutcome, TrainError> {
        let _span = tracing::debug_span!("step", rank = self.rank, step).entered();
        let learning_rate = learning_rate(&self.train, step);
        let settings = Settings {
            step,
            learning_rate,
            average_weight: 1.0 - ema_decay(&self.train, self.updates),
            anchors: self.own_anchors(step)?,
        };
        self.work.feed.take(settings, batch)?;
        self.record_where_due()?;
        match self.recorded.take() {
            Some(recorded) => {
                let recorded = self.replay(recorded)?;
                let outcome = self.outcome(step, learning_rate, &recorded.report);
                self.recorded = Some(recorded);
                outcome
            }
            None => {
                let report = self.work.run()?;
                self.eager_steps += 1;
                self.outcome(step, learning_rate, &report)
            }
        }
    }

    /// This rank's share of the step's anchors.
    fn own_anchors(&self, step: u64) -> Result<Vec<UnitVector>, TrainError> {
        let (count, first) = self.anchors;
        Ok(uniform_points(self.train.seed, step, first, count)?)
    }

    /// Records the step of this form, once it has run eagerly for a while. The recording itself computes nothing.
    fn record_where_due(&mut self) -> Result<(), TrainError> {
        let form = &self.work.feed.form;
        if self.recorded.as_ref().is_some_and(|recorded| recorded.form != *form) {
            (self.recorded, self.eager_steps) = (None, 0);
        }
        let is_due = self.recorded.is_none() && self.eager_steps >= EAGER_STEPS;
        if !is_due || !self.train.cuda_graph || self.work.feed.image_be.device() == Device::Cpu {
            return Ok(());
        }
        let form = form.clone();
        // What the eager steps used goes back, or it would be held beside the graph's own memory.
        cuda::empty_cache()?;
        let (graph, report) = Graph::capture("training step", || self.work.run())?;
        tracing::info!("the step is one graph of {} nodes from now on", graph.nodes());
        self.recorded = Some(Recorded { form, report, graph });
        Ok(())
    }

    /// Replays the step. Where it does not end in time its collectives are aborted: some peer did not take part.
    fn replay(&self, mut recorded: Recorded) -> Result<Recorded, TrainError> {
        let mut aborting = None;
        let replayed = recorded.graph.replay_within(self.timeout, || aborting = Some(self.abort.abort_in_background()));
        match replayed {
            Ok(()) => Ok(recorded),
            Err(GraphError::TimedOut { after, .. }) => {
                // NCCL ends an abort only when no graph holds its collectives.
                drop(recorded);
                let started = std::time::Instant::now();
                while aborting.as_ref().is_some_and(|thread| !thread.is_finished())
                    && started.elapsed() < ABORT_PATIENCE
                {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(self.timed_out(after).into())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn timed_out(&self, after: Duration) -> CommError {
        let text = "a replayed step did not end: some rank did not take part".to_owned();
        CommError::Collective {
            operation: "training step",
            group: "world".to_owned(),
            rank: self.rank,
            size: self.abort.size(),
            failure: Failure::TimedOut { after, text },
        }
    }

    /// Reads what the device found. The one place where the host waits for an eager step.
    fn outcome(&mut self, step: u64, learning_rate: f64, report: &Report) -> Result<StepOutcome, TrainError> {
        let numbers = Vec::<f64>::try_from(report.numbers.f_to_device(Device::Cpu)?)?;
        let last = &report.last;
        let part = |index: usize, part: &Option<Tensor>| part.as_ref().map(|_| numbers[index]);
        let loss = LossParts {
            total: numbers[0],
            kl: part(1, &last.kl),
            l2: part(2, &last.l2),
            l1: part(3, &last.l1),
            cosine: part(4, &last.cosine),
        };
        let gradient_norm = numbers[5].sqrt();
        let skipped = (!gradient_norm.is_finite()).then(|| why_not_finite(step, self.rank, last));
        self.updates += u64::from(skipped.is_none());
        Ok(StepOutcome { step: step + 1, loss, gradient_norm, learning_rate, skipped })
    }
}

/// A copy that shares nothing, without a gradient.
pub(super) fn duplicate(tensor: &Tensor) -> Result<Tensor, tch::TchError> {
    let _without_gradients = tch::no_grad_guard();
    let tensor = tensor.f_detach()?;
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(&tensor)?;
    Ok(copy)
}

/// This rank's view of a gradient that is not finite.
fn why_not_finite(step: u64, rank: u32, last: &Losses) -> String {
    match last.check(step + 1, rank) {
        Err(error) => error.to_string(),
        Ok(_) => format!("step {}, rank {rank}: the loss here is finite, the gradient is not", step + 1),
    }
}
