//! LocDiff: the CS-UNet predicts the code of a place from a noised code, an image and a timestep.
//!
//! Random numbers are a function of the step and the row of the global batch. They do not depend on the number of ranks
//! or the size of a micro-batch. The tensor-parallel ranks of one replica take the same slice. Each of these ranks
//! holds a piece of the wide layers and a share of the anchors, and all of them compute the same loss.
// Letters in tensor names: b rows of a micro-batch, d dimensions of the code, a anchors, e width of an embedding.

use std::rc::Rc;

use locdiff_core::config::{EvalConfig, RunConfig};
use locdiff_core::geo::{UnitVector, fibonacci_grid, places};
use locdiff_core::random::Philox;
use tch::{Kind, Tensor};

use super::error::MethodError;
use super::method::{Locator, TrainableMethod};
use crate::comm::Communicator;
use crate::diffusion::{Forward, NoiseSchedule, TrainingDraws};
use crate::infer::{Denoiser, Engine};
use crate::loss::{Inputs, Loss, Losses};
use crate::model::{Architecture, CsUnet, DropoutDraws, Parameters, Placement, Standardisation, Timesteps};
use crate::native::random::{DeviceCounter, Step};
use crate::shards::Batch;
use crate::shdd::{Codes, Filter, Points, ShddError, uniform_points};

/// LocDiff with its weights, and the inputs of the current step.
#[derive(Debug)]
pub struct Locdiff {
    /// The network.
    pub network: CsUnet,
    /// The encoder of places.
    pub codes: Rc<Codes>,
    /// The noise schedule.
    pub schedule: NoiseSchedule,
    /// The loss function.
    pub loss: Loss,
    forward: Forward,
    philox: Philox,
    seed: u64,
    /// The number of anchors of the whole step.
    all_anchors: u64,
    /// The number of anchors of this rank, and the index of its first anchor among all anchors.
    anchors: (usize, u64),
    condition_drop: f64,
    /// The number of the step. It selects the random numbers.
    counter: DeviceCounter,
    /// Embeddings of the rows, in float16.
    image_be: Tensor,
    rows: Points,
    anchor_points: Points,
    /// The codes of the anchors, once [`TrainableMethod::begin`] has computed them.
    anchors_ad: Tensor,
    /// Position of this rank's first row in the global batch.
    first_sample: u64,
}

impl Locdiff {
    /// LocDiff with its initial weights.
    pub fn new(
        config: &RunConfig,
        embedding_width: u32,
        filter: Option<Filter>,
        ranks: &Communicator,
    ) -> Result<Self, MethodError> {
        let (device, train) = (ranks.world().device(), &config.train);
        let tensor_parallel = (ranks.layout().tensor_parallel() > 1).then(|| ranks.tensor().clone());
        let placement = Placement { tensor_parallel, ..Placement::on(device, train.precision) };
        let architecture = Architecture::new(&config.model, embedding_width, config.diffusion.timesteps);
        let schedule = NoiseSchedule::new(&config.diffusion, &config.model);
        let loss = match &filter {
            Some(filter) => Loss::filtered(&config.loss, filter, train.precision),
            None => Loss::new(&config.loss, config.model.degree, train.precision),
        };
        // Without a KL loss, the anchors are not used, and there may be fewer anchors than ranks.
        let own = (config.loss.anchors as usize / ranks.tensor().size() as usize).max(1);
        Ok(Self {
            network: CsUnet::new(architecture, placement, Philox::new(train.seed))?,
            codes: Rc::new(Codes::new(config.model.degree, filter, device, train.threads() as usize)?),
            forward: Forward::new(&schedule, Kind::Float, device)?,
            philox: Philox::new(train.seed),
            seed: train.seed,
            all_anchors: u64::from(config.loss.anchors),
            anchors: (own, u64::from(ranks.tensor().rank()) * own as u64),
            condition_drop: config.diffusion.condition_drop,
            counter: DeviceCounter::new(device, 0)?,
            image_be: Tensor::f_zeros([0, 0], (Kind::Half, device))?,
            rows: Points::Host(Vec::new()),
            anchor_points: Points::Host(Vec::new()),
            anchors_ad: Tensor::new(),
            first_sample: 0,
            schedule,
            loss,
        })
    }
}

impl TrainableMethod for Locdiff {
    fn parameters(&self) -> &Parameters {
        self.network.parameters()
    }

    fn parameters_mut(&mut self) -> &mut Parameters {
        self.network.parameters_mut()
    }

    fn standardisation(&self) -> &Standardisation {
        self.network.standardisation()
    }

    fn standardisation_mut(&mut self) -> &mut Standardisation {
        self.network.standardisation_mut()
    }

    fn placement(&self) -> &Placement {
        self.network.placement()
    }

    fn step_flops(&self, rows: u64) -> f64 {
        let anchors = if self.loss.kl_weight == 0.0 { 0 } else { self.all_anchors };
        self.network.architecture().step_flops(rows, anchors)
    }

    fn loss_tags(&self) -> [Option<&'static str>; 4] {
        let Loss { kl_weight, l2_weight, l1_weight, cosine_weight, .. } = self.loss;
        let tag = |name: &'static str, weight: f64| (weight != 0.0).then_some(name);
        [
            tag("loss/kl", kl_weight),
            tag("loss/l2", l2_weight),
            tag("loss/l1", l1_weight),
            tag("loss/cosine", cosine_weight),
        ]
    }

    fn can_be_recorded(&self) -> bool {
        true
    }

    /// On CUDA, all steps whose batches have the same form use the same memory for their inputs, so that a replayed
    /// graph reads the new values.
    fn take(&mut self, step: u64, batch: &Batch) -> Result<(), MethodError> {
        let (device, (count, first)) = (self.network.placement().device, self.anchors);
        self.counter.set(step)?;
        self.first_sample = batch.slice.start;
        let places = places(&batch.latitudes, &batch.longitudes).map_err(ShddError::from)?;
        self.rows.put(places.into_iter().map(UnitVector::from).collect(), device)?;
        self.anchor_points.put(uniform_points(self.seed, step, first, count)?, device)?;
        if !device.is_cuda() {
            self.image_be = batch.embeddings.shallow_clone();
        } else {
            // Copy the embeddings, because the memory of the batch will be reused.
            if self.image_be.size() != batch.embeddings.size() {
                self.image_be = Tensor::f_empty(batch.embeddings.size(), (batch.embeddings.kind(), device))?;
            }
            self.image_be.f_copy_(&batch.embeddings)?;
        }
        Ok(())
    }

    fn release(&mut self) {
        if !self.network.placement().device.is_cuda() {
            self.image_be = Tensor::new();
        }
    }

    fn begin(&mut self) -> Result<(), MethodError> {
        self.anchors_ad = self.codes.encode(&self.anchor_points)?;
        Ok(())
    }

    fn losses(&self, first: u64, count: u64) -> Result<Losses, MethodError> {
        let (network, device) = (&self.network, self.network.placement().device);
        // Random numbers are indexed by the row's position in the global batch.
        let (step, first_sample) = (Step::Counter(&self.counter), self.first_sample + first);
        let draws = TrainingDraws { philox: self.philox, step, first_sample, samples: count as usize, device };
        let image_be = self.image_be.f_narrow(0, first as i64, count as i64)?;
        let truth_bd = self.codes.encode(&self.rows.narrow(first, count)?)?;
        let t_b = draws.timesteps(&self.schedule)?;
        let noised_bd = self.forward.noised(&truth_bd, &t_b, &draws.noise(truth_bd.size()[1] as usize)?)?;
        let drop = self.condition_drop;
        let kept_b1 = (drop > 0.0).then(|| draws.kept_conditions(drop)).transpose()?;
        let image = network.prepare(&image_be, kept_b1.as_ref())?;
        let has_dropout = network.architecture().dropout > 0.0;
        let dropout = has_dropout.then_some(DropoutDraws { philox: self.philox, step, first_sample });
        let time = network.time_table()?;
        let predicted_bd = network.forward(&noised_bd, Timesteps::Each(&t_b), &time, &image, dropout)?;
        let anchors_split = network.placement().tensor_parallel.as_ref();
        let inputs =
            Inputs { predicted_bd: &predicted_bd, truth_bd: &truth_bd, basis_ad: &self.anchors_ad, anchors_split };
        Ok(self.loss.compute(inputs)?)
    }

    /// An engine with few samples, no guidance, and a grid with refinement.
    fn locator(&self, config: &RunConfig) -> Result<Box<dyn Locator>, MethodError> {
        let (network, filter) = (&self.network, self.codes.filter().cloned());
        let width = network.architecture().embedding_width as u32;
        let denoiser = Denoiser::new(config, width, filter, network.placement().device)?;
        let samples = config.eval.quick_samples;
        let eval = EvalConfig { samples, guidance: 0.0, neighbourhood_km: 0.0, refine: true, ..config.eval.clone() };
        let grid = fibonacci_grid(eval.grid_points(config.model.degree) as usize);
        Ok(Box::new(Engine::new(denoiser, &eval, config.train.seed, grid)?))
    }

    fn codes(&self) -> Option<&Codes> {
        Some(&self.codes)
    }
}
