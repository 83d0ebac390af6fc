//! Retrieval and LocDiff-H on top of LocDiff's samples: which gallery and which head, and their answers for a block of images.

use std::time::{Duration, Instant};

use locdiff_core::config::RetrievalHead;
use locdiff_core::geo::UnitVector;
use locdiff_core::protocol::{EvalJob, HybridWish, TuningErrors};
use tch::{Device, Tensor};

use super::error::InferError;
use super::retrieval_data::{data_facts, open};
use super::rows::{Image, ImageBlock, Rows};
use crate::retrieval::{
    Gallery, Grid, Hybrid, Located, QueryHead, RetrievalError, Retriever, Samples, locate, try_settings,
};

/// Time between two lines about progress.
const SAY_EVERY: Duration = Duration::from_secs(10);

/// What turns photos into queries, and what they are compared with.
pub struct Retrieval {
    head: QueryHead,
    gallery: Gallery,
    hybrid: Hybrid,
    neighbours: usize,
    /// Where the photos are, for messages.
    location: String,
    device: Device,
    threads: usize,
}

impl Retrieval {
    /// Opens what the job asks for; none where it asks for none, or only for what fits and nothing does. That is said aloud where
    /// this worker `speaks`.
    pub fn open(
        job: &EvalJob,
        rows: &Rows,
        (device, threads): (Device, usize),
        speaks: bool,
    ) -> Result<Option<Self>, InferError> {
        let config = &job.config.retrieval;
        if job.hybrid == HybridWish::No {
            return Ok(None);
        }
        let facts = data_facts(&job.data, &rows.dataset, &rows.mask, config.head)?;
        match open(config, &job.config.shards, &facts, device, threads, progress()) {
            Ok((gallery, head)) => {
                // Neighbours vote among photos; of GeoCLIP's gallery points the best is the answer.
                let neighbours = if config.head == RetrievalHead::Knn { config.knn_neighbours as usize } else { 1 };
                let (hybrid, location) = (Hybrid::from(config), job.data.clone());
                Ok(Some(Self { head, gallery, hybrid, neighbours, location, device, threads }))
            }
            Err(InferError::Retrieval(misfit @ RetrievalError::Head { .. })) if job.hybrid == HybridWish::IfItFits => {
                if speaks {
                    tracing::warn!("no retrieval and no LocDiff-H: {misfit}");
                }
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// What is retrieved from.
    pub fn gallery(&self) -> &Gallery {
        &self.gallery
    }

    /// What asks the gallery.
    pub fn retriever(&self) -> Result<Retriever<'_>, InferError> {
        Ok(Retriever::new(&self.gallery, self.device, self.threads)?)
    }

    /// Retrieval's and LocDiff-H's answers for the images of a block.
    pub fn answers(
        &self,
        retriever: &Retriever<'_>,
        block: &ImageBlock,
        (embeddings_ive, samples): (&Tensor, &[Samples]),
    ) -> Result<Vec<Located>, InferError> {
        let queries = self.queries(block, embeddings_ive)?;
        Ok(locate(retriever, &queries, samples, &self.hybrid, self.neighbours)?)
    }

    /// How far off every setting of a grid is for the images of a block.
    pub fn errors(
        &self,
        retriever: &Retriever<'_>,
        block: &ImageBlock,
        (embeddings_ive, samples): (&Tensor, &[Samples]),
        grid: &Grid,
    ) -> Result<Vec<TuningErrors>, InferError> {
        let queries = self.queries(block, embeddings_ive)?;
        let truths: Vec<UnitVector> = block.images.iter().map(|image| image.truth.into()).collect();
        Ok(try_settings(retriever, &queries, samples, &truths, grid, self.neighbours)?)
    }

    /// Only of images that are there: what fills a block up points nowhere.
    fn queries(&self, block: &ImageBlock, embeddings_ive: &Tensor) -> Result<Tensor, InferError> {
        let (images, views) = (block.images.len() as i64, block.views as i64);
        let own = embeddings_ive.f_narrow(0, 0, images * views)?.f_view([images, views, block.width as i64])?;
        self.head.queries(&own).map_err(|error| match error {
            RetrievalError::NoDirection { what: "image", row } => {
                let (location, Image { row, id, .. }) = (&self.location, &block.images[row]);
                InferError::BadData(format!(
                    "{location}: row {row} ({id}): its embedding, or what the head makes of it, is zero or not finite, so that \
                     it is like nothing"
                ))
            }
            other => other.into(),
        })
    }
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
