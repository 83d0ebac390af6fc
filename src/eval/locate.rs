//! The job of evaluation on one worker: its share of the rows, block by block, told to the launcher.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use locdiff_core::config::{DecodeAnchors, RunConfig, grid_points_min};
use locdiff_core::geo::{Place, UnitVector, fibonacci_grid};
use locdiff_core::protocol::{EvalJob, EvalSummary, Located, LocatedRow, Method};
use tch::Device;

use super::engine::{Engine, Sighting};
use super::error::EvalError;
use super::retrieve::{Retrieval, gallery_points};
use super::rows::{Image, ImageBlock, Rows};
use super::trained::Trained;
use crate::native::cuda;
use crate::retrieval::{Grid, Retriever};
use crate::shards::{Blocks, ELEMENT_BYTES, ShardsError};

/// Which worker this is, and what it computes on.
#[derive(Debug, Clone, Copy)]
pub struct Worker {
    /// Rank among the workers.
    pub rank: u32,
    /// Number of workers.
    pub world: u32,
    /// Where it computes.
    pub device: Device,
    /// CPU threads.
    pub threads: usize,
}

/// Locates this worker's rows; `tell` hears of each block.
pub fn run(
    job: &EvalJob,
    worker: Worker,
    tell: &mut dyn FnMut(Located) -> Result<(), EvalError>,
) -> Result<EvalSummary, EvalError> {
    if let Device::Cuda(index) = worker.device {
        cuda::set_device(index)?;
    }
    let config = &job.config;
    let rows = Rows::open(&job.data, config)?;
    if job.tune && worker.rank == 0 {
        refuse_test_rows(job, &rows)?;
    }
    let trained = Trained::open(&job.checkpoint, worker.device)?;
    check_width(job, &rows, &trained)?;
    let retrieval = Retrieval::open(job, &rows, worker)?;
    let (step, degree) = (trained.step, trained.degree);
    let anchors = anchors(config, &trained, retrieval.as_ref())?;
    let engine = Engine::new(trained, &config.eval, config.train.seed, anchors, worker.device)?;
    let retriever = retrieval.as_ref().map(|retrieval| retrieval.retriever(worker)).transpose()?;
    let methods =
        Methods { engine, retrieval: retrieval.as_ref().zip(retriever.as_ref()), worker, is_tuning: job.tune };
    rows.for_each_block(rows.share(worker.rank, worker.world), |block| {
        tell(Located { of_rows: rows.count(), rows: methods.locate(block)? })
    })?;
    Ok(EvalSummary {
        step,
        degree,
        rows: rows.count(),
        skipped_rows: rows.skipped(),
        views: rows.dataset().views(),
        source: rows.dataset().origin().map(|origin| origin.source.clone()),
        is_simulated: rows.is_simulated(),
        fingerprint: format!("{:016x}", rows.dataset().fingerprint()),
        anchors: methods.engine.anchors() as u64,
        head: retrieval.as_ref().map(|_| config.retrieval.head),
        gallery_points: retrieval.as_ref().map(|retrieval| retrieval.gallery().points().len() as u64),
    })
}

/// All ways of locating that the job asks for.
struct Methods<'a> {
    engine: Engine,
    retrieval: Option<(&'a Retrieval, &'a Retriever<'a>)>,
    worker: Worker,
    is_tuning: bool,
}

impl Methods<'_> {
    fn locate(&self, block: &ImageBlock) -> Result<Vec<LocatedRow>, EvalError> {
        let embeddings_ive = block.embeddings(self.worker.device)?;
        let sightings = self.engine.locate(block, &embeddings_ive)?;
        let mut rows = located(block, &sightings);
        let Some((retrieval, retriever)) = self.retrieval else { return Ok(rows) };
        let known = (&embeddings_ive, sightings.as_slice());
        if self.is_tuning {
            for (row, found) in rows.iter_mut().zip(retrieval.errors(retriever, block, known, &Grid::default())?) {
                row.tuning = Some(found);
            }
            return Ok(rows);
        }
        let answers = retrieval.answers(retriever, block, known)?;
        for (row, (sighting, answer)) in rows.iter_mut().zip(sightings.iter().zip(answers)) {
            row.answers.insert(0, (Method::Retrieval, degrees(answer.retrieval)));
            row.answers.push((Method::LocdiffH, degrees(answer.hybrid_or(sighting.answer))));
            row.out_of_range = answer.hybrid.is_none();
        }
        Ok(rows)
    }
}

/// Settings are never chosen on what they are tested on: no photo may be in both, under whatever name.
fn refuse_test_rows(job: &EvalJob, rows: &Rows) -> Result<(), EvalError> {
    let (test, config) = (&job.config.shards.test, &job.config);
    let tested = match Rows::open(test, config) {
        Ok(tested) => photos(&tested)?,
        // Without test rows there is nothing to be confused with.
        Err(EvalError::Shards(ShardsError::Missing { .. }) | EvalError::Empty { .. }) => return Ok(()),
        Err(error) => return Err(error),
    };
    let same = photos(rows)?.intersection(&tested).count();
    if same > 0 {
        return Err(EvalError::SameRows { validation: job.data.clone(), test: test.clone(), same });
    }
    Ok(())
}

/// What stands for each photo: its first view.
fn photos(rows: &Rows) -> Result<HashSet<u64>, EvalError> {
    let mut photos = HashSet::new();
    rows.for_each_block(rows.share(0, 1), |block| {
        let first_view = block.width * ELEMENT_BYTES;
        let hash = |image: &Image| {
            let mut hasher = DefaultHasher::new();
            image.views[..first_view].hash(&mut hasher);
            hasher.finish()
        };
        photos.extend(block.images.iter().map(hash));
        Ok(())
    })?;
    Ok(photos)
}

fn check_width(job: &EvalJob, rows: &Rows, trained: &Trained) -> Result<(), EvalError> {
    let (got, want) = (rows.dataset().width(), trained.network.architecture().embedding_width as usize);
    if got == want {
        return Ok(());
    }
    Err(EvalError::Width { location: job.data.clone(), got, checkpoint: job.checkpoint.clone(), want })
}

/// Points that codes are decoded among: enough for the degree of the checkpoint, which is not always that of the configuration.
fn anchors(config: &RunConfig, trained: &Trained, retrieval: Option<&Retrieval>) -> Result<Vec<UnitVector>, EvalError> {
    let degree = trained.degree;
    match config.eval.anchors {
        DecodeAnchors::Grid => {
            let (got, want) = (config.eval.grid_points(degree), grid_points_min(degree));
            if config.eval.refine && got < want {
                return Err(EvalError::Grid { got, checkpoint: trained.folder.clone(), degree, want });
            }
            Ok(fibonacci_grid(got as usize))
        }
        DecodeAnchors::Gallery => gallery_points(config, retrieval),
    }
}

fn located(block: &ImageBlock, sightings: &[Sighting]) -> Vec<LocatedRow> {
    let row = |(index, (image, sighting)): (u64, (&Image, &Sighting))| LocatedRow {
        index,
        id: image.id.clone(),
        truth: [image.truth.latitude().0, image.truth.longitude().0],
        answers: vec![(Method::Locdiff, degrees(sighting.answer))],
        sample: degrees(sighting.samples[0]),
        out_of_range: false,
        tuning: None,
    };
    (block.first..).zip(block.images.iter().zip(sightings)).map(row).collect()
}

/// Latitude and longitude, degrees.
fn degrees(point: UnitVector) -> [f64; 2] {
    let place = Place::from(point);
    [place.latitude().0, place.longitude().0]
}
