//! GeoCLIP's image head, trained on the shards: two linear layers with a ReLU between them map an embedding into the
//! space of GeoCLIP's frozen location encoder.
//!
//! The loss is GeoCLIP's. For each photo, the head must find the photo's location among candidates: the locations of
//! all photos of the global batch, and `loss.negatives` points of the gallery. The loss is the cross-entropy of the
//! logits `exp(logit_scale)` · cosine, where `logit_scale` is learned too.
//!
//! Every rank embeds the locations of its own photos, and the ranks exchange the embeddings. The candidates are sorted
//! by their position in the global batch, so that they do not depend on the number of ranks.
//!
//! Source: Vivanco Cepeda, Nayak, Shah, "GeoCLIP", NeurIPS 2023, section 3.4.
// Letters in tensor names: b rows of a micro-batch, s rows of this rank's slice, c candidates, e width of a stored
// embedding, w width of a location embedding, g gallery points, n = w + 1.

use std::collections::HashMap;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use locdiff_core::config::{Precision, RunConfig};
use locdiff_core::geo::{Place, places};
use locdiff_core::random::{Draw, Philox, Stream};
use tch::{Device, Kind, Reduction, Tensor};

use super::error::MethodError;
use super::method::{Locator, TrainableMethod, Watch};
use crate::comm::{Communicator, Group};
use crate::geoclip::{EMBEDDING_WIDTH, Embedder, FEATURE_WIDTH, Geoclip};
use crate::infer::retrieval_data::trained_head;
use crate::infer::{ImageBlock, InferError, Weights};
use crate::loss::{Losses, largest_finite};
use crate::model::{Init, Parameters, Placement, Spec, Split, Standardisation, linear_layer};
use crate::retrieval::{Gallery, Hybrid, ImageSamples, QueryHead, Retriever, Surroundings, Voters, locate_alone};
use crate::shards::Batch;
use crate::shdd::ShddError;

/// The initial value of `logit_scale` is ln(1 / 0.07), as in GeoCLIP.
const LOGIT_SCALE: f64 = 2.659_260_036_932_778;
/// Timeout of the ranks that wait while rank 0 embeds the gallery. The launcher ends all workers if rank 0 hangs.
const WATCHED_BY_LAUNCHER: Duration = Duration::from_secs(365 * 24 * 3600);
/// Position of a row that only pads a slice. It is larger than every position in a batch.
const NO_POSITION: f64 = 1e9;
/// Number of operations of GeoCLIP's location encoder for one place.
const LOCATION_FLOPS: f64 = 3.0 * 2.0 * (512.0 * 1024.0 + 2.0 * 1024.0 * 1024.0 + 1024.0 * 512.0);

/// The image head with its weights, and the inputs of the current step.
#[derive(Debug)]
pub struct ContrastiveHead {
    parameters: Parameters,
    standardisation: Standardisation,
    placement: Placement,
    embedder: Embedder,
    gallery: Rc<Gallery>,
    /// Embeddings of the gallery points on the device, L2-normalised.
    gallery_gw: Tensor,
    /// The index of each gallery point, by the bits of its coordinates. Many photos are taken exactly at a gallery
    /// point, so their location embeddings need not be computed.
    known: HashMap<[u64; 2], i64>,
    data: Group,
    philox: Philox,
    negatives: usize,
    threads: usize,
    global_batch: i64,
    /// Largest number of rows that a rank takes from a batch.
    slice_max: i64,
    image_se: Tensor,
    /// Location embeddings of this rank's rows. The last column holds the position of each row in the global batch.
    own_sn: Tensor,
    /// Indices of the gallery points of this step.
    drawn: Tensor,
    candidates_cw: Tensor,
    first_sample: u64,
}

impl ContrastiveHead {
    /// The head with its initial weights.
    pub fn new(config: &RunConfig, embedding_width: u32, ranks: &Communicator) -> Result<Self, MethodError> {
        if embedding_width as usize != FEATURE_WIDTH {
            return Err(MethodError::Config(format!(
                "train.method is \"geoclip\", but the embeddings of {} have {embedding_width} numbers, wanted \
                 {FEATURE_WIDTH}",
                config.shards.train
            )));
        }
        if ranks.layout().tensor_parallel() > 1 {
            let text = "train.method is \"geoclip\", whose head is too small to be split; set parallel.tensor = 1";
            return Err(MethodError::Config(text.to_owned()));
        }
        let (device, train) = (ranks.world().device(), &config.train);
        let options = (Kind::Float, device);
        let parameters = Parameters::initial(specs(), Philox::new(train.seed), options, None)?;
        let threads = train.threads() as usize;
        let (gallery, places, embedder) = open_gallery(config, ranks, threads)?;
        let gallery_gw = gallery.embeddings().f_to_device(device)?.f_to_kind(Kind::Float)?;
        let known = places.iter().map(|place| bits(*place)).zip(0..).collect();
        Ok(Self {
            standardisation: Standardisation::none(i64::from(embedding_width), options)?,
            placement: Placement::on(device, Precision::F32),
            gallery: Rc::new(gallery),
            data: ranks.data().clone(),
            philox: Philox::new(train.seed),
            negatives: config.loss.negatives as usize,
            global_batch: i64::from(train.global_batch),
            slice_max: i64::from(train.global_batch.div_ceil(ranks.data().size())),
            image_se: Tensor::new(),
            own_sn: Tensor::new(),
            drawn: Tensor::new(),
            candidates_cw: Tensor::new(),
            first_sample: 0,
            parameters,
            embedder,
            gallery_gw,
            known,
            threads,
        })
    }

    /// The location embeddings of places, `[places, w]` on the device.
    fn embed(&self, places: &[Place]) -> Result<Tensor, MethodError> {
        let (mut at_gallery, mut known, mut at_fresh, mut fresh) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (row, place) in (0_i64..).zip(places) {
            match self.known.get(&bits(*place)) {
                Some(index) => {
                    at_gallery.push(row);
                    known.push(*index);
                }
                None => {
                    at_fresh.push(row);
                    fresh.push(*place);
                }
            }
        }
        let (device, width) = (self.placement.device, EMBEDDING_WIDTH as i64);
        let indices = |rows: &[i64]| Tensor::f_from_slice(rows)?.f_to_device(device);
        let mut all_sw = Tensor::f_empty([places.len() as i64, width], (Kind::Float, device))?;
        let known_w = self.gallery_gw.f_index_select(0, &indices(&known)?)?;
        let _ = all_sw.f_index_copy_(0, &indices(&at_gallery)?, &known_w)?;
        let fresh_w = Tensor::f_from_slice(&self.embedder.embed(&fresh).map_err(InferError::from)?)?;
        let fresh_w = fresh_w.f_view([fresh.len() as i64, width])?.f_to_device(device)?;
        let _ = all_sw.f_index_copy_(0, &indices(&at_fresh)?, &fresh_w)?;
        Ok(all_sw)
    }

    /// The embeddings of photos in the space of locations, L2-normalised.
    fn encode(&self, image_be: &Tensor) -> Result<Tensor, MethodError> {
        let input_be = self.standardisation.apply(image_be)?;
        let weight = |index: usize| self.parameters.at(index);
        let hidden = input_be.f_linear(weight(0), Some(weight(1)))?.f_relu()?;
        let output_bw = hidden.f_linear(weight(2), Some(weight(3)))?;
        let length_b1 = output_bw.f_norm_scalaropt_dim(2.0, [1].as_slice(), true)?;
        Ok(output_bw.f_div(&length_b1)?)
    }
}

impl TrainableMethod for ContrastiveHead {
    fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    fn parameters_mut(&mut self) -> &mut Parameters {
        &mut self.parameters
    }

    fn standardisation(&self) -> &Standardisation {
        &self.standardisation
    }

    fn standardisation_mut(&mut self) -> &mut Standardisation {
        &mut self.standardisation
    }

    fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Counts three products for each layer of the head, two for the logits, and those of the location encoder.
    fn step_flops(&self, rows: u64) -> f64 {
        let [features, width] = [FEATURE_WIDTH, EMBEDDING_WIDTH].map(|width| width as f64);
        let candidates = self.global_batch as f64 + self.negatives as f64;
        let head = 3.0 * 2.0 * (features * features + features * width);
        rows as f64 * (head + 2.0 * 2.0 * candidates * width + LOCATION_FLOPS)
    }

    fn loss_tags(&self) -> [Option<&'static str>; 4] {
        [None; 4]
    }

    /// False, because the location encoder reads places from main memory.
    fn can_be_recorded(&self) -> bool {
        false
    }

    fn take(&mut self, step: u64, batch: &Batch) -> Result<(), MethodError> {
        let device = self.placement.device;
        let places = places(&batch.latitudes, &batch.longitudes).map_err(ShddError::from)?;
        let rows = places.len() as i64;
        let position_s =
            Tensor::f_arange_start(batch.slice.start as i64, batch.slice.end as i64, (Kind::Float, device))?;
        let own_sn = Tensor::f_cat(&[self.embed(&places)?, position_s.f_unsqueeze(1)?], 1)?;
        let filling = Tensor::f_full([self.slice_max - rows, own_sn.size()[1]], NO_POSITION, (Kind::Float, device))?;
        self.own_sn = Tensor::f_cat(&[own_sn, filling], 0)?;
        let (draw, bound) = (
            Draw { stream: Stream::Negatives, step, first_sample: 0, elements: self.negatives.max(1) },
            self.gallery.points().len() as u32,
        );
        let mut drawn = vec![0_i64; self.negatives];
        self.philox.fill_int(draw, bound, &mut drawn)?;
        self.drawn = Tensor::f_from_slice(&drawn)?.f_to_device(device)?;
        // Copy the embeddings, because the memory of the batch will be reused.
        self.image_se = Tensor::f_empty(batch.embeddings.size(), (batch.embeddings.kind(), device))?;
        self.image_se.f_copy_(&batch.embeddings)?;
        self.first_sample = batch.slice.start;
        Ok(())
    }

    fn release(&mut self) {}

    /// Exchanges the location embeddings of all ranks, and adds the gallery points of this step.
    fn begin(&mut self) -> Result<(), MethodError> {
        let _without_gradients = tch::no_grad_guard();
        let width = EMBEDDING_WIDTH as i64;
        let all = self.data.all_gather(&self.own_sn)?.f_view([-1, width + 1])?;
        let order = all.f_select(1, width)?.f_argsort(0, false)?.f_narrow(0, 0, self.global_batch)?;
        let batch_cw = all.f_index_select(0, &order)?.f_narrow(1, 0, width)?;
        self.candidates_cw = Tensor::f_cat(&[batch_cw, self.gallery_gw.f_index_select(0, &self.drawn)?], 0)?;
        Ok(())
    }

    fn losses(&self, first: u64, count: u64) -> Result<Losses, MethodError> {
        let image_be = self.image_se.f_narrow(0, first as i64, count as i64)?;
        let cosine_bc = self.encode(&image_be)?.f_matmul(&self.candidates_cw.f_tr()?)?;
        let logits_bc = cosine_bc.f_mul(&self.parameters.at(4).f_exp()?)?;
        let start = (self.first_sample + first) as i64;
        let truth_b = Tensor::f_arange_start(start, start + count as i64, (Kind::Int64, self.placement.device))?;
        let total = logits_bc.f_cross_entropy_loss(&truth_b, None::<Tensor>, Reduction::Mean, -100, 0.0)?;
        let largest = largest_finite(&logits_bc)?;
        Ok(Losses { total, kl: None, l2: None, l1: None, cosine: None, largest })
    }

    fn locator(&self, _config: &RunConfig) -> Result<Box<dyn Locator>, MethodError> {
        let (gallery, device, threads) = (Rc::clone(&self.gallery), self.placement.device, self.threads);
        Ok(Box::new(HeadLocator { gallery, head: None, device, threads }))
    }
}

/// Locates photos with a trained head: the answer is the gallery point with the highest logit.
#[derive(Debug)]
struct HeadLocator {
    gallery: Rc<Gallery>,
    head: Option<QueryHead>,
    device: Device,
    threads: usize,
}

impl Locator for HeadLocator {
    fn load(&mut self, weights: &Weights) -> Result<(), InferError> {
        self.head = Some(trained_head(weights, self.device)?);
        Ok(())
    }

    fn locate(&self, block: &ImageBlock, _watch: Watch<'_>) -> Result<Vec<ImageSamples>, InferError> {
        let head = self.head.as_ref().ok_or_else(|| InferError::Config("no weights were loaded".to_owned()))?;
        let (images, views) = (block.images.len() as i64, block.views as i64);
        let embeddings = block.embeddings(self.device)?.f_narrow(0, 0, images * views)?;
        let queries = head.queries(&embeddings.f_view([images, views, block.width as i64])?)?;
        let retriever = Retriever::new(&self.gallery, self.device, self.threads)?;
        let voters = Voters { neighbours: 1, points: 1, consensus: Hybrid::without_locdiff(1.0, 1.0, 1.0) };
        let answers = locate_alone((&retriever, &Surroundings::default()), &queries, voters, None)?
            .into_iter()
            .map(|found| found.retrieval);
        Ok(answers
            .map(|aggregate| ImageSamples {
                aggregate,
                samples: vec![aggregate],
                weights: Vec::new(),
                expected: Vec::new(),
            })
            .collect())
    }
}

/// The parameters. They have the same names as those of GeoCLIP's own head in the folder of GeoCLIP's weights.
fn specs() -> Vec<Spec> {
    let [features, width] = [FEATURE_WIDTH, EMBEDDING_WIDTH].map(|width| width as i64);
    let mut specs = linear_layer("image.0", features, features);
    specs.extend(linear_layer("image.2", features, width));
    let init = Init::Constant(LOGIT_SCALE);
    specs.push(Spec { name: "logit_scale".to_owned(), shape: Vec::new(), split: Split::Replicated, init });
    specs
}

/// Opens the configured gallery. If the embeddings of its points are not cached, rank 0 computes them first. The other
/// ranks read the cache.
fn open_gallery(
    config: &RunConfig,
    ranks: &Communicator,
    threads: usize,
) -> Result<(Gallery, Vec<Place>, Embedder), MethodError> {
    let world = ranks.world().with_timeout(WATCHED_BY_LAUNCHER);
    let device = world.device();
    let open = || -> Result<(Gallery, Vec<Place>, Embedder), InferError> {
        let geoclip = Geoclip::open(Path::new(&config.retrieval.geoclip))?;
        let embedder = Embedder::new(geoclip.location_encoder(device)?, threads);
        let (gallery, places) = Gallery::open_with_places(&config.retrieval, &geoclip, &embedder, |_, _| ())?;
        Ok((gallery, places, embedder))
    };
    if world.rank() == 0 {
        let opened = open();
        world.barrier()?;
        return Ok(opened?);
    }
    world.barrier()?;
    Ok(open()?)
}

/// The bits of the coordinates, as the key of a table of places.
fn bits(place: Place) -> [u64; 2] {
    [place.latitude().0, place.longitude().0].map(f64::to_bits)
}
