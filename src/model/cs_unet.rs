//! CS-UNet: a U-Net of three C-Siren modules on the way down and three on the way up, with concatenated skip
//! connections and a linear layer (the head) at the end.
//!
//! The time layers have only T different inputs, one per timestep. [`CsUnet::time_table`] computes their outputs for
//! all timesteps once per training step. Each sample then takes the row of its timestep from this table (`gather`). The
//! image terms do not change along a sampling chain, so [`CsUnet::prepare`] computes them once.
// Letters in tensor names: b batch, d dimensions of a code, e embedding, t timesteps, h hidden (this rank's share).

use locdiff_core::random::Philox;
use tch::{Kind, Tensor};

use super::architecture::{Architecture, TIME_WIDTH};
use super::c_siren::{CSiren, DropoutDraws, InnerWeights, PARAMETERS};
use super::compute::Placement;
use super::error::ModelError;
use super::gather::RowLookup;
use super::parameters::Parameters;
use super::standardisation::Standardisation;

/// Upper bound of the periods in the time embedding, in units of 2π timesteps (Vaswani et al. 2017, section 3.5).
const TIME_PERIOD: f64 = 10_000.0;

/// The CS-UNet with its weights.
#[derive(Debug)]
pub struct CsUnet {
    architecture: Architecture,
    placement: Placement,
    parameters: Parameters,
    time_embedding_t: Tensor,
    standardisation: Standardisation,
}

/// The terms that the images of a mini-batch add to the network: for each module, one term per image.
#[derive(Debug)]
pub struct Conditioned {
    terms_bh: Vec<Tensor>,
}

impl Conditioned {
    /// Repeats the terms of each image `times` times, for an ensemble of `times` chains per image. The copies of an
    /// image are adjacent.
    pub fn repeated(&self, times: i64) -> Result<Self, ModelError> {
        let repeated = |term: &Tensor| term.f_repeat_interleave_self_int(times, 0, None::<i64>);
        Ok(Self { terms_bh: self.terms_bh.iter().map(repeated).collect::<Result<_, _>>()? })
    }

    /// Selects the image terms for each chain. `rows` holds the index of each chain's image, as i64 on the network's
    /// device.
    pub fn selected(&self, rows: &Tensor) -> Result<Self, ModelError> {
        let selected = |term: &Tensor| term.f_index_select(0, rows);
        Ok(Self { terms_bh: self.terms_bh.iter().map(selected).collect::<Result<_, _>>()? })
    }

    /// The terms of each module.
    pub(super) fn terms(&self) -> &[Tensor] {
        &self.terms_bh
    }
}

/// Scale and shift of every module at every timestep.
#[derive(Debug)]
pub struct TimeTable {
    tables_t: Vec<Tensor>,
}

impl TimeTable {
    /// The vectors (1 + scale) and shift of one module at every timestep, concatenated.
    pub(super) fn module(&self, index: usize) -> &Tensor {
        &self.tables_t[index]
    }
}

/// The timesteps of a mini-batch.
#[derive(Debug, Clone, Copy)]
pub enum Timesteps<'a> {
    /// One timestep per sample: i64 `[b]`. On the CPU, a timestep outside the schedule is an error. On CUDA, such a
    /// check would make the host wait. Instead, a timestep outside the schedule makes the prediction of its sample NaN,
    /// and [`Losses::check`](crate::loss::Losses::check) reports that the loss is not finite.
    Each(&'a Tensor),
    /// One timestep for all samples.
    All(usize),
}

impl CsUnet {
    /// Creates a network with initial weights drawn from `philox`. Embeddings are not standardised until
    /// [`Standardisation::set`] is called.
    pub fn new(architecture: Architecture, placement: Placement, philox: Philox) -> Result<Self, ModelError> {
        let options = (placement.kind, placement.device);
        let group = placement.tensor_parallel.as_ref();
        let parameters = Parameters::initial(architecture.specs(), philox, options, group)?;
        let time_embedding_t = time_embedding(&architecture)?.f_to_kind(options.0)?.f_to_device(options.1)?;
        let standardisation = Standardisation::none(architecture.embedding_width, options)?;
        Ok(Self { architecture, placement, parameters, time_embedding_t, standardisation })
    }

    /// The sizes of the network.
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// The device, precision and tensor-parallel group of the network.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The sinusoidal embedding of every timestep, `[t, 200]`, in the type of the master weights.
    pub fn time_embedding(&self) -> &Tensor {
        &self.time_embedding_t
    }

    /// The weights.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// The weights, for [`Parameters::load`].
    pub fn parameters_mut(&mut self) -> &mut Parameters {
        &mut self.parameters
    }

    /// The standardisation of embeddings.
    pub fn standardisation(&self) -> &Standardisation {
        &self.standardisation
    }

    /// The standardisation of embeddings, for changes.
    pub fn standardisation_mut(&mut self) -> &mut Standardisation {
        &mut self.standardisation
    }

    /// Computes the scale and shift of every module at every timestep. Call this once per training step, or once before
    /// all sampling.
    pub fn time_table(&self) -> Result<TimeTable, ModelError> {
        let tables = self.modules().map(|module| module.time_table(&self.time_embedding_t));
        Ok(TimeTable { tables_t: tables.collect::<Result<_, _>>()? })
    }

    /// Computes the image terms of the embeddings `image_be`. `kept_b1` is for classifier-free guidance. If its value
    /// for a sample is false, zeros replace the standardised embedding of that sample, even if the embedding contains
    /// NaN. Zero is the mean of standardised embeddings.
    pub fn prepare(&self, image_be: &Tensor, kept_b1: Option<&Tensor>) -> Result<Conditioned, ModelError> {
        let image_be = self.standardisation.apply(image_be)?;
        let image_be = match kept_b1 {
            // The embedding is overwritten with zeros instead of multiplied by 0, because 0 · NaN is NaN.
            Some(kept_b1) => image_be.f_masked_fill(&kept_b1.f_to_kind(Kind::Bool)?.f_logical_not()?, 0.0)?,
            None => image_be,
        };
        let image_be = self.placement.cast(&image_be)?;
        let terms = self.modules().map(|module| module.image_term(&image_be));
        Ok(Conditioned { terms_bh: terms.collect::<Result<_, _>>()? })
    }

    /// The image terms for samples without an image. Each term has one row, which serves all samples. Classifier-free
    /// guidance uses these terms for its unconditional prediction.
    pub fn prepare_unconditional(&self) -> Result<Conditioned, ModelError> {
        let terms = self.modules().map(|module| module.image_term_of_zero());
        Ok(Conditioned { terms_bh: terms.collect::<Result<_, _>>()? })
    }

    /// Predicts the clean codes, scaled by [`CODE_SCALE`](crate::shdd::CODE_SCALE), in the type of the master weights.
    /// Pass `dropout` only in training.
    pub fn forward(
        &self,
        x_bd: &Tensor,
        timesteps: Timesteps<'_>,
        time: &TimeTable,
        image: &Conditioned,
        dropout: Option<DropoutDraws<'_>>,
    ) -> Result<Tensor, ModelError> {
        let (got, dims) = (x_bd.size(), self.architecture.dims);
        if got.len() != 2 || got[1] != dims {
            return Err(ModelError::shape("noised code", &got, &[-1, dims]));
        }
        let dropout = dropout.map(|draws| (draws, self.architecture.dropout));
        let rows = self.row_lookup(timesteps)?;
        let run = |index: usize, input: &Tensor| {
            let time = rows.gather_from(&time.tables_t[index])?;
            self.module(index).forward(input, &time, &image.terms_bh[index], dropout)
        };
        let down1 = run(0, &self.placement.cast(x_bd)?)?;
        let down2 = run(1, &down1)?;
        let down3 = run(2, &down2)?;
        let up3 = run(3, &down3)?;
        let up2 = run(4, &Tensor::f_cat(&[up3, down3], 1)?)?;
        let up1 = run(5, &Tensor::f_cat(&[up2, down2], 1)?)?;
        self.head(&Tensor::f_cat(&[up1, down1], 1)?)
    }

    fn head(&self, input: &Tensor) -> Result<Tensor, ModelError> {
        let [weight, bias] = self.head_weights();
        let own = self.placement.own_share(input)?;
        Ok(self.placement.row_parallel_linear(&own, weight, bias)?.f_to_kind(self.placement.kind)?)
    }

    /// The weight and the bias of the head.
    pub(super) fn head_weights(&self) -> [&Tensor; 2] {
        [0, 1].map(|offset| self.parameters.at(6 * PARAMETERS + offset))
    }

    /// The weights of the layers `x` and `out` of a module.
    pub(super) fn module_weights(&self, index: usize) -> InnerWeights<'_> {
        self.module(index).inner_weights()
    }

    /// Creates the lookup that finds each sample's row in the time tables.
    fn row_lookup(&self, timesteps: Timesteps<'_>) -> Result<RowLookup, ModelError> {
        let count = self.architecture.timesteps;
        match timesteps {
            Timesteps::Each(t_b) => RowLookup::new(t_b, count, self.placement.compute_kind()),
            Timesteps::All(t) if (t as i64) < count => Ok(RowLookup::One(t as i64)),
            Timesteps::All(got) => Err(ModelError::Bad(format!("timestep {got} is not in 0..{count}"))),
        }
    }

    fn modules(&self) -> impl Iterator<Item = CSiren<'_>> {
        (0..self.architecture.modules().len()).map(|index| self.module(index))
    }

    fn module(&self, index: usize) -> CSiren<'_> {
        let shape = self.architecture.modules()[index];
        CSiren { index, shape, parameters: &self.parameters, placement: &self.placement }
    }
}

/// The sinusoidal embedding of every timestep, `[t, 200]` in f64. Each row holds 100 sines and then 100 cosines, both
/// with decreasing frequencies.
fn time_embedding(architecture: &Architecture) -> Result<Tensor, ModelError> {
    let half = TIME_WIDTH / 2;
    let mut values = Vec::with_capacity((architecture.timesteps * TIME_WIDTH) as usize);
    for t in 0..architecture.timesteps {
        let angles = (0..half).map(|i| t as f64 * (-TIME_PERIOD.ln() * i as f64 / half as f64).exp());
        values.extend(angles.clone().map(f64::sin));
        values.extend(angles.map(f64::cos));
    }
    Ok(Tensor::f_from_slice(&values)?.f_view([architecture.timesteps, TIME_WIDTH])?)
}
