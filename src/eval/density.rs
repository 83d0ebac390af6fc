//! Adds to each located row what the samples say about the density of its place.

use locdiff_core::geo::UnitVector;
use locdiff_core::protocol::{EvalTask, LocatedRow, RowDensity};
use locdiff_core::pulse;

use crate::infer::{Engine, InferError, Located};
use crate::shdd::density::CellScores;

/// Computes the densities that a task wants.
pub(super) struct RowDensities {
    cells: CellScores,
    truth_temperatures: Vec<f64>,
    cells_temperature: Option<f64>,
}

impl RowDensities {
    /// `None` if the task wants no densities.
    pub(super) fn wanted(task: &EvalTask, engine: &Engine) -> Result<Option<Self>, InferError> {
        let (truth_temperatures, cells_temperature) = (task.truth_temperatures().to_vec(), task.cells_temperature());
        if truth_temperatures.is_empty() && cells_temperature.is_none() {
            return Ok(None);
        }
        Ok(Some(Self { cells: engine.cell_scores()?, truth_temperatures, cells_temperature }))
    }

    /// Sets the densities of `rows`, which are the images of a block. The rounding of products and sums depends on the
    /// number of threads, so there is only one on the CPU.
    pub(super) fn add(&self, located: &Located, rows: &mut [LocatedRow]) -> Result<(), InferError> {
        let threads = tch::get_num_threads();
        tch::set_num_threads(1);
        let added = self.fill(located, rows);
        tch::set_num_threads(threads);
        added
    }

    fn fill(&self, located: &Located, rows: &mut [LocatedRow]) -> Result<(), InferError> {
        let _without_gradients = tch::no_grad_guard();
        let samples = located.codes_nd.size()[0] / located.block.size.max(1) as i64;
        for (at, (image, row)) in located.block.images.iter().zip(rows).enumerate() {
            let scores = self.cells.of_image(&located.codes_nd.f_narrow(0, at as i64 * samples, samples)?)?;
            let mut density = RowDensity::default();
            if let Some(truth) = image.truth {
                let cell = self.cells.grid().cell_of(UnitVector::from(truth));
                density.log_at_truth = scores.log_density_in(cell, &self.truth_temperatures)?;
            }
            if let Some(temperature) = self.cells_temperature {
                density.cells = scores.cells(temperature)?;
            }
            row.density = density;
            pulse::advance();
        }
        Ok(())
    }
}
