//! From embeddings to samples to one place per image: averaged weights, sampler, decoder, aggregate.
//!
//! Sample k of an image is conditioned on its view k modulo their number. Its random numbers are named by seed, number of
//! the image and k: what an image gets depends on nothing else (see [`super::rows`] for the bits of products).
// i images of a block · v views · k samples · n = i k chains · d dimensions of the code

use locdiff_core::config::EvalConfig;
use locdiff_core::geo::UnitVector;
use locdiff_core::random::Philox;
use tch::{Device, Kind, Tensor};

use super::error::EvalError;
use super::rows::{BLOCK_IMAGES, ImageBlock};
use super::trained::Trained;
use crate::diffusion::{CODE_SCALE, ChainNoise, DiffusionError, Sampler, guided};
use crate::model::{Conditioned, CsUnet, TimeTable, Timesteps};
use crate::shdd::Basis;
use crate::shdd::aggregate::{Ensemble, aggregate_decoded};
use crate::shdd::decode::{Anchors, Budget, Coarse, Decoder};

/// Where LocDiff sees one image.
#[derive(Debug, Clone, PartialEq)]
pub struct Sighting {
    /// Its samples.
    pub samples: Vec<UnitVector>,
    /// The samples put together.
    pub answer: UnitVector,
}

/// All that locating images takes.
#[derive(Debug)]
pub struct Engine {
    network: CsUnet,
    time: TimeTable,
    sampler: Sampler,
    decoder: Decoder,
    philox: Philox,
    config: EvalConfig,
    device: Device,
    no_image: Option<Conditioned>,
}

impl Engine {
    /// With a network on `device`, which must be the current one where it is a GPU; codes are decoded among `anchors`.
    pub fn new(
        trained: Trained,
        config: &EvalConfig,
        seed: u64,
        anchors: Vec<UnitVector>,
        device: Device,
    ) -> Result<Self, EvalError> {
        let _without_gradients = tch::no_grad_guard();
        let Trained { network, degree, filter, schedule, folder: checkpoint, knows_no_image, .. } = trained;
        if config.guidance > 0.0 && !knows_no_image {
            return Err(EvalError::Guidance { got: config.guidance, checkpoint });
        }
        if config.sampler_steps as usize > schedule.timesteps() {
            let want = schedule.timesteps();
            return Err(EvalError::SamplerSteps { got: config.sampler_steps, checkpoint, want });
        }
        let (basis, coarse, budget) = (Basis::new(degree)?, Coarse::of(device), Budget::of(device));
        let anchors = Anchors::filtered(basis, filter, anchors, device, coarse, budget)?;
        let no_image = if config.guidance > 0.0 { Some(network.prepare_unconditional()?) } else { None };
        Ok(Self {
            time: network.time_table()?,
            network,
            sampler: Sampler::few_steps(&schedule, config.sampler_steps as usize, config.sampler_eta)?,
            decoder: Decoder::new(anchors, config.neighbourhood_km, config.refine)?,
            philox: Philox::new(seed),
            config: config.clone(),
            device,
            no_image,
        })
    }

    /// Points that codes are decoded among.
    pub fn anchors(&self) -> usize {
        self.decoder.anchors().points().len()
    }

    /// Locates the images of a block.
    pub fn locate(&self, block: &ImageBlock, embeddings_ive: &Tensor) -> Result<Vec<Sighting>, EvalError> {
        let _without_gradients = tch::no_grad_guard();
        let samples = self.config.samples as usize;
        let (codes_nd, expected_nd) = self.sample(block, embeddings_ive)?;
        let points: Vec<UnitVector> = self.decoder.decode(&codes_nd)?.into_iter().map(|found| found.point).collect();
        let dims = self.network.architecture().dims;
        let shape = [BLOCK_IMAGES as i64, samples as i64, dims];
        let expected_id = expected_nd.f_view(shape)?.f_mean_dim([1_i64].as_slice(), false, None::<Kind>)?;
        let ensemble = Ensemble { codes_ikc: &codes_nd.f_view(shape)?, expected_ic: &expected_id };
        let answers = aggregate_decoded(self.config.aggregator, ensemble, &points, &self.decoder)?;
        let sightings = points.chunks_exact(samples).zip(answers);
        let sightings = sightings.map(|(samples, answer)| Sighting { samples: samples.to_vec(), answer });
        Ok(sightings.take(block.images.len()).collect())
    }

    /// Codes of all samples, and what was expected of each when nothing but its noise had been drawn; unscaled.
    fn sample(&self, block: &ImageBlock, embeddings_ive: &Tensor) -> Result<(Tensor, Tensor), EvalError> {
        let (samples, dims) = (self.config.samples as usize, self.network.architecture().dims as usize);
        let image = self.network.prepare(embeddings_ive, None)?.selected(&self.views_of_chains(block.views)?)?;
        let noise = ChainNoise {
            philox: self.philox,
            first_sample: block.first * samples as u64,
            samples: BLOCK_IMAGES * samples,
            dims,
            kind: Kind::Float,
            device: self.device,
        };
        let mut expected_nd = None;
        let predict = |x_nd: &Tensor, t: usize| -> Result<Tensor, EvalError> {
            let predicted_nd = self.network.forward(x_nd, Timesteps::All(t), &self.time, &image, None)?;
            expected_nd.get_or_insert_with(|| predicted_nd.shallow_clone());
            let Some(no_image) = &self.no_image else { return Ok(predicted_nd) };
            let alone_nd = self.network.forward(x_nd, Timesteps::All(t), &self.time, no_image, None)?;
            Ok(guided(&predicted_nd, &alone_nd, self.config.guidance)?)
        };
        let draw = |draw: usize| -> Result<Tensor, DiffusionError> { noise.draw(draw) };
        let codes_nd = self.sampler.run_with(draw, predict)?;
        let expected_nd = expected_nd.expect("a sampler has at least one step");
        Ok((codes_nd.f_div_scalar(CODE_SCALE)?, expected_nd.f_div_scalar(CODE_SCALE)?))
    }

    /// Row of the embeddings that each chain is conditioned on.
    fn views_of_chains(&self, views: usize) -> Result<Tensor, EvalError> {
        let of_image =
            |image: usize| (0..self.config.samples as usize).map(move |k| (image * views + k % views) as i64);
        let rows: Vec<i64> = (0..BLOCK_IMAGES).flat_map(of_image).collect();
        Ok(Tensor::f_from_slice(&rows)?.f_to_device(self.device)?)
    }
}
