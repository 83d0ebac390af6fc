//! The part of a step that runs on the device. It encodes the places, adds noise, predicts, computes the loss and its
//! gradient, and reduces the gradient over ranks. Then the gradient is clipped, AdamW updates the weights, and the
//! moving average of the weights is updated.
//!
//! There are two engines. [`explicit`] has a backward pass of its own and is fast; it needs CUDA, bf16 and a replica
//! that is not split over ranks. [`autograd`] works everywhere.
//!
//! Invariant: [`Work::run`] never waits for the device, and everything that changes between steps comes from the
//! inputs ([`Work::take`]). A step can therefore run eagerly or be recorded as a graph.
//!
//! All ranks agree on whether a gradient is finite, because after the reduction every rank has the same norm. If the
//! gradient is not finite, no rank updates anything.

mod autograd;
mod explicit;
mod feed;
#[cfg(test)]
#[allow(clippy::print_stdout, reason = "tests print what they measured")]
mod gpu_tests;
mod report;

use locdiff_core::config::{RunConfig, TrainMethod};
use tch::{Kind, Tensor};

use self::autograd::Autograd;
use self::explicit::Explicit;
pub(super) use self::feed::{Form, Requests, StepNumbers};
use self::report::LocalLosses;
pub(super) use self::report::Report;
use super::error::TrainError;
use crate::comm::{Communicator, Group};
use crate::methods::{Locdiff, TrainableMethod, new_method};
use crate::model::{Placement, Split};
use crate::native::optim::Moments;
use crate::shards::Batch;
use crate::shdd::Filter;

/// Everything that a training step uses or changes: the network, its optimiser state and averaged weights, the inputs,
/// and the groups of ranks.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) method: Box<dyn TrainableMethod>,
    pub(super) moments: Moments,
    pub(super) ema: Vec<Tensor>,
    pub(super) data: Group,
    /// The ranks that share one replica; `None` without tensor parallelism.
    pub(super) tensor: Option<Group>,
    pub(super) config: RunConfig,
    engine: StepEngine,
}

/// How gradients are computed and weights are updated.
#[derive(Debug)]
enum StepEngine {
    Autograd(Box<Autograd>),
    Explicit(Box<Explicit>),
}

impl Work {
    /// The model with its initial weights.
    pub(super) fn new(
        config: &RunConfig,
        embedding_width: u32,
        filter: Option<Filter>,
        ranks: &Communicator,
    ) -> Result<Self, TrainError> {
        let kind = autograd_reason(config, ranks).is_none().then_some(Kind::BFloat16);
        Self::with_engine(config, embedding_width, filter, ranks, kind)
    }

    /// Like [`Work::new`], but with a given engine: `explicit` is the type of its matrix products, or `None` for
    /// autograd.
    fn with_engine(
        config: &RunConfig,
        embedding_width: u32,
        filter: Option<Filter>,
        ranks: &Communicator,
        explicit: Option<Kind>,
    ) -> Result<Self, TrainError> {
        let (engine, method, moments, ema): (_, Box<dyn TrainableMethod>, _, _) = match explicit {
            Some(kind) => {
                let mut locdiff = Locdiff::new(config, embedding_width, filter, ranks)?;
                let (engine, moments, ema) = Explicit::new(config, &mut locdiff, ranks.data(), kind)?;
                (StepEngine::Explicit(Box::new(engine)), Box::new(locdiff), moments, ema)
            }
            None => {
                let method = new_method(config, embedding_width, filter, ranks)?;
                let parameters = method.parameters().tensors();
                let ema = parameters.iter().map(duplicate).collect::<Result<_, _>>()?;
                let engine = Autograd::new(config, &*method, ranks)?;
                (StepEngine::Autograd(Box::new(engine)), method, Moments::zeros(&parameters), ema)
            }
        };
        Ok(Self {
            data: ranks.data().clone(),
            tensor: method.placement().tensor_parallel.clone(),
            config: config.clone(),
            method,
            moments,
            ema,
            engine,
        })
    }

    /// The name of the engine.
    pub(super) fn path(&self) -> &'static str {
        match &self.engine {
            StepEngine::Autograd(_) => "autograd",
            StepEngine::Explicit(_) => "explicit",
        }
    }

    /// Whether a step on a GPU can be recorded as a graph.
    pub(super) fn can_be_recorded(&self) -> bool {
        self.method.can_be_recorded()
    }

    /// Whether a step can be launched before the result of the previous step is known.
    pub(super) fn can_run_ahead(&self) -> bool {
        matches!(self.engine, StepEngine::Explicit(_))
    }

    /// The form of the current batch.
    pub(super) fn form(&self) -> &Form {
        match &self.engine {
            StepEngine::Autograd(engine) => engine.form(),
            StepEngine::Explicit(engine) => engine.form(),
        }
    }

    /// Sets the inputs of step `step`, counted from 0.
    pub(super) fn take(&mut self, step: u64, batch: &Batch, numbers: &StepNumbers) -> Result<(), TrainError> {
        match &mut self.engine {
            StepEngine::Autograd(engine) => engine.take(&mut *self.method, step, batch, numbers),
            StepEngine::Explicit(engine) => engine.take(step, batch, numbers),
        }
    }

    /// Drops the reference to the batch on the CPU, so that the memory of the batch can be reused.
    pub(super) fn release(&mut self) {
        self.method.release();
    }

    /// Must be called if anything except a step has changed the weights of the network.
    pub(super) fn weights_changed(&mut self) -> Result<(), TrainError> {
        match &mut self.engine {
            StepEngine::Autograd(_) => Ok(()),
            StepEngine::Explicit(engine) => engine.weights_changed(),
        }
    }

    /// Runs the step whose inputs were taken.
    pub(super) fn run(&mut self) -> Result<Report, TrainError> {
        let losses = self.compute_gradients(true)?;
        self.conclude(losses)
    }

    /// Computes the gradients of the rows in the inputs. If `reduces` is true, the reduction over ranks starts while
    /// the last backward pass is running. Otherwise, each rank keeps its own gradients until [`Work::conclude`].
    pub(super) fn compute_gradients(&mut self, reduces: bool) -> Result<LocalLosses, TrainError> {
        match &mut self.engine {
            StepEngine::Autograd(engine) => engine.compute_gradients(&mut *self.method, reduces),
            StepEngine::Explicit(engine) => engine.compute_gradients(reduces),
        }
    }

    /// Finishes the reduction of the gradients, and updates the weights.
    pub(super) fn conclude(&mut self, losses: LocalLosses) -> Result<Report, TrainError> {
        match &mut self.engine {
            StepEngine::Autograd(engine) => {
                engine.conclude(self.method.parameters(), &mut self.moments, &self.ema, losses)
            }
            StepEngine::Explicit(engine) => engine.conclude(losses),
        }
    }

    /// The gradients as flat tensors.
    pub(super) fn gradients(&self) -> Vec<Tensor> {
        match &self.engine {
            StepEngine::Autograd(engine) => engine.gradients(),
            StepEngine::Explicit(engine) => vec![engine.gradient().shallow_clone()],
        }
    }

    /// All tensors that must be equal on all replicas.
    pub(super) fn replicated(&self) -> Vec<Tensor> {
        let lists = [&self.method.parameters().tensors(), &self.ema, &self.moments.exp_avgs, &self.moments.exp_avg_sqs];
        lists.into_iter().flatten().map(Tensor::shallow_clone).collect()
    }

    /// The parameters that are not split. They must be equal on all ranks of this replica.
    pub(super) fn unsplit(&self) -> Vec<Tensor> {
        let all = self.method.parameters().iter();
        all.filter(|parameter| parameter.split == Split::Replicated).map(|found| found.tensor.shallow_clone()).collect()
    }
}

/// Why a training uses autograd; `None` if it uses the explicit engine.
pub(super) fn autograd_reason(config: &RunConfig, ranks: &Communicator) -> Option<&'static str> {
    let placement = Placement::on(ranks.world().device(), config.train.precision);
    if config.train.method != TrainMethod::Locdiff {
        Some("train.method is not \"locdiff\"")
    } else if !placement.device.is_cuda() {
        Some("the device is the CPU")
    } else if placement.compute_kind() != Kind::BFloat16 {
        Some("train.precision is \"f32\"")
    } else if ranks.layout().tensor_parallel() > 1 {
        Some("parallel.tensor splits the replica")
    } else {
        None
    }
}

/// A detached copy in newly allocated memory.
pub(super) fn duplicate(tensor: &Tensor) -> Result<Tensor, tch::TchError> {
    let _without_gradients = tch::no_grad_guard();
    let tensor = tensor.f_detach()?;
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(&tensor)?;
    Ok(copy)
}
