//! Retrieval and LocDiff-H within an evaluation: which gallery and which head, and their answers beside LocDiff's.

use std::path::Path;
use std::time::{Duration, Instant};

use locdiff_core::config::{RetrievalConfig, RetrievalHead, RunConfig};
use locdiff_core::geo::{Degrees, Place, UnitVector};
use locdiff_core::protocol::{EvalJob, HybridWish, TuningErrors};
use locdiff_core::tables;
use tch::{Device, Tensor};

use super::engine::Sighting;
use super::error::EvalError;
use super::locate::Worker;
use super::retrieval_data::{self, RetrievalDataError, data_facts};
use super::rows::{ImageBlock, Rows};
use crate::geoclip::Geoclip;
use crate::native::cuda;
use crate::retrieval::{
    Gallery, Grid, Hybrid, Located, QueryHead, RetrievalError, Retriever, Samples, locate, try_settings,
};
use crate::shards::{BlockRows, Blocks, Dataset, Mask};

/// Time between two lines about progress.
const SAY_EVERY: Duration = Duration::from_secs(10);

/// What turns photos into queries, and what they are compared with.
pub(super) struct Retrieval {
    head: QueryHead,
    gallery: Gallery,
    hybrid: Hybrid,
    neighbours: usize,
    /// Where the photos are, for messages.
    location: String,
}

impl Retrieval {
    /// Opens what the job asks for; none where it asks for none, or only for what fits and nothing does.
    pub(super) fn open(job: &EvalJob, rows: &Rows, worker: Worker) -> Result<Option<Self>, EvalError> {
        let config = &job.config.retrieval;
        if job.hybrid == HybridWish::No {
            return Ok(None);
        }
        let facts = data_facts(&job.data, rows.dataset(), rows.mask(), config.head)?;
        let opened =
            retrieval_data::open(config, &job.config.shards, &facts, worker.device, worker.threads, progress());
        match opened {
            Ok((gallery, head)) => {
                // Neighbours vote among photos; of GeoCLIP's gallery points the best is the answer.
                let neighbours = if config.head == RetrievalHead::Knn { config.knn_neighbours as usize } else { 1 };
                let (hybrid, location) = (Hybrid::from(config), job.data.clone());
                Ok(Some(Self { head, gallery, hybrid, neighbours, location }))
            }
            Err(RetrievalDataError::Retrieval(misfit @ RetrievalError::Head { .. }))
                if job.hybrid == HybridWish::IfItFits =>
            {
                if worker.rank == 0 {
                    tracing::warn!("no retrieval and no LocDiff-H: {misfit}");
                }
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// What is retrieved from.
    pub(super) fn gallery(&self) -> &Gallery {
        &self.gallery
    }

    /// What asks the gallery.
    pub(super) fn retriever(&self, worker: Worker) -> Result<Retriever<'_>, EvalError> {
        Ok(Retriever::new(&self.gallery, worker.device, worker.threads)?)
    }

    /// Retrieval's and LocDiff-H's answers for the images of a block.
    pub(super) fn answers(
        &self,
        retriever: &Retriever<'_>,
        block: &ImageBlock,
        (embeddings_ive, sightings): (&Tensor, &[Sighting]),
    ) -> Result<Vec<Located>, EvalError> {
        let queries = self.queries(block, embeddings_ive)?;
        Ok(locate(retriever, &queries, &samples(sightings), &self.hybrid, self.neighbours)?)
    }

    /// How far off every setting of a grid is for the images of a block.
    pub(super) fn errors(
        &self,
        retriever: &Retriever<'_>,
        block: &ImageBlock,
        (embeddings_ive, sightings): (&Tensor, &[Sighting]),
        grid: &Grid,
    ) -> Result<Vec<TuningErrors>, EvalError> {
        let queries = self.queries(block, embeddings_ive)?;
        let truths: Vec<UnitVector> = block.images.iter().map(|image| image.truth.into()).collect();
        Ok(try_settings(retriever, &queries, &samples(sightings), &truths, grid, self.neighbours)?)
    }

    /// Only of images that are there: what fills a block up points nowhere.
    fn queries(&self, block: &ImageBlock, embeddings_ive: &Tensor) -> Result<Tensor, EvalError> {
        let (images, views) = (block.images.len() as i64, block.views as i64);
        let own = embeddings_ive.f_narrow(0, 0, images * views)?.f_view([images, views, block.width as i64])?;
        self.head.queries(&own).map_err(|error| match error {
            RetrievalError::NoDirection { what: "image", row } => {
                let (location, image) = (self.location.clone(), &block.images[row]);
                EvalError::NoDirection { location, row: image.row, id: image.id.clone() }
            }
            other => other.into(),
        })
    }
}

fn samples(sightings: &[Sighting]) -> Vec<Samples> {
    let one = |sighting: &Sighting| Samples { aggregate: sighting.answer, samples: sighting.samples.clone() };
    sightings.iter().map(one).collect()
}

/// Says now and then how many gallery points are embedded.
fn progress() -> impl FnMut(usize) {
    let mut said = Instant::now();
    move |done| {
        if said.elapsed() >= SAY_EVERY {
            said = Instant::now();
            tracing::info!("{done} gallery points embedded");
        }
    }
}

/// Embeds the gallery of an evaluation, so that its embeddings lie on the disk; how many points it has. None where the head does not
/// fit the data and need not.
pub fn embed_gallery(job: &EvalJob, worker: Worker) -> Result<Option<usize>, EvalError> {
    if let Device::Cuda(index) = worker.device {
        cuda::set_device(index)?;
    }
    let rows = Rows::open(&job.data, &job.config)?;
    let opened = Retrieval::open(job, &rows, worker)?;
    Ok(opened.map(|opened| opened.gallery.points().len()))
}

/// The points of the gallery, for decoding. Where photos are compared with training photos and no gallery is named, these are the
/// places of those.
pub(super) fn gallery_points(config: &RunConfig, opened: Option<&Retrieval>) -> Result<Vec<UnitVector>, EvalError> {
    let RetrievalConfig { gallery, head, geoclip, .. } = &config.retrieval;
    let is_photos = *head == RetrievalHead::Knn;
    let places = match opened {
        Some(opened) if !is_photos || gallery.is_empty() => return Ok(opened.gallery.points().to_vec()),
        _ if !gallery.is_empty() => tables::read_places(Path::new(gallery))?,
        _ if is_photos => training_places(config)?,
        _ => Geoclip::open(Path::new(geoclip))?.places().to_vec(),
    };
    Ok(places.into_iter().map(UnitVector::from).collect())
}

/// Places of every training row that can be used.
fn training_places(config: &RunConfig) -> Result<Vec<Place>, EvalError> {
    let dataset = Dataset::open(&config.shards.train, &config.shards)?;
    let mask = Mask::for_config(&dataset, &config.shards)?;
    let (mut places, mut rows) = (Vec::new(), BlockRows::default());
    for block in 0..dataset.block_rows().len() as u32 {
        let skipped = mask.skipped(block);
        dataset.read_except(block, 0, skipped, &mut rows)?;
        let found = (0_u32..).zip(rows.latitudes.iter().zip(&rows.longitudes));
        for (_, (latitude, longitude)) in found.filter(|(row, _)| skipped.binary_search(row).is_err()) {
            places.push(Place::new(Degrees(*latitude), Degrees(*longitude))?);
        }
    }
    Ok(places)
}
