//! The quick evaluation while training: averaged weights, few samples, a grid with refinement, on the validation shards.
//!
//! Ranks share the rows. What an image gets depends on its place in the data alone, so that neither their number nor that of
//! the ranks changes an answer.
// n chains · d dimensions of the code · e embedding

use std::ops::Range;

use locdiff_core::config::RunConfig;
use locdiff_core::draw::{ANSWERS_MAX, Answer};
use locdiff_core::geo::{Degrees, GeoError, Place, UnitVector, fibonacci_grid};
use locdiff_core::metrics::Tally;
use locdiff_core::protocol::QuickEvaluation;
use locdiff_core::random::Philox;
use tch::{Device, Kind, Tensor};

use super::pictures::Seen;
use super::step::duplicate;
use crate::comm::{CommError, Group, ReduceOp};
use crate::diffusion::{CODE_SCALE, ChainNoise, DiffusionError, NoiseSchedule, Sampler};
use crate::model::{Architecture, CsUnet, ModelError, Placement, Timesteps};
use crate::shards::{BlockRows, Blocks, Dataset, ELEMENT_BYTES, Mask, ShardsError};
use crate::shdd::aggregate::{AggregateError, Ensemble, aggregate};
use crate::shdd::decode::{Anchors, Budget, Coarse, DecodeError, Decoder};
use crate::shdd::{Basis, Filter, ShddError};

/// Images whose chains run together.
const IMAGES_TOGETHER: usize = 128;

/// What can go wrong in a quick evaluation.
#[derive(Debug, thiserror::Error)]
pub enum QuickError {
    /// The validation shards do not fit the model.
    #[error("{location}: embeddings have {got} numbers, the model takes {want}")]
    Width {
        /// Where the shards are.
        location: String,
        /// Their width.
        got: usize,
        /// That of the training shards.
        want: usize,
    },
    /// Data.
    #[error(transparent)]
    Shards(#[from] ShardsError),
    /// The network.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The sampler.
    #[error(transparent)]
    Diffusion(#[from] DiffusionError),
    /// Decoding.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// Putting samples together.
    #[error(transparent)]
    Aggregate(#[from] AggregateError),
    /// Codes.
    #[error(transparent)]
    Shdd(#[from] ShddError),
    /// Coordinates.
    #[error(transparent)]
    Geo(#[from] GeoError),
    /// Collectives.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// libtorch.
    #[error(transparent)]
    Native(#[from] crate::native::NativeError),
}

crate::native::from_torch!(QuickError);

/// The validation rows of this rank and all that locating them takes.
#[derive(Debug)]
pub struct Quick {
    network: CsUnet,
    sampler: Sampler,
    decoder: Decoder,
    images: Vec<Image>,
    width: usize,
    philox: Philox,
    config: RunConfig,
    group: Group,
}

/// A validation row.
#[derive(Debug)]
struct Image {
    /// Its place in the data.
    index: u64,
    truth: UnitVector,
    embedding: Vec<u8>,
}

impl Quick {
    /// Is there anything to evaluate on, and ever a step to do it after?
    pub fn is_wanted(config: &RunConfig) -> bool {
        !config.shards.validation.is_empty() && config.eval.every > 0
    }

    /// Reads this rank's share of the validation rows, without those of the mask.
    pub fn new(
        config: &RunConfig,
        embedding_width: u32,
        filter: Option<&Filter>,
        group: &Group,
        (dataset, mask): &(Dataset, Mask),
    ) -> Result<Self, QuickError> {
        let (got, want) = (dataset.width(), embedding_width as usize);
        if got != want {
            return Err(QuickError::Width { location: config.shards.validation.clone(), got, want });
        }
        let device = group.device();
        let architecture = Architecture::new(&config.model, embedding_width, config.diffusion.timesteps);
        let precision = config.train.precision;
        let schedule = NoiseSchedule::new(&config.diffusion, &config.model);
        let eval = &config.eval;
        let grid = fibonacci_grid(eval.grid_points(config.model.degree) as usize);
        let (basis, coarse, budget) = (Basis::new(config.model.degree)?, Coarse::of(device), Budget::of(device));
        let anchors = Anchors::filtered(basis, filter.cloned(), grid, device, coarse, budget)?;
        Ok(Self {
            network: CsUnet::new(architecture, Placement::on(device, precision), Philox::new(config.train.seed))?,
            sampler: Sampler::few_steps(&schedule, eval.sampler_steps as usize, eval.sampler_eta)?,
            decoder: Decoder::new(anchors, 0.0, true)?,
            images: read_share(dataset, mask, config, group)?,
            width: want,
            philox: Philox::new(config.train.seed),
            config: config.clone(),
            group: group.clone(),
        })
    }

    /// Locates every row with the given weights; the same figures on every rank. What is worth a picture is this rank's.
    pub fn evaluate(
        &mut self,
        step: u64,
        weights: &[(String, Tensor)],
        [mean_e, deviation_e]: [&Tensor; 2],
    ) -> Result<(QuickEvaluation, Seen), QuickError> {
        let _without_gradients = tch::no_grad_guard();
        self.network.parameters_mut().load(weights)?;
        self.network.standardise(mean_e, deviation_e)?;
        let mut tally = Tally::default();
        let mut seen = Seen { answers: Vec::new(), chain: Vec::new() };
        for first in (0..self.images.len()).step_by(IMAGES_TOGETHER) {
            let range = first..(first + IMAGES_TOGETHER).min(self.images.len());
            let chain = (first == 0).then_some(&mut seen.chain);
            for (image, answer) in self.images[range.clone()].iter().zip(self.locate(range, chain)?) {
                tally.add(image.truth.distance(answer).0);
                seen.answers.push(Answer { truth: image.truth, answer });
            }
        }
        seen.answers.truncate(ANSWERS_MAX);
        let mut sums = Tensor::f_from_slice(&tally.to_numbers())?.f_to_device(self.group.device())?;
        self.group.all_reduce(&mut sums, ReduceOp::Sum)?;
        let numbers = Vec::<f64>::try_from(sums.f_to_device(Device::Cpu)?)?;
        let tally = Tally::from_numbers(std::array::from_fn(|index| numbers[index]));
        let (score, within_percent) = (tally.mean_score(), tally.within_percent());
        Ok((QuickEvaluation { step, rows: tally.answers as u64, score, within_percent }, seen))
    }

    /// Where these rows are; the way of the very first chain goes into `chain`.
    fn locate(
        &self,
        range: Range<usize>,
        mut chain: Option<&mut Vec<(usize, Tensor)>>,
    ) -> Result<Vec<UnitVector>, QuickError> {
        let (device, samples) = (self.group.device(), i64::from(self.config.eval.quick_samples));
        let images = &self.images[range];
        let bytes: Vec<u8> = images.iter().flat_map(|image| image.embedding.iter().copied()).collect();
        let shape = [images.len() as i64, self.width as i64];
        let image_be = Tensor::f_from_data_size(&bytes, &shape, Kind::Half)?.f_to_device(device)?;
        let image = self.network.prepare(&image_be, None)?.repeated(samples)?;
        let time = self.network.time_table()?;
        let dims = self.network.architecture().dims;
        let noise = |draw: usize| -> Result<Tensor, DiffusionError> {
            let of_image = |image: &Image| ChainNoise {
                philox: self.philox,
                first_sample: image.index * samples.cast_unsigned(),
                samples: samples as usize,
                dims: dims as usize,
                kind: Kind::Float,
                device,
            };
            let draws: Result<Vec<Tensor>, _> = images.iter().map(|image| of_image(image).draw(draw)).collect();
            Ok(Tensor::f_cat(&draws?, 0)?)
        };
        let mut expected_nd = None;
        let predict = |x_nd: &Tensor, t: usize| -> Result<Tensor, QuickError> {
            let predicted_nd = self.network.forward(x_nd, Timesteps::All(t), &time, &image, None)?;
            expected_nd.get_or_insert_with(|| predicted_nd.shallow_clone());
            if let Some(chain) = &mut chain {
                chain.push((t, duplicate(&predicted_nd.f_narrow(0, 0, 1)?)?));
            }
            Ok(predicted_nd)
        };
        let codes_nd = self.sampler.run_with(noise, predict)?.f_div_scalar(CODE_SCALE)?;
        let expected_nd = expected_nd.expect("a sampler has at least one step").f_div_scalar(CODE_SCALE)?;
        let shape = [images.len() as i64, samples, dims];
        let expected_id = expected_nd.f_view(shape)?.f_mean_dim([1_i64].as_slice(), false, None::<Kind>)?;
        let ensemble = Ensemble { codes_ikc: &codes_nd.f_view(shape)?, expected_ic: &expected_id };
        Ok(aggregate(self.config.eval.aggregator, ensemble, &self.decoder)?)
    }
}

/// This rank's rows of the first `eval.quick_rows` that can be used, view 0.
fn read_share(dataset: &Dataset, mask: &Mask, config: &RunConfig, group: &Group) -> Result<Vec<Image>, QuickError> {
    let rows_max = u64::from(config.eval.quick_rows);
    let (ranks, rank) = (u64::from(group.size()), u64::from(group.rank()));
    let row_bytes = dataset.width() * ELEMENT_BYTES;
    let (mut images, mut rows, mut index) = (Vec::new(), BlockRows::default(), 0_u64);
    for block in 0..dataset.block_rows().len() as u32 {
        let skipped = mask.skipped(block);
        dataset.read_except(block, 0, skipped, &mut rows)?;
        let coordinates = rows.latitudes.iter().zip(&rows.longitudes);
        let found = (0_u32..).zip(coordinates.zip(rows.embeddings.chunks_exact(row_bytes)));
        for (_, ((latitude, longitude), embedding)) in found.filter(|(row, _)| skipped.binary_search(row).is_err()) {
            if index < rows_max && index % ranks == rank {
                let truth = Place::new(Degrees(*latitude), Degrees(*longitude))?.into();
                images.push(Image { index, truth, embedding: embedding.to_vec() });
            }
            index += 1;
        }
        if index >= rows_max {
            break;
        }
    }
    Ok(images)
}
