//! The evaluation job of one worker. The worker locates its share of the rows and sends the answers to the launcher,
//! block by block.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::ops::Range;
use std::path::Path;

use locdiff_core::config::{DecodeAnchors, OnBadRows, Prior, RetrievalHead, RunConfig, TrainMethod};
use locdiff_core::geo::{Place, SphereIndex, UnitVector};
use locdiff_core::metrics::{Overlap, Overlaps};
use locdiff_core::protocol::{
    EvalJob, EvalSummary, EvalTask, LocatedRow, LocatedRows, Method, NearestKnown, PredictedRow, PredictedRows,
    Prediction, ToLauncher, WorkerSlot, piece_rows,
};
use locdiff_core::tuning::Trials;
use tch::Device;

use super::density::RowDensities;
use super::report_photos::ReportPhotos;
use super::rows::{degrees, located, predicted, with_spread};
use super::truth::TruthFile;
use crate::infer::anchors::anchors;
use crate::infer::overlap::{nearest_km, training_index};
use crate::infer::retrieval_data::{data_facts, warn_of_other_means};
use crate::infer::retrieve::{Retrieval, with_chosen_head};
use crate::infer::{Engine, ImageBlock, ImageRows, InferError, Located, PreparedPrior, SavedModel, Trained};
use crate::native::cuda;
use crate::retrieval::{ImageSamples, RetrievedPlaces, Retriever};
use crate::shards::{BlockRows, Blocks, Coordinates, ELEMENT_BYTES, ShardsError};

/// Rows per message about known places. A message must not exceed `FRAME_BYTES_MAX`.
const NEAREST_ROWS: usize = 1 << 16;
/// Predicted rows per message. A row with a density may take 300 kB.
pub(super) const PREDICTED_ROWS: usize = 32;

/// The device that a worker computes on: its GPU, or the CPU if the worker has no GPU.
pub fn device(worker: &WorkerSlot) -> Device {
    worker.gpu.map_or(Device::Cpu, |gpu| Device::Cuda(gpu as usize))
}

/// Makes this worker's GPU the current device and opens the rows of the job. A prediction without true places ignores
/// the coordinates of the data.
fn open_rows(job: &EvalJob, worker: &WorkerSlot) -> Result<ImageRows, InferError> {
    if let Device::Cuda(index) = device(worker) {
        cuda::set_device(index)?;
    }
    let mut config = job.config.clone();
    if let EvalTask::Predict(Prediction { skips_bad_rows: true, .. }) = &job.task {
        config.shards.on_bad_rows = OnBadRows::Skip;
    }
    let coordinates = if job.task.needs_truth() { Coordinates::Needed } else { Coordinates::Ignored };
    let rows = ImageRows::open_with(coordinates, &job.data, &config)?;
    Ok(rows.in_blocks_for(device(worker), job.config.eval.samples))
}

fn open_retrieval(
    job: &EvalJob,
    worker: &WorkerSlot,
    rows: &ImageRows,
    progress: impl FnMut(usize, usize),
) -> Result<Option<Retrieval>, InferError> {
    let facts = || data_facts(&job.data, &rows.dataset, &rows.mask, job.config.retrieval.head);
    Retrieval::open(job, facts, (device(worker), worker.threads as usize), worker.rank == 0, progress)
}

/// Embeds the gallery of an evaluation and caches the embeddings on disk, so that the workers of the evaluation only
/// load them. Calls `progress` with the number of points done and the number of all points. Returns the number of
/// gallery points. Returns `None` if the evaluation runs without retrieval, or if its gallery is the training photos,
/// whose embeddings are already on disk.
pub fn embed_gallery(
    job: &EvalJob,
    worker: &WorkerSlot,
    progress: impl FnMut(usize, usize),
) -> Result<Option<usize>, InferError> {
    let rows = open_rows(job, worker)?;
    // Check the truth file first, because embedding the gallery can take minutes.
    if job.task.needs_truth() {
        TruthFile::open(&job.data, &rows, &job.config)?;
    }
    let job = with_chosen_head(job, Some(&rows), rows.dataset.width(), false)?;
    if job.config.retrieval.head == RetrievalHead::Knn {
        return Ok(None);
    }
    let opened = open_retrieval(&job, worker, &rows, progress)?;
    Ok(opened.map(|opened| opened.gallery().points().len()))
}

/// Locates this worker's rows and calls `send` with the answers of each block. If the task is to evaluate, every rank
/// also sends the report photos among its rows, and rank 0 how near the true places are to training places and gallery
/// points.
pub fn run(
    job: &EvalJob,
    worker: &WorkerSlot,
    send: &mut dyn FnMut(ToLauncher) -> Result<(), InferError>,
) -> Result<EvalSummary, InferError> {
    let rows = open_rows(job, worker)?;
    let job = &with_chosen_head(job, Some(&rows), rows.dataset.width(), worker.rank == 0)?;
    let config = &job.config;
    let truth = if job.task.needs_truth() { TruthFile::open(&job.data, &rows, config)? } else { None };
    if matches!(job.task, EvalTask::Tune(_)) && worker.rank == 0 {
        check_no_test_photos(job, &rows)?;
    }
    let saved = SavedModel::open_exactly(&job.checkpoint, &job.checkpoint_xxh3)?;
    let prior = job.task.prior().map(|path| PreparedPrior::open(path, saved.state.degree)).transpose()?;
    let mut retrieval = open_retrieval(job, worker, &rows, |_, _| ())?;
    if let Some(prior) = &prior {
        retrieval = within_prior(config, retrieval, prior, worker.rank == 0)?;
    }
    if worker.rank == 0 {
        warn_of_models_with_other_means(job, retrieval.is_some())?;
    }
    let sends_nearest = worker.rank == 0 && matches!(job.task, EvalTask::Evaluate { .. });
    let training = measure_surroundings(config, retrieval.as_mut(), sends_nearest);
    let engine = match config.train.method {
        TrainMethod::Locdiff => {
            let within = (retrieval.as_ref(), prior.as_ref());
            Some(open_engine(job, &saved, device(worker), rows.dataset.width(), within)?)
        }
        TrainMethod::Geoclip => None,
    };
    let densities = RowDensities::wanted(&job.task);
    if sends_nearest {
        let anchors = engine.as_ref().map_or(&[][..], Engine::anchors);
        let truth = true_places(&rows, truth.as_ref())?;
        send_nearest(config, &truth, (retrieval.as_ref(), anchors, training.as_ref()), send)?;
    }
    drop(training);
    let retriever = retrieval.as_ref().map(Retrieval::retriever).transpose()?;
    let trials = if let EvalTask::Tune(fixed) = &job.task { Some(Trials::default().fixed(fixed)) } else { None };
    let methods = Methods { retrieval: retrieval.as_ref().zip(retriever.as_ref()), trials };
    let blocks = shares(job, &rows, worker).into_iter().flat_map(|share| rows.blocks(share)).map(|block| {
        let mut block = block?;
        truth.as_ref().map_or(Ok(()), |truth| truth.apply(&mut block))?;
        Ok(block)
    });
    if matches!(job.task, EvalTask::Predict(_)) {
        // The launcher notices changed data before it gets a row.
        send_version(&rows, send)?;
    }
    let data_version = rows.dataset.version()?;
    let data = &rows;
    let mut photos = ReportPhotos::new(job, rows.count);
    let mut send_rows = |found: Vec<LocatedRow>, samples: &[ImageSamples]| {
        let (of_rows, found) = (rows.count, found.into_iter().zip(samples));
        let EvalTask::Predict(wanted) = &job.task else {
            let rows = found.map(|(row, samples)| with_spread(row, samples)).collect::<Result<_, _>>()?;
            let fingerprint = fingerprint(data);
            return send(ToLauncher::Located(LocatedRows { of_rows, fingerprint, rows }));
        };
        let found = found.map(|(row, samples)| predicted(row, samples, wanted));
        let found = found.collect::<Result<Vec<PredictedRow>, InferError>>()?;
        let mut parts = found.chunks(PREDICTED_ROWS);
        parts.try_for_each(|rows| {
            let (data_version, rows) = (data_version.clone(), rows.to_vec());
            send(ToLauncher::Predicted(PredictedRows { of_rows, data_version, rows }))
        })
    };
    match &engine {
        Some(engine) => {
            engine.locate_all(blocks).try_for_each(|located| {
                let located = located?;
                let mut found = methods.answers(&located)?;
                densities.as_ref().map_or(Ok(()), |densities| densities.add(engine, &located, &mut found, |_| true))?;
                photos.keep(&located, &found)?;
                send_rows(found, &located.samples)
            })?;
            let photos = photos.with_densities(&rows, engine)?;
            photos.into_iter().try_for_each(|photo| send(ToLauncher::ReportPhoto(photo)))?;
        }
        None => blocks.into_iter().try_for_each(|block| {
            let (found, samples) = methods.answers_of_retrieval(&block?, device(worker))?;
            send_rows(found, &samples)
        })?,
    }
    if matches!(job.task, EvalTask::Predict(_)) {
        // Files may have changed while they were read.
        send_version(&rows, send)?;
    }
    Ok(summary(config, &rows, &saved, engine.as_ref(), retrieval.as_ref()))
}

fn summary(
    config: &RunConfig,
    rows: &ImageRows,
    saved: &SavedModel,
    engine: Option<&Engine>,
    retrieval: Option<&Retrieval>,
) -> EvalSummary {
    EvalSummary {
        step: saved.step,
        degree: saved.state.degree,
        rows: rows.count,
        skipped_rows: rows.mask.count(),
        views: rows.dataset.stored_views(),
        mean_views: config.shards.mean_views,
        source: rows.dataset.origin().map(|origin| origin.source.clone()),
        is_simulated: rows.is_simulated(),
        fingerprint: fingerprint(rows),
        anchors: engine.map_or(0, |engine| engine.anchors().len()) as u64,
        head: retrieval.map(|_| config.retrieval.head),
        gallery_points: retrieval.map(|retrieval| retrieval.gallery().points().len() as u64),
    }
}

fn fingerprint(rows: &ImageRows) -> String {
    format!("{:016x}", rows.dataset.fingerprint())
}

/// Warns if the model or the image head was trained on means of another number of views.
fn warn_of_models_with_other_means(job: &EvalJob, has_retrieval: bool) -> Result<(), InferError> {
    let config = &job.config;
    let head = has_retrieval && config.retrieval.head == RetrievalHead::Trained;
    let models = std::iter::once(&*job.checkpoint).chain(head.then(|| Path::new(&config.retrieval.run)));
    models.into_iter().try_for_each(|model| warn_of_other_means(model, config.shards.mean_views))
}

/// Sends the version that the data has now.
fn send_version(
    rows: &ImageRows,
    send: &mut dyn FnMut(ToLauncher) -> Result<(), InferError>,
) -> Result<(), InferError> {
    let (of_rows, data_version) = (rows.count, rows.dataset.version()?);
    send(ToLauncher::Predicted(PredictedRows { of_rows, data_version, rows: Vec::new() }))
}

/// Leaves out the gallery points where the prior is 0. If none is left, the answers are those of LocDiff.
fn within_prior(
    config: &RunConfig,
    retrieval: Option<Retrieval>,
    prior: &PreparedPrior,
    is_logging: bool,
) -> Result<Option<Retrieval>, InferError> {
    let Some(retrieval) = retrieval else { return Ok(None) };
    let found = retrieval.within(prior.prior())?;
    if found.is_none() && config.train.method == TrainMethod::Geoclip {
        let reason = "the prior is 0 at all gallery points, and this run answers only with gallery points";
        return Err(InferError::BadData(format!("{reason}; choose another gallery or a run with LocDiff")));
    }
    if found.is_none() && is_logging {
        tracing::warn!("the prior is 0 at all gallery points, so the answers are those of LocDiff, without retrieval");
    }
    Ok(found)
}

/// Measures the surroundings of the gallery points. Returns an index of the training places, if it was made for this
/// purpose, or for the distances to known places that `sends_nearest` asks for.
pub(super) fn measure_surroundings(
    config: &RunConfig,
    retrieval: Option<&mut Retrieval>,
    sends_nearest: bool,
) -> Option<SphereIndex> {
    // With the head "knn", the gallery consists of the training photos.
    let is_of_places = retrieval.is_some() && config.retrieval.head != RetrievalHead::Knn;
    let measures = is_of_places && config.train.method == TrainMethod::Locdiff;
    let training = (measures || sends_nearest && (is_of_places || retrieval.is_none()))
        .then(|| training_index(config, None))
        .flatten();
    if let Some(retrieval) = retrieval {
        let index = training.as_ref().filter(|_| measures);
        let training_km = index.map(|index| nearest_km(index, retrieval.gallery().points()));
        let prior = if is_of_places { config.eval.prior } else { Prior::Training };
        retrieval.measure_surroundings(prior, training_km.as_deref());
    }
    training
}

/// The engine with the network of the job's model. `width` is the width of the embeddings to locate.
pub(super) fn open_engine(
    job: &EvalJob,
    saved: &SavedModel,
    device: Device,
    width: usize,
    (retrieval, prior): (Option<&Retrieval>, Option<&PreparedPrior>),
) -> Result<Engine, InferError> {
    let (config, trained) = (&job.config, Trained::open(saved, device)?);
    trained.denoiser.check_width(&job.checkpoint.display().to_string(), &job.data, width)?;
    let anchors = anchors(config, &trained, retrieval)?;
    trained.check(&config.eval)?;
    let engine = |anchors| Engine::new(trained.denoiser, &config.eval, config.train.seed, anchors);
    match prior {
        Some(prior) => engine(prior.anchors(anchors))?.with_prior(prior),
        None => engine(anchors),
    }
}

/// The true places of all rows, in order.
fn true_places(rows: &ImageRows, truth: Option<&TruthFile>) -> Result<Vec<UnitVector>, InferError> {
    let place = |(id, place): (String, Place)| truth.map_or(Ok(place), |truth| truth.place(&id)).map(UnitVector::from);
    rows.ids_and_places()?.into_iter().map(place).collect()
}

/// Measures and sends how near the true places are to training places and to the points of the gallery that retrieval
/// or the decoder uses.
fn send_nearest(
    config: &RunConfig,
    truth: &[UnitVector],
    (retrieval, anchors, training): (Option<&Retrieval>, &[UnitVector], Option<&SphereIndex>),
    send: &mut dyn FnMut(ToLauncher) -> Result<(), InferError>,
) -> Result<(), InferError> {
    let gallery_km = match (retrieval, config.eval.anchors) {
        (Some(retrieval), _) => Some(nearest_km(retrieval.gallery().index(), truth)),
        (None, DecodeAnchors::Gallery) => Some(nearest_km(&SphereIndex::new(anchors.to_vec()), truth)),
        (None, DecodeAnchors::Grid) => None,
    };
    // With the head "knn", the gallery of retrieval consists of the training photos.
    let training_km = match &gallery_km {
        Some(km) if retrieval.is_some() && config.retrieval.head == RetrievalHead::Knn => Some(km.clone()),
        _ => training.map(|index| nearest_km(index, truth)),
    };
    let count = |km: &Vec<f32>| Overlap::count(truth, km);
    let overlaps = Overlaps { training: training_km.as_ref().map(count), gallery: gallery_km.as_ref().map(count) };
    overlaps.lines().iter().for_each(|line| tracing::info!("{line}"));
    for first in (0..truth.len()).step_by(NEAREST_ROWS) {
        let part = |km: &Vec<f32>| km[first..truth.len().min(first + NEAREST_ROWS)].to_vec();
        let (training_km, gallery_km) = (training_km.as_ref().map(part), gallery_km.as_ref().map(part));
        send(ToLauncher::Nearest(NearestKnown { training_km, gallery_km }))?;
    }
    Ok(())
}

/// The methods that the job evaluates, besides LocDiff.
pub(super) struct Methods<'a> {
    pub(super) retrieval: Option<(&'a Retrieval, &'a Retriever<'a>)>,
    /// The settings to try; `None` unless LocDiff-H is tuned.
    pub(super) trials: Option<Trials>,
}

impl Methods<'_> {
    /// The answers of retrieval alone, for a run that has trained only a head.
    pub(super) fn answers_of_retrieval(
        &self,
        block: &ImageBlock,
        device: Device,
    ) -> Result<(Vec<LocatedRow>, Vec<ImageSamples>), InferError> {
        let Some((retrieval, retriever)) = self.retrieval else { return Ok((Vec::new(), Vec::new())) };
        let places = retrieval.places(retriever, block, &block.embeddings(device)?)?;
        let sample = |found: &RetrievedPlaces| ImageSamples {
            aggregate: found.retrieval,
            samples: vec![found.retrieval],
            weights: Vec::new(),
            expected: Vec::new(),
        };
        let samples: Vec<ImageSamples> = places.iter().map(sample).collect();
        let mut rows = located(block, &samples);
        for (row, found) in rows.iter_mut().zip(&places) {
            row.answers[0].0 = Method::Retrieval;
            row.answers.push((Method::RetrievalConsensus, degrees(found.consensus)));
        }
        Ok((rows, samples))
    }

    /// The answers of all methods for the images of a block.
    pub(super) fn answers(
        &self,
        Located { block, embeddings_ive, samples, .. }: &Located,
    ) -> Result<Vec<LocatedRow>, InferError> {
        let mut rows = located(block, samples);
        let Some((retrieval, retriever)) = self.retrieval else { return Ok(rows) };
        let inputs = (embeddings_ive, samples.as_slice());
        if let Some(trials) = &self.trials {
            for (row, found) in rows.iter_mut().zip(retrieval.errors(retriever, block, inputs, trials)?) {
                row.tuning = Some(found);
            }
            return Ok(rows);
        }
        let answers = retrieval.answers(retriever, block, inputs)?;
        for (row, (samples, answer)) in rows.iter_mut().zip(samples.iter().zip(answers)) {
            row.answers.insert(0, (Method::Retrieval, degrees(answer.retrieval)));
            row.answers.insert(1, (Method::RetrievalConsensus, degrees(answer.consensus)));
            row.answers.push((Method::LocdiffH, degrees(answer.hybrid_or(samples.aggregate))));
            row.out_of_range = answer.hybrid.is_none();
        }
        Ok(rows)
    }
}

/// Fails if `rows` (the rows to tune on) and the test rows (`shards.test`) have photos in common. Photos are compared
/// by their embeddings, because the same photo may have different identifiers.
fn check_no_test_photos(job: &EvalJob, rows: &ImageRows) -> Result<(), InferError> {
    let (test, config) = (&job.config.shards.test, &job.config);
    let tested = match ImageRows::open(test, config) {
        Ok(tested) => photo_hashes(&tested)?,
        // No test rows exist, so no validation photo can be a test photo.
        Err(InferError::Shards(ShardsError::Missing { .. }) | InferError::Empty(_)) => return Ok(()),
        Err(error) => return Err(error),
    };
    let same = photo_hashes(rows)?.intersection(&tested).count();
    if same > 0 {
        return Err(InferError::BadData(format!(
            "shards.validation ({}) and shards.test ({test}) have {same} photos in common, but settings must not be \
             tuned on test photos; choose other rows with `--set shards.validation=...`",
            job.data
        )));
    }
    Ok(())
}

/// Hashes the embedding of the first stored view of each photo. The means of views would differ between data sets that
/// store different numbers of views.
fn photo_hashes(rows: &ImageRows) -> Result<HashSet<u64>, InferError> {
    let (mut hashes, mut read) = (HashSet::new(), BlockRows::default());
    let hash = |embedding: &[u8]| {
        let mut hasher = DefaultHasher::new();
        embedding.hash(&mut hasher);
        hasher.finish()
    };
    for block in 0..rows.dataset.block_rows().len() as u32 {
        rows.dataset.read_usable_first_view(&rows.mask, block, &mut read)?;
        hashes.extend(read.embeddings.chunks_exact(rows.dataset.width() * ELEMENT_BYTES).map(hash));
    }
    Ok(hashes)
}

/// The rows of this worker, in runs of consecutive rows.
fn shares(job: &EvalJob, rows: &ImageRows, worker: &WorkerSlot) -> Vec<Range<u64>> {
    // The launcher keeps whole pieces of a prediction, and of an attempt that has failed.
    let needs_pieces = matches!(job.task, EvalTask::Predict(_)) || !job.done.is_empty();
    let size = if needs_pieces { piece_rows(rows.count) } else { rows.block_images() as u64 };
    let open = (0..rows.count.div_ceil(size)).filter(|piece| job.done.binary_search(piece).is_err());
    let open: Vec<u64> = open.collect();
    // Each worker gets neighbouring pieces, so that row groups that span several pieces are read once.
    let bound = |rank: u32| open.len() * rank as usize / worker.world as usize;
    let own = open[bound(worker.rank)..bound(worker.rank + 1)].chunk_by(|piece, next| piece + 1 == *next);
    own.map(|pieces| pieces[0] * size..rows.count.min((pieces[pieces.len() - 1] + 1) * size)).collect()
}
