//! The job of evaluation on one worker: its share of the rows, block by block, told to the launcher.

use std::path::Path;

use locdiff_launch::config::{DecodeAnchors, RunConfig};
use locdiff_launch::protocol::{EvalJob, EvalSummary, Located, LocatedRow, Method};
use tch::Device;

use super::engine::{Engine, Sighting};
use super::error::EvalError;
use super::rows::{Image, ImageBlock, Rows};
use super::trained::Trained;
use crate::geo::{Place, UnitVector, fibonacci_grid};
use crate::geoclip::Geoclip;
use crate::native::cuda;
use crate::shards::Blocks;

/// Which worker this is, and what it computes on.
#[derive(Debug, Clone, Copy)]
pub struct Worker {
    /// Rank among the workers.
    pub rank: u32,
    /// Number of workers.
    pub world: u32,
    /// Where it computes.
    pub device: Device,
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
    let rows = Rows::open(&job.data, &config.shards)?;
    let trained = Trained::open(&job.checkpoint, worker.device)?;
    check_width(job, &rows, &trained)?;
    let (step, degree) = (trained.step, trained.degree);
    let anchors = anchors(config, degree)?;
    let engine = Engine::new(trained, &config.eval, config.train.seed, anchors, worker.device)?;
    rows.for_each_block(rows.share(worker.rank, worker.world), |block| {
        let embeddings_ive = block.embeddings(worker.device)?;
        let sightings = engine.locate(block, &embeddings_ive)?;
        tell(Located { of_rows: rows.count(), rows: located(block, &sightings) })
    })?;
    Ok(EvalSummary {
        step,
        degree,
        rows: rows.count(),
        skipped_rows: rows.skipped(),
        views: rows.dataset().views(),
        source: rows.dataset().manifest().map(|manifest| manifest.source.clone()),
        is_simulated: rows.is_simulated(),
        fingerprint: format!("{:016x}", rows.dataset().fingerprint()),
        anchors: engine.anchors() as u64,
    })
}

fn check_width(job: &EvalJob, rows: &Rows, trained: &Trained) -> Result<(), EvalError> {
    let (got, want) = (rows.dataset().width(), trained.network.architecture().embedding_width as usize);
    if got == want {
        return Ok(());
    }
    Err(EvalError::Width { location: job.data.clone(), got, checkpoint: job.checkpoint.clone(), want })
}

/// Points that codes are decoded among.
fn anchors(config: &RunConfig, degree: u32) -> Result<Vec<UnitVector>, EvalError> {
    match config.eval.anchors {
        DecodeAnchors::Grid => Ok(fibonacci_grid(config.eval.grid_points(degree) as usize)),
        DecodeAnchors::Gallery => {
            let geoclip = Geoclip::open(Path::new(&config.retrieval.geoclip))?;
            Ok(geoclip.places().iter().map(|place| UnitVector::from(*place)).collect())
        }
    }
}

fn located(block: &ImageBlock, sightings: &[Sighting]) -> Vec<LocatedRow> {
    let row = |(index, (image, sighting)): (u64, (&Image, &Sighting))| LocatedRow {
        index,
        id: image.id.clone(),
        truth: image.truth_degrees,
        answers: vec![(Method::Locdiff, degrees(sighting.answer))],
        sample: degrees(sighting.samples[0]),
    };
    (block.first..).zip(block.images.iter().zip(sightings)).map(row).collect()
}

/// Latitude and longitude, degrees.
fn degrees(point: UnitVector) -> [f64; 2] {
    let place = Place::from(point);
    [place.latitude().0, place.longitude().0]
}
