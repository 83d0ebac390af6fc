//! Prepares retrieval for a data set: collects facts about the embeddings, and opens the gallery and the head. Training
//! photos can serve as a gallery.

use std::path::Path;

use locdiff_core::config::{RetrievalConfig, RetrievalHead, ShardsConfig};
use locdiff_core::geo::{UnitVector, places};
use tch::{Device, Kind, Tensor};

use super::error::InferError;
use crate::geoclip::{Embedder, Geoclip};
use crate::retrieval::{DataFacts, DataHead, Gallery, QueryHead, RetrievalError, check_head};
use crate::shards::{BlockRows, Blocks, Dataset, ImageHead, Manifest, Mask, PROJECTION_SEED, ShardsError, projection};

/// Facts about the embeddings of a data set. If the data set has no manifest and `head` needs the mean length of the
/// embeddings, the length is measured on some rows.
pub fn data_facts(
    location: &str,
    dataset: &Dataset,
    mask: &Mask,
    head: RetrievalHead,
) -> Result<DataFacts, InferError> {
    let image_head = match dataset.origin().map(|origin| origin.image_head) {
        Some(ImageHead::Geoclip) => DataHead::Geoclip,
        Some(ImageHead::Linear) => DataHead::Linear,
        Some(ImageHead::None) | None => DataHead::Unknown,
    };
    // The root mean square length of the embeddings, from the means and standard deviations in the manifest.
    let length = |manifest: &Manifest| {
        let squares = manifest.mean.iter().chain(&manifest.standard_deviation).map(|value| value * value);
        squares.sum::<f64>().sqrt()
    };
    let mean_length = match dataset.manifest() {
        Some(manifest) => Some(length(manifest)),
        None if matches!(head, RetrievalHead::Auto | RetrievalHead::Geoclip) => Some(measured_length(dataset, mask)?),
        None => None,
    };
    Ok(DataFacts { location: location.to_owned(), width: dataset.width(), image_head, mean_length })
}

/// The mean length (L2 norm) of the embeddings of view 0 in the first block that has usable rows.
fn measured_length(dataset: &Dataset, mask: &Mask) -> Result<f64, InferError> {
    let is_usable = |(block, rows): &(u32, &u32)| mask.skipped(*block).len() < **rows as usize;
    let found = (0_u32..).zip(dataset.block_rows()).find(is_usable);
    let block =
        found.map(|(block, _)| block).ok_or_else(|| ShardsError::Internal("the data has no usable rows".into()))?;
    let mut rows = BlockRows::default();
    dataset.read_usable(mask, block, 0, &mut rows)?;
    let shape = [rows.latitudes.len() as i64, dataset.width() as i64];
    let kept_re = Tensor::f_from_data_size(&rows.embeddings, &shape, Kind::Half)?.f_to_kind(Kind::Float)?;
    let lengths_r = kept_re.f_norm_scalaropt_dim(2.0, [1].as_slice(), false)?;
    Ok(lengths_r.f_mean(Kind::Double)?.f_double_value(&[])?)
}

/// The head to use with the data: the configured head or, if this is "auto", a head that fits the data. For "auto",
/// also returns the reason for the choice. The choice depends only on the data and on whether GeoCLIP's weights exist,
/// so all workers make the same choice.
pub fn chosen_head(
    config: &RetrievalConfig,
    location: &str,
    dataset: &Dataset,
    mask: &Mask,
) -> Result<(RetrievalHead, Option<String>), InferError> {
    if config.head != RetrievalHead::Auto {
        return Ok((config.head, None));
    }
    let facts = data_facts(location, dataset, mask, config.head)?;
    let (head, reason) = facts.fitting_head(config.has_geoclip());
    Ok((head, Some(reason)))
}

/// Opens the configured gallery and head. The head must not be "auto"; see [`chosen_head`]. Fails if the head cannot be
/// used with `test`, the data to evaluate. Gallery points whose embeddings are not cached are embedded with `threads`
/// threads, and `progress` is called with the number of points done and the number of all points.
pub fn open(
    config: &RetrievalConfig,
    shards: &ShardsConfig,
    test: &DataFacts,
    device: Device,
    threads: usize,
    progress: impl FnMut(usize, usize),
) -> Result<(Gallery, QueryHead), InferError> {
    check_head(config.head, test)?;
    if config.head == RetrievalHead::Knn {
        let gallery = training_gallery(shards)?;
        if gallery.width() != test.width {
            let reason = format!(
                "its embeddings have width {}, but those of {} have width {}; both must come from the same encoder",
                test.width,
                shards.train,
                gallery.width()
            );
            return Err(RetrievalError::Head { head: "knn", location: test.location.clone(), reason }.into());
        }
        return Ok((gallery, QueryHead::knn(config.knn_scale, device)));
    }
    let geoclip = Geoclip::open(Path::new(&config.geoclip))?;
    let encoder = geoclip.location_encoder(device)?;
    let gallery = Gallery::open(config, &geoclip, &Embedder::new(encoder, threads), progress)?;
    let head = match config.head {
        RetrievalHead::Linear => QueryHead::linear(&geoclip, &projection(PROJECTION_SEED)?, device)?,
        _ => QueryHead::geoclip(&geoclip, device)?,
    };
    Ok((gallery, head))
}

/// A gallery of the training photos. It has the embedding of view 0 of every usable row, in f16 as stored.
fn training_gallery(config: &ShardsConfig) -> Result<Gallery, InferError> {
    let dataset = Dataset::open(&config.train, config).map_err(|error| error.of_field("shards.train"))?;
    let mask = Mask::for_config(&dataset, config)?;
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
