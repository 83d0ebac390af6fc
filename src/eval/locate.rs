//! The job of evaluation on one worker: its share of the rows, block by block, told to the launcher.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use locdiff_core::geo::{Place, UnitVector};
use locdiff_core::protocol::{EvalJob, EvalSummary, Located, LocatedRow, Method, Place as Worker};
use tch::Device;

use super::truth::TruthFile;
use crate::infer::anchors::anchors;
use crate::infer::retrieve::Retrieval;
use crate::infer::{Engine, Image, ImageBlock, InferError, Rows, Trained};
use crate::native::cuda;
use crate::retrieval::{Grid, Retriever, Samples};
use crate::shards::{Blocks, ELEMENT_BYTES, ShardsError};

/// Where a worker computes.
pub fn device(worker: &Worker) -> Device {
    worker.gpu.map_or(Device::Cpu, |gpu| Device::Cuda(gpu as usize))
}

/// Opens the rows of a job, with this worker's device as the current one.
fn open_rows(job: &EvalJob, worker: &Worker) -> Result<Rows, InferError> {
    if let Device::Cuda(index) = device(worker) {
        cuda::set_device(index)?;
    }
    Rows::open(&job.data, &job.config)
}

fn open_retrieval(job: &EvalJob, worker: &Worker, rows: &Rows) -> Result<Option<Retrieval>, InferError> {
    Retrieval::open(job, rows, (device(worker), worker.threads as usize), worker.rank == 0)
}

/// Embeds the gallery of an evaluation, so that its embeddings lie on the disk; how many points it has. None where the head does not
/// fit the data and need not.
pub fn embed_gallery(job: &EvalJob, worker: &Worker) -> Result<Option<usize>, InferError> {
    let rows = open_rows(job, worker)?;
    // A truth that does not fit is refused before the gallery costs minutes.
    TruthFile::open(&job.data, &rows, &job.config)?;
    let opened = open_retrieval(job, worker, &rows)?;
    Ok(opened.map(|opened| opened.gallery().points().len()))
}

/// Locates this worker's rows; `tell` hears of each block.
pub fn run(
    job: &EvalJob,
    worker: &Worker,
    tell: &mut dyn FnMut(Located) -> Result<(), InferError>,
) -> Result<EvalSummary, InferError> {
    let (config, rows) = (&job.config, open_rows(job, worker)?);
    let truth = TruthFile::open(&job.data, &rows, config)?;
    if job.tune && worker.rank == 0 {
        refuse_test_rows(job, &rows)?;
    }
    let trained = Trained::open(&job.checkpoint, device(worker))?;
    trained.denoiser.check_width(&job.checkpoint.display().to_string(), &job.data, rows.dataset.width())?;
    let retrieval = open_retrieval(job, worker, &rows)?;
    let (step, degree) = (trained.step, trained.denoiser.degree);
    let anchors = anchors(config, &trained, retrieval.as_ref())?;
    trained.check(&config.eval)?;
    let engine = Engine::new(trained.denoiser, &config.eval, config.train.seed, anchors)?;
    let retriever = retrieval.as_ref().map(Retrieval::retriever).transpose()?;
    let methods = Methods { engine, retrieval: retrieval.as_ref().zip(retriever.as_ref()), is_tuning: job.tune };
    for block in rows.blocks(rows.share(worker.rank, worker.world)) {
        let mut block = block?;
        truth.as_ref().map_or(Ok(()), |truth| truth.apply(&mut block))?;
        tell(Located { of_rows: rows.count, rows: methods.locate(&block)? })?;
    }
    Ok(EvalSummary {
        step,
        degree,
        rows: rows.count,
        skipped_rows: rows.mask.count(),
        views: rows.dataset.views(),
        source: rows.dataset.origin().map(|origin| origin.source.clone()),
        is_simulated: rows.is_simulated(),
        fingerprint: format!("{:016x}", rows.dataset.fingerprint()),
        anchors: methods.engine.anchors() as u64,
        head: retrieval.as_ref().map(|_| config.retrieval.head),
        gallery_points: retrieval.as_ref().map(|retrieval| retrieval.gallery().points().len() as u64),
    })
}

/// All ways of locating that the job asks for.
struct Methods<'a> {
    engine: Engine,
    retrieval: Option<(&'a Retrieval, &'a Retriever<'a>)>,
    is_tuning: bool,
}

impl Methods<'_> {
    fn locate(&self, block: &ImageBlock) -> Result<Vec<LocatedRow>, InferError> {
        let embeddings_ive = block.embeddings(self.engine.device())?;
        let samples = self.engine.locate(block, &embeddings_ive, |_, _| Ok(()))?;
        let mut rows = located(block, &samples);
        let Some((retrieval, retriever)) = self.retrieval else { return Ok(rows) };
        let known = (&embeddings_ive, samples.as_slice());
        if self.is_tuning {
            for (row, found) in rows.iter_mut().zip(retrieval.errors(retriever, block, known, &Grid::default())?) {
                row.tuning = Some(found);
            }
            return Ok(rows);
        }
        let answers = retrieval.answers(retriever, block, known)?;
        for (row, (samples, answer)) in rows.iter_mut().zip(samples.iter().zip(answers)) {
            row.answers.insert(0, (Method::Retrieval, degrees(answer.retrieval)));
            row.answers.push((Method::LocdiffH, degrees(answer.hybrid_or(samples.aggregate))));
            row.out_of_range = answer.hybrid.is_none();
        }
        Ok(rows)
    }
}

/// Settings are never chosen on what they are tested on: no photo may be in both, under whatever name.
fn refuse_test_rows(job: &EvalJob, rows: &Rows) -> Result<(), InferError> {
    let (test, config) = (&job.config.shards.test, &job.config);
    let tested = match Rows::open(test, config) {
        Ok(tested) => photos(&tested)?,
        // Without test rows there is nothing to be confused with.
        Err(InferError::Shards(ShardsError::Missing { .. }) | InferError::Empty(_)) => return Ok(()),
        Err(error) => return Err(error),
    };
    let same = photos(rows)?.intersection(&tested).count();
    if same > 0 {
        return Err(InferError::BadData(format!(
            "shards.validation ({}) and shards.test ({test}) hold {same} photos in common, and settings must not be chosen on what \
             they are tested on; name other rows with `--set shards.validation=...`",
            job.data
        )));
    }
    Ok(())
}

/// What stands for each photo: its first view.
fn photos(rows: &Rows) -> Result<HashSet<u64>, InferError> {
    let mut photos = HashSet::new();
    for block in rows.blocks(rows.share(0, 1)) {
        let block = block?;
        let first_view = block.width * ELEMENT_BYTES;
        let hash = |image: &Image| {
            let mut hasher = DefaultHasher::new();
            image.views[..first_view].hash(&mut hasher);
            hasher.finish()
        };
        photos.extend(block.images.iter().map(hash));
    }
    Ok(photos)
}

fn located(block: &ImageBlock, samples: &[Samples]) -> Vec<LocatedRow> {
    let row = |(index, (image, samples)): (u64, (&Image, &Samples))| LocatedRow {
        index,
        id: image.id.clone(),
        truth: [image.truth.latitude().0, image.truth.longitude().0],
        answers: vec![(Method::Locdiff, degrees(samples.aggregate))],
        sample: degrees(samples.samples[0]),
        out_of_range: false,
        tuning: None,
    };
    (block.first..).zip(block.images.iter().zip(samples)).map(row).collect()
}

/// Latitude and longitude, degrees.
fn degrees(point: UnitVector) -> [f64; 2] {
    let place = Place::from(point);
    [place.latitude().0, place.longitude().0]
}
