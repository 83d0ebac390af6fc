//! Prepares retrieval for a data set: collects facts about the embeddings, and opens the gallery and the head. Training
//! photos can serve as a gallery.

use std::collections::HashMap;
use std::path::Path;

use locdiff_core::config::{RetrievalConfig, RetrievalHead, ShardsConfig, TrainMethod};
use locdiff_core::geo::{Place, UnitVector, places};
use tch::{Device, Kind, Tensor};

use super::error::InferError;
use super::saved::{SavedModel, Weights};
use crate::geoclip::{Embedder, Geoclip, GeoclipHead};
use crate::retrieval::{DataFacts, DataHead, Gallery, QueryHead, RetrievalError, check_head};
use crate::shards::{
    BlockRows, Blocks, Dataset, ELEMENT_BYTES, ImageHead, Manifest, Mask, PROJECTION_SEED, ShardsError, projection,
};

/// If no manifest gives a fact about the data, it is measured on a sample. These are the largest numbers of photos and
/// blocks in the sample.
const SAMPLE_ROWS: usize = 256;
const SAMPLE_BLOCKS: usize = 4;

/// The place rank is measured only with at least this many photos. With fewer, features that are not from CLIP could
/// have a low place rank by chance.
const RANKED_ROWS_MIN: usize = 16;

/// Bytes that a gallery needs per point, in addition to the embedding.
const PLACE_BYTES: usize = 72;

/// Facts about the embeddings of a data set. If the data set has no manifest and `head` needs the mean length of the
/// embeddings, the length is measured on some rows. `place_rank` is left `None`.
pub fn data_facts(
    location: &str,
    dataset: &Dataset,
    mask: &Mask,
    head: RetrievalHead,
) -> Result<DataFacts, InferError> {
    let image_head = match dataset.origin().map(|origin| origin.image_head) {
        Some(ImageHead::Geoclip) => DataHead::Geoclip,
        Some(ImageHead::Linear) => DataHead::Linear,
        Some(ImageHead::Trained) => DataHead::Trained,
        Some(ImageHead::None) | None => DataHead::Unknown,
    };
    // The root mean square length of the embeddings, from the means and standard deviations in the manifest.
    let length = |manifest: &Manifest| {
        let squares = manifest.mean.iter().chain(&manifest.standard_deviation).map(|value| value * value);
        squares.sum::<f64>().sqrt()
    };
    let mean_length = match dataset.manifest() {
        Some(manifest) => Some(length(manifest)),
        None if matches!(head, RetrievalHead::Auto | RetrievalHead::Geoclip) => {
            Some(PhotoSample::read(dataset, mask)?.mean_length()?)
        }
        None => None,
    };
    Ok(DataFacts { location: location.to_owned(), width: dataset.width(), image_head, mean_length, place_rank: None })
}

/// Facts about photos that are not known yet, with embeddings of the width `width`. They are taken from the training
/// shards, if these can be read and their embeddings have this width.
pub fn training_facts(shards: &ShardsConfig, width: usize, head: RetrievalHead) -> Result<DataFacts, InferError> {
    match Dataset::open(&shards.train, shards).ok().filter(|training| training.width() == width) {
        Some(training) => data_facts(&shards.train, &training, &Mask::none(), head),
        None => Ok(DataFacts {
            location: "the photos".to_owned(),
            width,
            image_head: DataHead::Unknown,
            mean_length: None,
            place_rank: None,
        }),
    }
}

/// A sample of the photos in a data set.
struct PhotoSample {
    /// Embeddings of the first stored view, f32.
    embeddings_re: Tensor,
    /// The true places; empty if the coordinates of the data are ignored.
    places: Vec<Place>,
}

impl PhotoSample {
    /// Reads photos from blocks that are spread over the data, because neighbouring rows may show the same place.
    fn read(dataset: &Dataset, mask: &Mask) -> Result<Self, InferError> {
        let is_usable = |(block, rows): &(u32, &u32)| mask.skipped(*block).len() < **rows as usize;
        let usable: Vec<u32> = (0..).zip(dataset.block_rows()).filter(is_usable).map(|(block, _)| block).collect();
        let (mut rows, mut sampled, mut bytes) = (BlockRows::default(), Vec::new(), Vec::new());
        let row_bytes = dataset.width() * ELEMENT_BYTES;
        let every_block = usable.len().div_ceil(SAMPLE_BLOCKS).max(1);
        let rows_per_block = SAMPLE_ROWS / usable.len().div_ceil(every_block).max(1);
        for block in usable.iter().step_by(every_block) {
            dataset.read_usable_first_view(mask, *block, &mut rows)?;
            let every = (rows.embeddings.len() / row_bytes).div_ceil(rows_per_block).max(1);
            sampled.extend(places(&rows.latitudes, &rows.longitudes)?.into_iter().step_by(every));
            bytes.extend(rows.embeddings.chunks_exact(row_bytes).step_by(every).flatten());
        }
        if bytes.is_empty() {
            return Err(ShardsError::Internal("the data has no usable rows".into()).into());
        }
        let shape = [(bytes.len() / row_bytes) as i64, dataset.width() as i64];
        let embeddings_re = Tensor::f_from_data_size(&bytes, &shape, Kind::Half)?.f_to_kind(Kind::Float)?;
        Ok(Self { embeddings_re, places: sampled })
    }

    /// The mean length (L2 norm) of the embeddings.
    fn mean_length(&self) -> Result<f64, InferError> {
        let lengths_r = self.embeddings_re.f_norm_scalaropt_dim(2.0, [1].as_slice(), false)?;
        Ok(lengths_r.f_mean(Kind::Double)?.f_double_value(&[])?)
    }

    /// Computes [`DataFacts::place_rank`]. Places to which GeoCLIP gives the same score share the mean of their ranks.
    /// Returns `None` if there are too few photos to distinguish the result from chance.
    fn place_rank(&self, geoclip: &Geoclip) -> Result<Option<f64>, InferError> {
        if self.places.len() < RANKED_ROWS_MIN {
            return Ok(None);
        }
        let (rows, device) = (self.places.len() as i64, Device::Cpu);
        let places = Embedder::new(geoclip.location_encoder(device)?, 1).embed(&self.places)?;
        let places_rw = Tensor::f_from_slice(&places)?.f_view([rows, -1])?;
        let head = geoclip.image_head(device)?;
        // The similarities have one row per photo. Photo embeddings need not be normalised, because only values in the
        // same row are compared. With a single thread, all workers compute the same bits.
        let threads = tch::get_num_threads();
        tch::set_num_threads(1);
        let similarities = head.encode(&self.embeddings_re).and_then(|photos| Ok(photos.f_matmul(&places_rw.f_tr()?)?));
        tch::set_num_threads(threads);
        let similarities_rr = similarities?;
        let own_r1 = similarities_rr.f_diagonal(0, 0, 1)?.f_unsqueeze(1)?;
        let count = |found: Tensor| found.f_sum(Kind::Double)?.f_double_value(&[]);
        let (better, equal) =
            (count(similarities_rr.f_gt_tensor(&own_r1)?)?, count(similarities_rr.f_eq_tensor(&own_r1)?)?);
        // Every place is equal to itself, unless its similarity is not a number.
        let rank = (better + 0.5 * (equal - rows as f64)) / (rows * (rows - 1)) as f64;
        Ok(Some(rank).filter(|rank| *rank >= 0.0))
    }
}

/// The place rank of the training photos, or of the photos in `dataset` if the training photos cannot be read or have
/// embeddings of another width. The rank decides which head is used. Ranking the training photos keeps the places of
/// test photos out of this decision.
fn place_rank(
    config: &RetrievalConfig,
    shards: &ShardsConfig,
    dataset: &Dataset,
    mask: &Mask,
) -> Result<Option<f64>, InferError> {
    let training = Dataset::open(&shards.train, shards).ok().filter(|training| training.width() == dataset.width());
    let sample = match training.and_then(|training| PhotoSample::read(&training, &Mask::none()).ok()) {
        Some(sample) => sample,
        None => PhotoSample::read(dataset, mask)?,
    };
    sample.place_rank(&Geoclip::open(Path::new(&config.geoclip))?)
}

/// The head to use with the data at `location`: the configured head or, if this is "auto", a head that fits the data.
/// The choice depends only on the data and on GeoCLIP's weights, so all workers make the same choice. If `is_logging`
/// is true, a choice for "auto" is logged, and a configured head "geoclip" that does not recognise the places of the
/// photos causes a warning.
pub fn chosen_head(
    config: &RetrievalConfig,
    shards: &ShardsConfig,
    location: &str,
    (dataset, mask): (&Dataset, &Mask),
    is_logging: bool,
) -> Result<RetrievalHead, InferError> {
    let is_auto = match config.wanted_head() {
        RetrievalHead::Auto => true,
        RetrievalHead::Geoclip if is_logging => false,
        chosen => return Ok(chosen),
    };
    let mut facts = data_facts(location, dataset, mask, config.head)?;
    if config.has_geoclip() && facts.may_be_clip() {
        facts.place_rank = place_rank(config, shards, dataset, mask)?;
    }
    if !is_auto {
        if let Some(reason) = facts.foreign_to_geoclip() {
            tracing::warn!("{reason}; if the features are not from CLIP ViT-L/14, use `--set retrieval.head=knn`");
        }
        return Ok(config.head);
    }
    let (head, reason) = facts.fitting_head(config.has_geoclip());
    if is_logging {
        tracing::info!("retrieval head: {}, because {reason}", head.name());
    }
    Ok(head)
}

/// Opens the configured gallery and head. The head must not be "auto"; see [`chosen_head`]. Fails if the head cannot be
/// used with `test`, the data to evaluate. Also fails if the training photos would be the gallery and would take more
/// than `bytes_max` of main memory. Gallery points whose embeddings are not cached are embedded with `threads` threads,
/// and `progress` is called with the number of points done and the number of all points.
pub fn open(
    config: &RetrievalConfig,
    shards: &ShardsConfig,
    (test, bytes_max): (&DataFacts, u64),
    device: Device,
    threads: usize,
    progress: impl FnMut(usize, usize),
) -> Result<(Gallery, QueryHead), InferError> {
    check_head(config.head, test)?;
    if config.head == RetrievalHead::Knn {
        let refuse = |reason: String| RetrievalError::Head { head: "knn", location: test.location.clone(), reason };
        let dataset = Dataset::open(&shards.train, shards).map_err(|error| error.of_field("shards.train"))?;
        let (got, want) = (test.width, dataset.width());
        if got != want {
            let train = &shards.train;
            return Err(refuse(format!(
                "its embeddings have width {got}, but those of {train} have width {want}; both must come from the same \
                 encoder"
            ))
            .into());
        }
        let bytes = dataset.rows() * (want * ELEMENT_BYTES + PLACE_BYTES) as u64;
        if bytes > bytes_max {
            let [needed, allowed] = [bytes, bytes_max].map(|bytes| bytes as f64 / 1e9);
            return Err(refuse(format!(
                "the training photos would be the gallery and take {needed:.1} GB of memory in every worker, more than \
                 the {allowed:.1} GB per worker that are available; `eval --hybrid --workers 1` loads them once"
            ))
            .into());
        }
        return Ok((training_gallery(&dataset, shards)?, QueryHead::knn(config.knn_scale, device)));
    }
    let geoclip = Geoclip::open(Path::new(&config.geoclip))?;
    let encoder = geoclip.location_encoder(device)?;
    let gallery = Gallery::open(config, &geoclip, &Embedder::new(encoder, threads), progress)?;
    let head = match config.head {
        RetrievalHead::Linear => QueryHead::linear(&geoclip, &projection(PROJECTION_SEED)?, device)?,
        RetrievalHead::Trained => head_of_run(Path::new(&config.run), device)?,
        _ => QueryHead::geoclip(&geoclip, device)?,
    };
    Ok((gallery, head))
}

/// The image head of a training with `train.method = "geoclip"`: a checkpoint, or an exported file.
fn head_of_run(path: &Path, device: Device) -> Result<QueryHead, InferError> {
    let saved = SavedModel::open(path)?;
    if saved.state.config.train.method != TrainMethod::Geoclip {
        return Err(InferError::Config(format!(
            "retrieval.run: {} has no image head; wanted a run with train.method = \"geoclip\"",
            path.display()
        )));
    }
    trained_head(&saved.averages()?, device)
}

/// Warns if the model at `path` was trained on means of another number of views than `mean_views`.
pub fn warn_of_other_means(path: &Path, mean_views: u32) -> Result<(), InferError> {
    let trained = SavedModel::open(path)?.state.config.shards.mean_views;
    if trained != mean_views {
        tracing::warn!(
            "{} was trained with shards.mean_views = {trained}, but photos are now read with {mean_views}; for the \
             best accuracy, use the same number",
            path.display()
        );
    }
    Ok(())
}

/// The image head with the given weights. The standardisation of embeddings becomes a part of the first layer.
pub fn trained_head(weights: &Weights, device: Device) -> Result<QueryHead, InferError> {
    let _without_gradients = tch::no_grad_guard();
    let parameters =
        weights.parameters.iter().map(|(name, tensor)| Ok((name.clone(), tensor.f_to_device(Device::Cpu)?)));
    let mut tensors: HashMap<String, Tensor> = parameters.collect::<Result<_, tch::TchError>>()?;
    let [mean_e, deviation_e] = &weights.standardisation;
    let (mean_e, deviation_e) = (mean_e.f_to_device(Device::Cpu)?, deviation_e.f_to_device(Device::Cpu)?);
    if let (Some(weight), Some(bias)) = (tensors.remove("image.0.weight"), tensors.remove("image.0.bias")) {
        let weight = weight.f_div(&deviation_e)?;
        tensors.insert("image.0.bias".to_owned(), bias.f_sub(&weight.f_mv(&mean_e)?)?);
        tensors.insert("image.0.weight".to_owned(), weight);
    }
    Ok(QueryHead::of(GeoclipHead::new(&tensors, device)?, device))
}

/// A gallery of the training photos. It has the embedding of view 0 of every usable row, in f16. With
/// `shards.mean_views`, view 0 is the first mean.
fn training_gallery(dataset: &Dataset, config: &ShardsConfig) -> Result<Gallery, InferError> {
    let mask = Mask::for_config(dataset, config)?;
    let (mut rows, mut points) = (BlockRows::default(), Vec::new());
    let (total, width) = (dataset.rows() as i64, dataset.width() as i64);
    let embeddings = Tensor::f_empty([total, width], (Kind::Half, Device::Cpu))?;
    for block in 0..dataset.block_rows().len() as u32 {
        dataset.read_usable(&mask, block, 0, &mut rows)?;
        let (first, count) = (points.len() as i64, rows.latitudes.len() as i64);
        let block_rows = Tensor::f_from_data_size(&rows.embeddings, &[count, width], Kind::Half)?;
        embeddings.f_narrow(0, first, count)?.f_copy_(&block_rows)?;
        points.extend(places(&rows.latitudes, &rows.longitudes)?.into_iter().map(UnitVector::from));
    }
    let used = embeddings.f_narrow(0, 0, points.len() as i64)?;
    Ok(Gallery::of_embeddings(config.train.clone(), points, used)?)
}
