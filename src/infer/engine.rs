//! Locates images. For each image, the engine draws samples, decodes every sample to a point, and aggregates the points
//! into one place.
//!
//! Sample k of an image is conditioned on view k modulo the number of views. The random numbers of a sample are a
//! function of the seed of the engine, the first view of the image, and k. So the answer does not depend on the other
//! images, or on the position of the image among them. [`super::rows`] explains how matrix products become reproducible.
// Letters in tensor names: i images of a block, v views, k samples of an image, n = i·k denoising chains (one per
// sample), d dimensions of the code.

use std::cell::OnceCell;

use locdiff_core::config::EvalConfig;
use locdiff_core::geo::UnitVector;
use locdiff_core::pulse;
use tch::{Device, Kind, Tensor};

use super::error::InferError;
use super::prior::PreparedPrior;
use super::rows::ImageBlock;
use super::saved::Weights;
use super::trained::Denoiser;
use crate::diffusion::{CODE_SCALE, ChainNoise, Sampler, guided};
use crate::model::{Conditioned, CsUnet, TimeTable, Timesteps};
use crate::native::cuda::Readback;
use crate::retrieval::ImageSamples;
use crate::shdd::Basis;
use crate::shdd::aggregate::{Ensemble, aggregate_decoded};
use crate::shdd::decode::{Anchors, Budget, Coarse, Decoder, DecoderPrior, Decoding};
use crate::shdd::density::{CellPrior, CellScores, peak};

/// The temperature of the densities that are compared with a prior. It does not depend on a calibration, so that
/// answers do not either.
const PRIOR_TEMPERATURE: f64 = 0.1;

/// Locates images with a network, a sampler and a decoder.
#[derive(Debug)]
pub struct Engine {
    pub(super) network: CsUnet,
    /// Results that depend only on the weights, so they are computed once for all images.
    prepared: Prepared,
    pub(super) sampler: Sampler,
    decoder: Decoder,
    cells: OnceCell<CellScores>,
    prior: Option<CellPrior>,
    pub(super) seed: u64,
    pub(super) config: EvalConfig,
}

/// The samples of a block while they are decoded.
#[derive(Debug)]
pub(super) struct Sampled {
    pub(super) codes_nd: Tensor,
    decoding: Decoding,
    /// The mean of the first predictions for each image, and its scores at the places of the samples if the device
    /// computes them.
    expected: Readback,
}

#[derive(Debug)]
struct Prepared {
    time: TimeTable,
    no_image: Option<Conditioned>,
}

impl Prepared {
    fn new(network: &CsUnet, config: &EvalConfig) -> Result<Self, InferError> {
        let _without_gradients = tch::no_grad_guard();
        let no_image = if config.guidance > 0.0 { Some(network.prepare_unconditional()?) } else { None };
        Ok(Self { time: network.time_table()?, no_image })
    }
}

impl Engine {
    /// Creates an engine. Its decoder selects among the points `anchors`. If the network is on a GPU, that GPU must be
    /// the current device.
    pub fn new(
        denoiser: Denoiser,
        config: &EvalConfig,
        seed: u64,
        anchors: Vec<UnitVector>,
    ) -> Result<Self, InferError> {
        let _without_gradients = tch::no_grad_guard();
        let Denoiser { network, degree, filter, schedule } = denoiser;
        let device = network.placement().device;
        let (basis, coarse, budget) = (Basis::new(degree)?, Coarse::of(device), Budget::of(device));
        let anchors = Anchors::filtered(basis, filter, anchors, device, coarse, budget)?;
        Ok(Self {
            prepared: Prepared::new(&network, config)?,
            network,
            sampler: Sampler::few_steps(&schedule, config.sampler_steps as usize, config.sampler_eta)?,
            decoder: Decoder::new(anchors, config.neighbourhood_km, config.refine)?,
            cells: OnceCell::new(),
            prior: None,
            seed,
            config: config.clone(),
        })
    }

    /// Replaces the weights of the network.
    pub fn load(&mut self, weights: &Weights) -> Result<(), InferError> {
        weights.load_into(&mut self.network)?;
        self.prepared = Prepared::new(&self.network, &self.config)?;
        Ok(())
    }

    /// The points among which the decoder selects.
    pub fn anchors(&self) -> &[UnitVector] {
        self.decoder.anchors().points()
    }

    /// Uses a prior: samples are decoded to the largest product of density and prior, and each sample has a weight, the
    /// share of its density that lies in the prior. The anchors must be [`PreparedPrior::anchors`].
    pub fn with_prior(self, prior: &PreparedPrior) -> Result<Self, InferError> {
        let score_per_nat = peak(self.decoder.anchors().dims()) * PRIOR_TEMPERATURE;
        let cell_prior = CellPrior::new(&prior.cell_means(), self.device())?;
        let decoder = self.decoder.with_prior(DecoderPrior::new(prior.prior().clone(), score_per_nat))?;
        Ok(Self { decoder, prior: Some(cell_prior), ..self })
    }

    /// Computes densities from the codes of this engine. It needs much memory, so it is made when it is first used.
    pub fn cells(&self) -> Result<&CellScores, InferError> {
        if let Some(cells) = self.cells.get() {
            return Ok(cells);
        }
        let anchors = self.decoder.anchors();
        let made = CellScores::new(anchors.basis().clone(), anchors.filter().cloned(), self.device())?;
        Ok(self.cells.get_or_init(|| made))
    }

    /// The prior over the cells of [`Engine::cells`]; `None` without a prior.
    pub fn prior(&self) -> Option<&CellPrior> {
        self.prior.as_ref()
    }

    /// The device of the network.
    pub fn device(&self) -> Device {
        self.network.placement().device
    }

    /// Locates the images of a block. At every sampler step, `watch` is called with the timestep, the scaled noised
    /// codes of all chains, and the scaled predictions x̂_0 that are made from these codes. With guidance, these are
    /// the guided predictions, which the sampler follows.
    pub fn locate(
        &self,
        block: &ImageBlock,
        embeddings_ive: &Tensor,
        watch: impl FnMut(usize, &Tensor, &Tensor) -> Result<(), InferError>,
    ) -> Result<Vec<ImageSamples>, InferError> {
        let _without_gradients = tch::no_grad_guard();
        let (codes_nd, expected_id) = self.sample(block, embeddings_ive, watch)?;
        self.finish(block, self.start(codes_nd, &expected_id)?)
    }

    /// Draws the samples of a block for `watch` alone, which is called at every sampler step with the timestep and the
    /// scaled predictions x̂_0, as in [`Self::locate`].
    pub fn watch(
        &self,
        block: &ImageBlock,
        mut watch: impl FnMut(usize, &Tensor) -> Result<(), InferError>,
    ) -> Result<(), InferError> {
        let _without_gradients = tch::no_grad_guard();
        let embeddings_ive = block.embeddings(self.device())?;
        self.sample(block, &embeddings_ive, |t, _, predicted_nd| watch(t, predicted_nd)).map(drop)
    }

    /// Starts to decode the codes of a block. `expected_id` holds the mean of the first predictions for each image.
    /// `codes_nd` and `expected_id` are unscaled.
    pub(super) fn start(&self, codes_nd: Tensor, expected_id: &Tensor) -> Result<Sampled, InferError> {
        let decoding = self.decoder.start(&codes_nd)?;
        let expected_ik = self.decoder.start_scores(&decoding, expected_id)?;
        let expected: Vec<&Tensor> = std::iter::once(expected_id).chain(expected_ik.as_ref()).collect();
        Ok(Sampled { codes_nd, decoding, expected: Readback::start(&expected)? })
    }

    /// Waits for the device and aggregates the samples of each image of a block.
    pub(super) fn finish(&self, block: &ImageBlock, sampled: Sampled) -> Result<Vec<ImageSamples>, InferError> {
        let samples = self.config.samples as usize;
        let found = self.decoder.finish(sampled.decoding)?;
        let points: Vec<UnitVector> = found.into_iter().map(|found| found.point).collect();
        let shape = [block.size as i64, samples as i64, -1];
        let (codes_ikc, expected) = (sampled.codes_nd.f_view(shape)?, sampled.expected.wait()?);
        let weights = self.weights(&sampled.codes_nd, block.images.len())?;
        let (expected_ic, expected_ik) = (&expected[0], expected.get(1));
        let ensemble = Ensemble { codes_ikc: &codes_ikc, expected_ic, expected_ik, weights: &weights };
        let answers = aggregate_decoded(self.config.aggregator, ensemble, &points, &self.decoder)?;
        let codes = self.decoder.anchors().whole_codes::<f32>(&expected[0])?;
        let codes = codes.chunks_exact(self.decoder.anchors().basis().dims());
        let located = points.chunks_exact(samples).zip(answers).zip(codes).take(block.images.len());
        let images = located.enumerate().map(|(at, ((points, aggregate), code))| ImageSamples {
            aggregate,
            samples: points.to_vec(),
            weights: weights.get(at * samples..(at + 1) * samples).unwrap_or_default().to_vec(),
            expected: code.to_vec(),
        });
        Ok(images.collect())
    }

    /// The weights of the samples of the first `images` images: the share of each sample's density that lies in the
    /// prior, divided by the largest share of the image. Empty without a prior.
    fn weights(&self, codes_nd: &Tensor, images: usize) -> Result<Vec<f64>, InferError> {
        let Some(prior) = &self.prior else { return Ok(Vec::new()) };
        let cells = self.cells()?;
        let samples = i64::from(self.config.samples);
        let mut weights = Vec::with_capacity(images * samples as usize);
        with_one_thread(|| {
            for image in 0..images as i64 {
                let scores = cells.of_image(&codes_nd.f_narrow(0, image * samples, samples)?)?;
                let logs = scores.log_shares(PRIOR_TEMPERATURE, prior)?;
                let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                weights.extend(logs.iter().map(|log| (log - most).exp()));
                pulse::advance();
            }
            Ok(weights)
        })
    }

    /// Draws all samples. Returns the code of each sample. Also returns, for each image, the mean of the predictions
    /// x̂_0 in the first sampler step. These predictions are made from pure noise and without guidance. Codes and means
    /// are unscaled.
    pub(super) fn sample(
        &self,
        block: &ImageBlock,
        embeddings_ive: &Tensor,
        mut watch: impl FnMut(usize, &Tensor, &Tensor) -> Result<(), InferError>,
    ) -> Result<(Tensor, Tensor), InferError> {
        let (samples, dims) = (self.config.samples as usize, self.network.architecture().dims as usize);
        let Prepared { time, no_image } = &self.prepared;
        let rows = self.rows_of_chains(block, Kind::Int64)?;
        let image = self.network.prepare(embeddings_ive, None)?.selected(&rows)?;
        let noise =
            ChainNoise { seeds: block.seeds(self.seed), samples, dims, kind: Kind::Float, device: self.device() };
        let mut expected_nd = None;
        let predict = |x_nd: &Tensor, t: usize| -> Result<Tensor, InferError> {
            let predicted_nd = self.network.forward(x_nd, Timesteps::All(t), time, &image, None)?;
            expected_nd.get_or_insert_with(|| predicted_nd.shallow_clone());
            let predicted_nd = match no_image {
                None => predicted_nd,
                Some(no_image) => {
                    let alone_nd = self.network.forward(x_nd, Timesteps::All(t), time, no_image, None)?;
                    guided(&predicted_nd, &alone_nd, self.config.guidance)?
                }
            };
            watch(t, x_nd, &predicted_nd)?;
            pulse::advance();
            Ok(predicted_nd)
        };
        let codes_nd = self.sampler.run_with(|draw| noise.draw(draw), predict)?;
        let expected_nd = expected_nd.expect("a sampler has at least one step").f_div_scalar(CODE_SCALE)?;
        let shape = [block.size as i64, samples as i64, dims as i64];
        let expected_id = expected_nd.f_view(shape)?.f_mean_dim([1_i64].as_slice(), false, None::<Kind>)?;
        Ok((codes_nd.f_div_scalar(CODE_SCALE)?, expected_id))
    }

    /// For each chain, the index of the row of embeddings that the chain is conditioned on.
    pub(super) fn rows_of_chains(&self, block: &ImageBlock, kind: Kind) -> Result<Tensor, InferError> {
        let (samples, views) = (self.config.samples as usize, block.views);
        let of_image = |image: usize| (0..samples).map(move |k| (image * views + k % views) as i64);
        let rows: Vec<i64> = (0..block.size).flat_map(of_image).collect();
        Ok(Tensor::f_from_slice(&rows)?.f_to_kind(kind)?.f_to_device(self.device())?)
    }
}

/// Does work with one thread of libtorch. The rounding of products and sums depends on the number of threads on the
/// CPU.
pub fn with_one_thread<T>(work: impl FnOnce() -> Result<T, InferError>) -> Result<T, InferError> {
    let threads = tch::get_num_threads();
    tch::set_num_threads(1);
    let done = work();
    tch::set_num_threads(threads);
    done
}
