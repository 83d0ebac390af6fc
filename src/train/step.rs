//! One optimiser step, as the host sees it: feed the device, let it work, read six numbers back.
//!
//! On CUDA the first steps run eagerly; then the step is recorded once and replayed, with its collectives, as one graph. Either is
//! waited for with a limit: a peer that died in the middle would keep the stream for ever.

use std::time::{Duration, Instant};

use locdiff_core::config::RunConfig;
use tch::Device;

use super::error::TrainError;
use super::feed::Form;
use super::schedule::{ema_decay, learning_rate};
use super::work::{Report, Work};
use crate::comm::{AbortHandle, CommError, Communicator, Failure};
use crate::loss::Losses;
use crate::native::cuda::{self, Event, Graph, Stream, WaitError};
use crate::shards::Batch;
use crate::shdd::{Filter, uniform_points};

/// Eager steps before a step is recorded: libraries that set themselves up at first use must not do so in a recording.
const EAGER_STEPS: u32 = 5;
/// How long the end of aborted collectives is waited for.
const ABORT_PATIENCE: Duration = Duration::from_secs(1);

/// What a step did.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct StepOutcome {
    /// Steps made, this one included.
    pub(super) step: u64,
    /// The weighted sum of all parts, a mean over the global batch.
    pub(super) loss: f64,
    /// The parts that have a weight, by their tags.
    pub(super) loss_parts: Vec<(&'static str, f64)>,
    /// Norm of the whole gradient before clipping.
    pub(super) gradient_norm: f64,
    /// Learning rate of the step.
    pub(super) learning_rate: f64,
    /// The gradient was not finite: nothing was updated. What is known of it.
    pub(super) skipped: Option<String>,
}

/// A replica of the model, or a rank's piece of one, and how it is trained.
#[derive(Debug)]
pub(super) struct Trainer {
    /// Before the work, whose communicators end only when no graph holds them.
    recorded: Option<Recorded>,
    pub(super) work: Work,
    pub(super) updates: u64,
    /// The present form, and the eager steps made in it.
    eager: (Form, u32),
    /// What the end of a step is waited for with; none on the CPU, which is done when it returns.
    finished: Option<Event>,
    /// How many anchors this rank has, and the first of them.
    anchors: (usize, u64),
    rank: u32,
    timeout: Duration,
    abort: AbortHandle,
}

/// A step that can be replayed.
#[derive(Debug)]
struct Recorded {
    report: Report,
    graph: Graph,
}

impl Trainer {
    /// First weights, for the place of this rank in the layout.
    pub(super) fn new(
        config: &RunConfig,
        embedding_width: u32,
        filter: Option<Filter>,
        ranks: &Communicator,
    ) -> Result<Self, TrainError> {
        // Without a KL they may be fewer than ranks; nobody looks at them then.
        let anchors = (config.loss.anchors as usize / ranks.tensor().size() as usize).max(1);
        let is_on_gpu = ranks.world().device().is_cuda();
        Ok(Self {
            recorded: None,
            work: Work::new(config, embedding_width, filter, ranks)?,
            updates: 0,
            eager: (Form { slice: 0..0, global_batch: 0 }, 0),
            finished: if is_on_gpu { Some(Event::new()?) } else { None },
            anchors: (anchors, u64::from(ranks.tensor().rank()) * anchors as u64),
            rank: ranks.rank(),
            timeout: ranks.world().timeout(),
            abort: ranks.abort_handle(),
        })
    }

    /// Makes the step with this number, from 0, on this rank's slice of its global batch.
    pub(super) fn step(&mut self, step: u64, batch: &Batch) -> Result<StepOutcome, TrainError> {
        let _span = tracing::debug_span!("step", rank = self.rank, step).entered();
        let train = &self.work.config.train;
        let learning_rate = learning_rate(train, step);
        let (anchors, first_anchor) = self.anchors;
        let feed = &mut self.work.feed;
        feed.take(step, batch, uniform_points(train.seed, step, first_anchor, anchors)?)?;
        let _ = feed.learning_rate.f_fill_(learning_rate)?;
        let _ = feed.average_weight.f_fill_(1.0 - ema_decay(train, self.updates))?;
        self.record_where_due()?;
        let mut recorded = self.recorded.take();
        let eager;
        let report = match &mut recorded {
            Some(recorded) => {
                recorded.graph.replay()?;
                &recorded.report
            }
            None => {
                eager = self.work.run()?;
                &eager
            }
        };
        match self.device_is_done() {
            Ok(()) => {}
            Err(WaitError::TimedOut(after)) => return Err(self.give_up(recorded, after)),
            Err(WaitError::Native(error)) => return Err(error.into()),
        }
        let outcome = self.outcome(step, learning_rate, report)?;
        self.recorded = recorded;
        self.work.feed.release();
        Ok(outcome)
    }

    /// Waits for the device, no longer than a collective may take. Collectives on a stream have no other limit.
    fn device_is_done(&mut self) -> Result<(), WaitError> {
        let Some(finished) = &mut self.finished else { return Ok(()) };
        finished.record(&Stream::current()?)?;
        finished.wait_for(self.timeout)
    }

    /// The step did not end in time: some peer did not take part. Its collectives are aborted.
    fn give_up(&self, recorded: Option<Recorded>, after: Duration) -> TrainError {
        let aborting = self.abort.abort_in_background();
        // NCCL ends an abort only when no graph holds its collectives.
        drop(recorded);
        let started = Instant::now();
        while !aborting.is_finished() && started.elapsed() < ABORT_PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
        let text = "the step did not end: some rank did not take part".to_owned();
        TrainError::Comm(CommError::Collective {
            operation: "training step",
            group: "world".to_owned(),
            rank: self.rank,
            size: self.abort.size(),
            failure: Failure::TimedOut { after, text },
        })
    }

    /// Records the step of this form, once it has run eagerly for a while. The recording itself computes nothing.
    fn record_where_due(&mut self) -> Result<(), TrainError> {
        let form = self.work.feed.form.clone();
        if form != self.eager.0 {
            (self.recorded, self.eager) = (None, (form, 0));
        }
        if self.recorded.is_some() || !self.work.config.train.cuda_graph || self.finished.is_none() {
            return Ok(());
        }
        if self.eager.1 < EAGER_STEPS {
            self.eager.1 += 1;
            return Ok(());
        }
        // What the eager steps used goes back, or it would be held beside the graph's own memory.
        cuda::empty_cache()?;
        let (graph, report) = Graph::capture("training step", || self.work.run())?;
        tracing::info!("the step is one graph of {} nodes from now on", graph.nodes());
        self.recorded = Some(Recorded { report, graph });
        Ok(())
    }

    /// Reads what the device found.
    fn outcome(&mut self, step: u64, learning_rate: f64, report: &Report) -> Result<StepOutcome, TrainError> {
        let numbers = Vec::<f64>::try_from(report.numbers.f_to_device(Device::Cpu)?)?;
        let last = &report.last;
        let parts =
            [("loss/kl", &last.kl), ("loss/l2", &last.l2), ("loss/l1", &last.l1), ("loss/cosine", &last.cosine)];
        let weighed = parts.into_iter().zip(&numbers[1..]).filter(|((_, part), _)| part.is_some());
        let loss_parts = weighed.map(|((tag, _), mean)| (tag, *mean)).collect();
        let gradient_norm = numbers[5].sqrt();
        let skipped = (!gradient_norm.is_finite()).then(|| why_not_finite(step, self.rank, last));
        self.updates += u64::from(skipped.is_none());
        Ok(StepOutcome { step: step + 1, loss: numbers[0], loss_parts, gradient_norm, learning_rate, skipped })
    }
}

/// This rank's view of a gradient that is not finite.
fn why_not_finite(step: u64, rank: u32, last: &Losses) -> String {
    match last.check(step + 1, rank) {
        Err(error) => error.to_string(),
        Ok(_) => format!("step {}, rank {rank}: the loss here is finite, the gradient is not", step + 1),
    }
}
