//! The part of an optimiser step that runs on the host. It passes the inputs to the device, starts the work, and reads
//! a few numbers back.
//!
//! On CUDA the first steps run eagerly. Then the step, with its collectives, is recorded as a graph and replayed,
//! unless `train.cuda_graph` is off. If the engine allows it, the host launches a step before it reads the numbers of
//! the previous step, so that the device need not wait for the host. The host waits for every step with a timeout,
//! because a peer that dies during the step would block the stream forever.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use locdiff_core::config::RunConfig;
use tch::{Kind, Tensor};

use super::error::TrainError;
use super::replicas::{Replayed, digest, flip_bit, gather, minority, wrong_ranks};
use super::schedule::{ema_decay, learning_rate};
use super::work::{Form, Report, Requests, StepNumbers, Work, duplicate};
use crate::comm::{AbortHandle, CollectiveFailure, CommError, Communicator, Group};
use crate::loss::not_finite;
use crate::native::cuda::{self, CudaEvent, CudaStream, Graph, WaitError};
use crate::native::host::{copy_async, pinned};
use crate::shards::Batch;
use crate::shdd::Filter;

/// Number of eager steps before a step is recorded as a graph. Libraries that initialise themselves on first use must
/// do so before the recording.
const EAGER_STEPS: u32 = 5;
/// How long to wait for aborted collectives to end.
const ABORT_PATIENCE: Duration = Duration::from_secs(1);

/// The result of a step.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct StepOutcome {
    /// Steps done, including this one.
    pub(super) step: u64,
    /// The total loss: weighted sum of all parts, averaged over the global batch.
    pub(super) loss: f64,
    /// The parts of the loss whose weight is not 0, each with its TensorBoard tag.
    pub(super) loss_parts: Vec<(&'static str, f64)>,
    /// Norm of the whole gradient before clipping.
    pub(super) gradient_norm: f64,
    /// Learning rate of the step.
    pub(super) learning_rate: f64,
    /// The reason why the gradient was not finite and nothing was updated; `None` if the gradient was finite.
    pub(super) skipped: Option<String>,
    /// The requests of all ranks, added up. The result is the same on every rank.
    pub(super) requests: Requests,
}

/// What a step does besides training.
#[derive(Default)]
pub(super) struct StepOptions<'a> {
    /// What this rank tells the other ranks in this step, for example that it was asked to stop.
    pub(super) requests: Requests,
    /// Injected fault: flip a bit of this rank's gradient.
    pub(super) flips_gradient: bool,
    /// Reads the rows of another data-parallel rank; `None` if the ranks do not check each other's gradients in this
    /// step.
    pub(super) rows_of: Option<&'a dyn Fn(u32) -> Result<Batch, TrainError>>,
}

/// Trains a replica of the model or, with tensor parallelism, this rank's piece of a replica.
#[derive(Debug)]
pub(super) struct Trainer {
    /// The recorded step. This field is declared before `work`, so that the graph is dropped before the communicators:
    /// a communicator can end only when no graph holds it.
    recorded: Option<Recorded>,
    pub(super) work: Work,
    pub(super) updates: u64,
    /// The [`Form`] of the current batch, and the number of eager steps done with batches of this form.
    eager: (Form, u32),
    /// The steps that were launched but not finished, oldest first.
    in_flight: VecDeque<InFlight>,
    is_on_gpu: bool,
    rank: u32,
    timeout: Duration,
    abort: AbortHandle,
}

/// A step that was launched.
#[derive(Debug)]
struct InFlight {
    step: u64,
    learning_rate: f64,
    /// The numbers of the [`Report`] in main memory, once the step is done.
    numbers: Tensor,
    /// Event that the GPU signals at the end of the step; `None` on the CPU, where calls are synchronous.
    done: Option<CudaEvent>,
}

impl InFlight {
    /// Waits until the device has finished the step. The wait ends with an error after `timeout`, the time limit of a
    /// collective, because collectives on a stream have no other timeout.
    fn wait(&self, timeout: Duration) -> Result<(), WaitError> {
        self.done.as_ref().map_or(Ok(()), |done| done.wait_for(timeout))
    }
}

/// A step, recorded as a CUDA graph.
#[derive(Debug)]
struct Recorded {
    report: Report,
    graph: Graph,
}

impl Trainer {
    /// A trainer with initial weights, for this rank's position in the layout.
    pub(super) fn new(
        config: &RunConfig,
        embedding_width: u32,
        filter: Option<Filter>,
        ranks: &Communicator,
    ) -> Result<Self, TrainError> {
        let is_on_gpu = ranks.world().device().is_cuda();
        Ok(Self {
            recorded: None,
            work: Work::new(config, embedding_width, filter, ranks)?,
            updates: 0,
            eager: (Form::default(), 0),
            in_flight: VecDeque::new(),
            is_on_gpu,
            rank: ranks.rank(),
            timeout: ranks.world().timeout(),
            abort: ranks.abort_handle(),
        })
    }

    /// Number of nodes of the graph of a step; `None` if no step was recorded.
    pub(super) fn graph_nodes(&self) -> Option<usize> {
        self.recorded.as_ref().map(|recorded| recorded.graph.nodes())
    }

    /// The number of steps that were launched but not finished.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Launches step `step`, counted from 0, on this rank's slice of the global batch. [`Trainer::finish`] returns its
    /// result. If the engine cannot run ahead ([`Work::can_run_ahead`]), all earlier steps must be finished.
    pub(super) fn launch(&mut self, step: u64, batch: &Batch, options: &StepOptions<'_>) -> Result<(), TrainError> {
        let _span = tracing::debug_span!("step", rank = self.rank, step).entered();
        let train = &self.work.config.train;
        let learning_rate = learning_rate(train, step);
        let average_weight = 1.0 - ema_decay(train, self.updates);
        let numbers = StepNumbers { learning_rate, average_weight, requests: options.requests };
        self.work.take(step, batch, &numbers)?;
        let is_checked = options.flips_gradient || options.rows_of.is_some();
        if !is_checked {
            self.maybe_record_graph()?;
        }
        let mut recorded = self.recorded.take();
        let eager;
        let report = match &mut recorded {
            _ if is_checked => {
                eager = self.checked_step(step, batch, &numbers, options)?;
                &eager
            }
            Some(recorded) => {
                recorded.graph.replay()?;
                &recorded.report
            }
            None => {
                eager = self.work.run()?;
                &eager
            }
        };
        let launched = self.read_later(step, learning_rate, report)?;
        self.in_flight.push_back(launched);
        self.recorded = recorded;
        self.work.release();
        Ok(())
    }

    /// Starts to copy the numbers of a step to main memory.
    fn read_later(&self, step: u64, learning_rate: f64, report: &Report) -> Result<InFlight, TrainError> {
        if !self.is_on_gpu {
            return Ok(InFlight { step, learning_rate, numbers: report.numbers.shallow_clone(), done: None });
        }
        let mut numbers = pinned(Report::NUMBERS, Kind::Double)?;
        copy_async(&mut numbers, &report.numbers)?;
        let mut done = CudaEvent::new()?;
        done.record(&CudaStream::current()?)?;
        Ok(InFlight { step, learning_rate, numbers, done: Some(done) })
    }

    /// Waits for the oldest step that is in flight, and returns its result.
    pub(super) fn finish(&mut self) -> Result<StepOutcome, TrainError> {
        let Some(oldest) = self.in_flight.pop_front() else {
            return Err(TrainError::Config("no step was launched".to_owned()));
        };
        let waited = oldest.wait(self.timeout);
        self.check_wait(waited)?;
        self.outcome(&oldest)
    }

    /// Converts the error of a wait, if there is one, to a `TrainError`. Gives up the step if the wait has timed out.
    fn check_wait(&mut self, waited: Result<(), WaitError>) -> Result<(), TrainError> {
        match waited {
            Ok(()) => Ok(()),
            Err(WaitError::TimedOut(after)) => {
                let recorded = self.recorded.take();
                Err(self.give_up(recorded, after))
            }
            Err(WaitError::Native(error)) => Err(error.into()),
        }
    }

    /// Runs the step eagerly, and reduces the gradients only after they have been checked. The result has the same bits
    /// as the result of [`Work::run`].
    fn checked_step(
        &mut self,
        step: u64,
        batch: &Batch,
        numbers: &StepNumbers,
        options: &StepOptions<'_>,
    ) -> Result<Report, TrainError> {
        let losses = self.work.compute_gradients(false)?;
        if options.flips_gradient {
            flip_bit(&self.work.gradients()[0])?;
        }
        if let Some(rows_of) = options.rows_of {
            let kept = self.work.gradients().iter().map(duplicate).collect::<Result<Vec<_>, _>>()?;
            self.replay_neighbours(step, numbers, rows_of)?;
            self.work.take(step, batch, numbers)?;
            for (mut gradient, own) in self.work.gradients().into_iter().zip(&kept) {
                gradient.f_copy_(own)?;
            }
        }
        self.work.conclude(losses)
    }

    /// Computes the gradient of the next rank's rows, and compares it with the gradient that the next rank computed. If
    /// any two ranks disagree, all ranks also compute the gradient of the previous rank's rows, to decide who is wrong.
    fn replay_neighbours(
        &mut self,
        step: u64,
        numbers: &StepNumbers,
        rows_of: &dyn Fn(u32) -> Result<Batch, TrainError>,
    ) -> Result<(), TrainError> {
        let own = digest(&self.work.gradients())?;
        let (rank, ranks) = (self.work.data.rank(), self.work.data.size());
        let next = self.replay(step, (rank + 1) % ranks, numbers, rows_of)?;
        let data = self.work.data.clone();
        let all = gather(&data, [own, next])?;
        if all.iter().zip(all.iter().cycle().skip(1)).all(|(rank, after)| rank[1] == after[0]) {
            return Ok(());
        }
        let previous = self.replay(step, (rank + ranks - 1) % ranks, numbers, rows_of)?;
        let all = gather(&data, [own, next, previous])?;
        let opinions: Vec<Replayed> =
            all.into_iter().map(|[own, next, previous]| Replayed { own, next, previous }).collect();
        Err(self.corrupted(step + 1, "the gradient", &wrong_ranks(&opinions)))
    }

    /// Computes the gradient of another rank's rows, and returns the digest of the gradient.
    fn replay(
        &mut self,
        step: u64,
        data_rank: u32,
        numbers: &StepNumbers,
        rows_of: &dyn Fn(u32) -> Result<Batch, TrainError>,
    ) -> Result<u64, TrainError> {
        self.work.take(step, &rows_of(data_rank)?, numbers)?;
        self.work.compute_gradients(false)?;
        digest(&self.work.gradients())
    }

    /// Checks that all replicas have the same weights, averages and moments, and that the ranks of this replica agree
    /// on the parameters that are not split. All ranks must call this function.
    pub(super) fn check_replicas(&self, step: u64) -> Result<(), TrainError> {
        let compare = |group: &Group, tensors: &[Tensor]| {
            let digests = gather(group, [digest(tensors)?])?;
            Ok::<_, TrainError>(minority(&digests.concat()))
        };
        if self.work.data.size() > 1 {
            let wrong = compare(&self.work.data, &self.work.replicated())?;
            if !wrong.is_empty() {
                return Err(self.corrupted(step, "the state of the model", &wrong));
            }
        }
        let Some(tensor) = &self.work.tensor else { return Ok(()) };
        let wrong = compare(tensor, &self.work.unsplit())?;
        if wrong.is_empty() {
            return Ok(());
        }
        let first = self.rank - tensor.rank();
        Err(TrainError::Corrupted {
            ranks: wrong.into_iter().map(|rank| first + rank as u32).collect(),
            what: "the unsplit parameters".to_owned(),
            step,
        })
    }

    /// The error for the data-parallel ranks `data_ranks`, whose copies of `what` differ from those of their peers.
    fn corrupted(&self, step: u64, what: &str, data_ranks: &[usize]) -> TrainError {
        let (parts, part) = self.work.tensor.as_ref().map_or((1, 0), |group| (group.size(), group.rank()));
        let ranks = data_ranks.iter().map(|rank| *rank as u32 * parts + part).collect();
        TrainError::Corrupted { ranks, what: what.to_owned(), step }
    }

    /// Aborts the collectives of a step that timed out because some peer did not take part.
    fn give_up(&self, recorded: Option<Recorded>, after: Duration) -> TrainError {
        let aborting = self.abort.abort_in_background();
        // Drop the graph, because the abort of an NCCL communicator ends only when no graph holds its collectives.
        drop(recorded);
        let started = Instant::now();
        while !aborting.is_finished() && started.elapsed() < ABORT_PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
        let text = "the step did not finish, because some rank did not take part".to_owned();
        TrainError::Comm(CommError::Collective {
            operation: "training step",
            group: "world".to_owned(),
            rank: self.rank,
            size: self.abort.size(),
            failure: CollectiveFailure::TimedOut { after, text },
        })
    }

    /// Records the step as a graph after [`EAGER_STEPS`] eager steps with batches of the same form. Does nothing on the
    /// CPU, or if `train.cuda_graph` is off. Recording does not run the step.
    fn maybe_record_graph(&mut self) -> Result<(), TrainError> {
        let form = self.work.form().clone();
        if form != self.eager.0 {
            (self.recorded, self.eager) = (None, (form, 0));
        }
        let is_allowed = self.work.config.train.cuda_graph && self.work.can_be_recorded();
        if self.recorded.is_some() || !is_allowed || !self.is_on_gpu {
            return Ok(());
        }
        if self.eager.1 < EAGER_STEPS {
            self.eager.1 += 1;
            return Ok(());
        }
        // A recording waits for the device without a timeout, so wait for the steps in flight first.
        let waited = self.in_flight.back().map_or(Ok(()), |newest| newest.wait(self.timeout));
        self.check_wait(waited)?;
        // Free the device memory that the eager steps left in the allocator's cache. The graph allocates its own memory
        // and cannot use the cache.
        cuda::empty_cache()?;
        let (graph, report) = Graph::capture("training step", || self.work.run())?;
        tracing::info!("recorded the step as a CUDA graph with {} nodes", graph.nodes());
        self.recorded = Some(Recorded { report, graph });
        Ok(())
    }

    /// The result of a step that is done.
    fn outcome(&mut self, done: &InFlight) -> Result<StepOutcome, TrainError> {
        let (numbers, step) = (Vec::<f64>::try_from(&done.numbers)?, done.step + 1);
        let tags = self.work.method.loss_tags();
        let loss_parts = tags.into_iter().zip(&numbers[1..]).filter_map(|(tag, mean)| Some((tag?, *mean))).collect();
        let gradient_norm = numbers[6].sqrt();
        let skipped = (!gradient_norm.is_finite()).then(|| {
            let (local, largest) = (numbers[7], numbers[12]);
            if local.is_finite() {
                format!("step {step}, rank {}: the loss is finite on this rank, but the gradient is not", self.rank)
            } else {
                not_finite(step, self.rank, local, largest, tags[0].is_some()).to_string()
            }
        });
        self.updates += u64::from(skipped.is_none());
        Ok(StepOutcome {
            step,
            loss: numbers[0],
            loss_parts,
            gradient_norm,
            learning_rate: done.learning_rate,
            skipped,
            requests: Requests::decode(numbers[5]),
        })
    }
}
