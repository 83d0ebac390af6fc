//! Adds to each located row what the samples say about the density of its place.

use locdiff_core::geo::UnitVector;
use locdiff_core::protocol::{EvalTask, LocatedRow, RowDensity};
use locdiff_core::pulse;

use crate::infer::engine::with_one_thread;
use crate::infer::{Engine, InferError, Located};

/// Cells with at most this probability are not divided in predictions.
const CELL_PROBABILITY: f64 = 0.001;

/// Computes the densities that a task wants.
pub(super) struct RowDensities {
    truth_temperatures: Vec<f64>,
    cells_temperature: Option<f64>,
}

impl RowDensities {
    /// `None` if the task wants no densities.
    pub(super) fn wanted(task: &EvalTask) -> Option<Self> {
        let (truth_temperatures, cells_temperature) = (task.truth_temperatures().to_vec(), task.cells_temperature());
        let is_wanted = !truth_temperatures.is_empty() || cells_temperature.is_some();
        is_wanted.then_some(Self { truth_temperatures, cells_temperature })
    }

    /// Sets the densities of `rows`, which are the images of a block, for the images for which `is_wanted` is true.
    pub(super) fn add(
        &self,
        engine: &Engine,
        located: &Located,
        rows: &mut [LocatedRow],
        is_wanted: impl Fn(usize) -> bool,
    ) -> Result<(), InferError> {
        with_one_thread(|| {
            let _without_gradients = tch::no_grad_guard();
            let cells = engine.cells()?;
            let samples = located.codes_nd.size()[0] / located.block.size.max(1) as i64;
            let images = located.block.images.iter().zip(rows).enumerate();
            for (at, (image, row)) in images.filter(|(at, _)| is_wanted(*at)) {
                let scores = cells.of_image(&located.codes_nd.f_narrow(0, at as i64 * samples, samples)?)?;
                let mut density = RowDensity::default();
                if let Some(truth) = image.truth {
                    let cell = cells.grid().cell_of(UnitVector::from(truth));
                    density.log_at_truth = scores.log_density_in(cell, &self.truth_temperatures)?;
                }
                if let Some(temperature) = self.cells_temperature {
                    density.cells = scores.cells(temperature, CELL_PROBABILITY, engine.prior())?;
                }
                row.density = density;
                pulse::advance();
            }
            Ok(())
        })
    }
}
