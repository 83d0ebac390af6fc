//! The photos that the report shows one by one: their alternatives, their samples, and the densities of the network's
//! predictions along the denoising steps.
//!
//! A pass over all photos does not show the predictions of single steps: on a GPU, all steps are one CUDA graph. The
//! few photos of the report are therefore sampled once more, step by step. Their answers and samples remain those of
//! the evaluation.
//!
//! Invariant: what is sent about a photo does not depend on the number of workers. Each worker sends the photos that it
//! has located.

use locdiff_core::calibration::DEFAULT_TEMPERATURE;
use locdiff_core::draw::spread;
use locdiff_core::protocol::{EvalJob, EvalTask, LocatedRow, PredictedRow, Prediction, ReportPhoto, StepDensity};
use locdiff_core::pulse;
use tch::Kind;

use super::rows::predicted;
use crate::diffusion::CODE_SCALE;
use crate::infer::engine::with_one_thread;
use crate::infer::{Engine, Image, ImageBlock, ImageRows, InferError, Located};
use crate::shdd::density::CellScores;

/// Number of denoising steps with a density, at most.
const STEPS: usize = 8;
/// Cells with at most this probability are not divided. A broad density then has about 600 cells.
const CELL_PROBABILITY: f64 = 0.004;
/// Number of samples that are sent for a photo, at most.
const SAMPLES_MAX: usize = 256;

/// What is sent for each photo, besides densities.
const WANTED: Prediction = Prediction {
    with_truth: true,
    with_samples: true,
    truth_temperatures: Vec::new(),
    cells_temperature: None,
    prior: None,
    skips_bad_rows: false,
};

/// The report photos of a worker.
pub(super) struct ReportPhotos {
    /// The rows of all workers that the report shows, ascending.
    rows: Vec<u64>,
    /// The denoising steps with a density, counted from 0.
    steps: Vec<usize>,
    temperature: f64,
    kept: Vec<(Image, PredictedRow)>,
}

impl ReportPhotos {
    /// No photos of `rows` rows yet. The task chooses which ones will be kept.
    pub(super) fn new(job: &EvalJob, rows: u64) -> Self {
        let (wanted, temperature) = match job.task {
            EvalTask::Evaluate { temperature, report_photos } => (report_photos as usize, temperature),
            EvalTask::Tune(_) | EvalTask::Predict(_) => (0, None),
        };
        Self {
            rows: spread(rows as usize, wanted).map(|row| row as u64).collect(),
            steps: spread(job.config.eval.sampler_steps as usize, STEPS).collect(),
            temperature: temperature.unwrap_or(DEFAULT_TEMPERATURE),
            kept: Vec::new(),
        }
    }

    /// Keeps the report photos of a block. `found` has the answers for the images of the block.
    pub(super) fn keep(&mut self, located: &Located, found: &[LocatedRow]) -> Result<(), InferError> {
        for ((image, row), samples) in located.block.images.iter().zip(found).zip(&located.samples) {
            if self.rows.binary_search(&row.index).is_ok() {
                let mut row = predicted(row.clone(), samples, &WANTED)?;
                row.samples.truncate(SAMPLES_MAX);
                self.kept.push((image.clone(), row));
            }
        }
        Ok(())
    }

    /// The kept photos with their densities. They are sampled again in blocks of the same size, so the predictions of
    /// the last step are the samples of the evaluation (on a GPU, except for rounding).
    pub(super) fn with_densities(self, rows: &ImageRows, engine: &Engine) -> Result<Vec<ReportPhoto>, InferError> {
        let mut found = Vec::new();
        if self.kept.is_empty() {
            return Ok(found);
        }
        for kept in self.kept.chunks(rows.block_images()) {
            let (images, answers): (Vec<Image>, Vec<PredictedRow>) = kept.iter().cloned().unzip();
            let block = rows.block_of(images);
            let densities = engine.cells().and_then(|cells| self.densities(engine, cells, &block));
            // An evaluation does not fail because of its pictures.
            let densities = densities.unwrap_or_else(|error| {
                tracing::warn!("the report shows photos without densities: {error}");
                vec![Vec::new(); answers.len()]
            });
            found.extend(answers.into_iter().zip(densities).map(|(row, steps)| ReportPhoto { row, steps }));
        }
        Ok(found)
    }

    /// For each image of a block, the densities at the chosen steps.
    fn densities(
        &self,
        engine: &Engine,
        cells: &CellScores,
        block: &ImageBlock,
    ) -> Result<Vec<Vec<StepDensity>>, InferError> {
        let (mut found, mut step) = (vec![Vec::new(); block.images.len()], 0);
        engine.watch(block, |timestep, predicted_nd| {
            if self.steps.contains(&step) {
                let codes_nd = predicted_nd.f_to_kind(Kind::Float)?.f_div_scalar(CODE_SCALE)?;
                let samples = codes_nd.size()[0] / block.size as i64;
                with_one_thread(|| {
                    (0..).zip(&mut found).try_for_each(|(at, steps)| {
                        let scores = cells.of_image(&codes_nd.f_narrow(0, at * samples, samples)?)?;
                        let cells = scores.cells(self.temperature, CELL_PROBABILITY, None)?;
                        steps.push(StepDensity { timestep: timestep as u64, cells });
                        pulse::advance();
                        Ok::<(), InferError>(())
                    })
                })?;
            }
            step += 1;
            Ok(())
        })?;
        Ok(found)
    }
}
