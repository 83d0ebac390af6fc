//! Opens the gallery and the retrieval head of an evaluation. Locates the images of a block with retrieval alone, and
//! with LocDiff-H, which also uses LocDiff's samples.

use locdiff_core::config::{DecodeAnchors, Prior, RetrievalHead};
use locdiff_core::geo::{Km, PlacePrior, UnitVector};
use locdiff_core::parallel::in_parallel;
use locdiff_core::protocol::{EvalJob, EvalTask, HybridRequest, TuningErrors};
use locdiff_core::pulse;
use locdiff_core::tuning::Trials;
use tch::{Device, Tensor};

use super::error::InferError;
use super::retrieval_data::{chosen_head, open};
use super::rows::{Image, ImageBlock, ImageRows};
use crate::retrieval::{
    DataFacts, Exclusion, Gallery, Hybrid, ImageSamples, LocatedPlaces, QueryHead, RetrievalError, RetrievedPlaces,
    Retriever, Surroundings, Voters, locate, locate_alone, try_settings,
};
use crate::shards::{Blocks as _, Dataset, Mask};

/// If the retrieval head of the job is "auto", replaces it with a head that fits the rows to evaluate. A prediction must
/// not depend on its other rows, so its head fits the training shards, if they can be read and have a manifest. `rows` is
/// `None` if the photos are not known yet. `width` is the width of their embeddings. Logs the choice if `is_logging` is
/// true. A job that uses neither a head nor a gallery is returned unchanged.
pub fn with_chosen_head(
    job: &EvalJob,
    rows: Option<&ImageRows>,
    width: usize,
    is_logging: bool,
) -> Result<EvalJob, InferError> {
    let mut job = job.clone();
    if job.hybrid == HybridRequest::No && job.config.eval.anchors == DecodeAnchors::Grid {
        return Ok(job);
    }
    let config = &job.config.retrieval;
    let training = matches!(job.task, EvalTask::Predict(_))
        .then(|| Dataset::open(&job.config.shards.train, &job.config.shards).ok())
        .flatten()
        .filter(|found| found.manifest().is_some() && found.width() == width)
        .map(|found| (found, Mask::none()));
    let (location, data) = match (&training, rows) {
        (Some((dataset, mask)), _) => (&job.config.shards.train, (dataset, mask)),
        (None, Some(rows)) => (&job.data, (&rows.dataset, &rows.mask)),
        (None, None) if config.wanted_head() == RetrievalHead::Auto => {
            return Err(InferError::Config(format!(
                "retrieval.head is \"auto\", but no training shards with a manifest and embeddings of width {width} are at \
                 {} (shards.train), so no head can be chosen; set retrieval.head",
                job.config.shards.train
            )));
        }
        (None, None) => {
            job.config.retrieval.head = config.wanted_head();
            return Ok(job);
        }
    };
    // Without retrieval, a head that the user chose is only the name of a gallery.
    let is_logging = is_logging && (config.head == RetrievalHead::Auto || job.hybrid != HybridRequest::No);
    job.config.retrieval.head = chosen_head(config, &job.config.shards, location, data, is_logging)?;
    Ok(job)
}

/// A head that turns photos into queries, and the gallery that the queries are compared with.
pub struct Retrieval {
    head: QueryHead,
    gallery: Gallery,
    hybrid: Hybrid,
    voters: Voters,
    surroundings: Surroundings,
    /// Logarithm of the user's prior at each gallery point. Empty without a prior.
    log_prior: Vec<f32>,
    /// Gallery points at most this far from a photo's true place are ignored; `None`: none are.
    exclude: Option<Km>,
    /// Location of the photos, for error messages.
    location: String,
    device: Device,
    threads: usize,
}

impl Retrieval {
    /// Opens the gallery and the head of a job. `facts` describes the photos. Returns `None` if the job does not ask for retrieval, or if retrieval
    /// is optional and cannot be done with this data and memory. In the second case, logs a warning if `is_logging` is
    /// true. Retrieval is never optional in a job that tunes LocDiff-H. While gallery points are embedded, calls
    /// `progress` with the number of points done and the number of all points.
    pub fn open(
        job: &EvalJob,
        facts: impl FnOnce() -> Result<DataFacts, InferError>,
        (device, threads): (Device, usize),
        is_logging: bool,
        progress: impl FnMut(usize, usize),
    ) -> Result<Option<Self>, InferError> {
        let config = &job.config.retrieval;
        let (bytes_max, is_optional) = match job.hybrid {
            HybridRequest::No => return Ok(None),
            HybridRequest::Wanted => (u64::MAX, false),
            HybridRequest::IfItFits { gallery_bytes_max } => {
                (gallery_bytes_max, !matches!(job.task, EvalTask::Tune(_)))
            }
        };
        match open(config, &job.config.shards, (&facts()?, bytes_max), device, threads, progress) {
            Ok((gallery, head)) => {
                // In a gallery of photos, several neighbours vote on the answer. In a gallery of places, the best
                // gallery point is the answer.
                let neighbours = if config.head == RetrievalHead::Knn { config.knn_neighbours as usize } else { 1 };
                let consensus =
                    Hybrid::without_locdiff(config.radius_km, config.consensus_scale, config.consensus_fine_scale);
                let voters = Voters { neighbours, points: config.consensus_points as usize, consensus };
                let surroundings = Surroundings::default();
                let (hybrid, location) = (Hybrid::from(config), job.data.clone());
                let exclude = Some(Km(job.config.eval.exclude_km)).filter(|radius| radius.0 > 0.0);
                let log_prior = Vec::new();
                Ok(Some(Self {
                    head,
                    gallery,
                    hybrid,
                    voters,
                    surroundings,
                    log_prior,
                    exclude,
                    location,
                    device,
                    threads,
                }))
            }
            Err(InferError::Retrieval(error @ RetrievalError::Head { .. })) if is_optional => {
                if is_logging {
                    tracing::warn!("retrieval and LocDiff-H are skipped: {error}");
                }
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The gallery.
    pub fn gallery(&self) -> &Gallery {
        &self.gallery
    }

    /// Leaves out the gallery points where the prior is 0. `None` if no point is left.
    pub fn within(self, prior: &PlacePrior) -> Result<Option<Self>, InferError> {
        let logs = in_parallel(self.threads, self.gallery.points(), |point| {
            pulse::advance();
            prior.log_at(*point) as f32
        });
        let kept: Vec<u32> = (0..).zip(&logs).filter(|(_, log)| **log > f32::NEG_INFINITY).map(|(at, _)| at).collect();
        let log_prior = kept.iter().map(|at| logs[*at as usize]).collect();
        Ok(self.gallery.restricted(&kept)?.map(|gallery| Self { gallery, log_prior, ..self }))
    }

    /// Measures the surroundings of the gallery points. `training_km` holds the distance from each point to the nearest
    /// training photo; `None` if it is not known.
    pub fn measure_surroundings(&mut self, prior: Prior, training_km: Option<&[f32]>) {
        let measured = Surroundings::new(self.gallery.index(), prior, training_km, self.threads);
        self.surroundings = measured.with_log_prior(self.log_prior.clone());
    }

    /// A retriever over the gallery.
    pub fn retriever(&self) -> Result<Retriever<'_>, InferError> {
        Ok(Retriever::new(&self.gallery, self.device, self.threads)?)
    }

    /// The answers of retrieval and of LocDiff-H for each image of a block.
    pub fn answers(
        &self,
        retriever: &Retriever<'_>,
        block: &ImageBlock,
        (embeddings_ive, samples): (&Tensor, &[ImageSamples]),
    ) -> Result<Vec<LocatedPlaces>, InferError> {
        let queries = self.queries(block, embeddings_ive)?;
        let truths = self.exclude.map_or(Ok(Vec::new()), |_| true_places(block))?;
        let excluded = self.exclude.map(|radius| Exclusion { radius, truths: &truths });
        let gallery = (retriever, &self.surroundings);
        let located = locate(gallery, &queries, samples, &self.hybrid, self.voters, excluded);
        located.map_err(|error| self.with_row(block, error))
    }

    /// The answers of retrieval alone for each image of a block.
    pub fn places(
        &self,
        retriever: &Retriever<'_>,
        block: &ImageBlock,
        embeddings_ive: &Tensor,
    ) -> Result<Vec<RetrievedPlaces>, InferError> {
        let queries = self.queries(block, embeddings_ive)?;
        let truths = self.exclude.map_or(Ok(Vec::new()), |_| true_places(block))?;
        let excluded = self.exclude.map(|radius| Exclusion { radius, truths: &truths });
        let located = locate_alone((retriever, &self.surroundings), &queries, self.voters, excluded);
        located.map_err(|error| self.with_row(block, error))
    }

    /// For each image of a block, the distance errors of LocDiff, of retrieval, of retrieval with consensus under each
    /// of its settings, and of LocDiff-H under every setting of `trials`.
    pub fn errors(
        &self,
        retriever: &Retriever<'_>,
        block: &ImageBlock,
        (embeddings_ive, samples): (&Tensor, &[ImageSamples]),
        trials: &Trials,
    ) -> Result<Vec<TuningErrors>, InferError> {
        let queries = self.queries(block, embeddings_ive)?;
        let (gallery, truths) = ((retriever, &self.surroundings), true_places(block)?);
        let errors = try_settings(gallery, &queries, samples, &truths, trials, self.voters, self.exclude);
        errors.map_err(|error| self.with_row(block, error))
    }

    /// The queries of the images of a block. The padding of the block is left out, because embeddings of zeros have no
    /// direction.
    fn queries(&self, block: &ImageBlock, embeddings_ive: &Tensor) -> Result<Tensor, InferError> {
        let (images, views) = (block.images.len() as i64, block.views as i64);
        let own = embeddings_ive.f_narrow(0, 0, images * views)?.f_view([images, views, block.width as i64])?;
        self.head.queries(&own).map_err(|error| self.with_row(block, error))
    }

    /// An error about one image of a block, with the location and the row of the image.
    fn with_row(&self, block: &ImageBlock, error: RetrievalError) -> InferError {
        let row = |image: usize| {
            let Image { row, id, .. } = &block.images[image];
            format!("{}: row {row} ({id})", self.location)
        };
        match error {
            RetrievalError::NoDirection { what: "image", row: image } => InferError::BadData(format!(
                "{}: the embedding or the output of the head is zero or not finite, so it has no direction",
                row(image)
            )),
            RetrievalError::AllExcluded { row: image, radius_km } => InferError::Config(format!(
                "{}: all gallery points are within eval.exclude_km ({radius_km} km) of its true place; lower \
                 eval.exclude_km",
                row(image)
            )),
            other => other.into(),
        }
    }
}

fn true_places(block: &ImageBlock) -> Result<Vec<UnitVector>, InferError> {
    block.images.iter().map(|image| Ok(image.true_place()?.into())).collect()
}
