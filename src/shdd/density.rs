//! The density of an image's place over the cells of a HEALPix grid.
//!
//! The code of sample k has the score f_k(c) at the centre of cell c. The sample gives the cell the probability
//! `softmax_c(f_k(c) / (peak · temperature))`, and the image gives it the mean over its samples. The density is constant
//! within a cell: the probability of the cell divided by its area. So it integrates to 1 for every code and temperature.
//!
//! `peak` is the score of a clean code at its place: the number of dimensions divided by 4π. With this factor, a
//! temperature means about the same at every degree.

use locdiff_core::geo::{Healpix, unique_cell};
use tch::{Device, Kind, Tensor};

use super::decode::{Anchors, Budget, Coarse};
use super::{Basis, Filter, ShddError};

// Letters in tensor names: k samples of an image, c coefficients, a cells, t temperatures.

/// Cells per dimension of a whole code, at least. At temperature T, the standard deviation of a peak is then at least
/// 1.6 √T times the width of a cell.
const CELLS_PER_DIMENSION: u64 = 8;

/// Numbers in memory at once when densities are computed at several temperatures.
const NUMBERS_MAX: usize = 1 << 22;

/// Computes densities from codes.
#[derive(Debug)]
pub struct CellScores {
    anchors: Anchors,
    grid: Healpix,
    peak: f64,
}

/// The cells of densities of codes with (L + 1)² = `dims` dimensions.
pub fn density_grid(dims: usize) -> Healpix {
    Healpix::with_cells(CELLS_PER_DIMENSION * dims as u64)
}

/// The score of a clean code at its place, for codes that hold `dims` dimensions.
pub fn peak(dims: usize) -> f64 {
    dims as f64 / (4.0 * std::f64::consts::PI)
}

/// The scores of the samples of one image in all cells, divided by the peak.
#[derive(Debug)]
pub struct SampleScores {
    scores_ka: Tensor,
    grid: Healpix,
}

/// The mean of a prior over each cell of the grid of a [`CellScores`], as logarithms.
#[derive(Debug)]
pub struct CellPrior {
    log_1a: Tensor,
}

impl CellPrior {
    /// `means` holds the mean over each cell. At least one must be above 0.
    pub fn new(means: &[f64], device: Device) -> Result<Self, ShddError> {
        if !means.iter().any(|mean| *mean > 0.0) {
            return Err(ShddError::Bad("the prior is 0 in all cells, wanted at least one cell above 0".to_owned()));
        }
        let logs: Vec<f32> = means.iter().map(|mean| mean.ln() as f32).collect();
        Ok(Self { log_1a: Tensor::f_from_slice(&logs)?.f_to_device(device)?.f_unsqueeze(0)? })
    }
}

impl CellScores {
    /// For codes of a degree that hold only the dimensions that `filter` keeps. If `device` is a CUDA device, it must be
    /// the current device.
    pub fn new(basis: Basis, filter: Option<Filter>, device: Device) -> Result<Self, ShddError> {
        let grid = density_grid(basis.dims());
        let centres = (0..grid.cells()).map(|cell| grid.centre(cell)).collect();
        let anchors = Anchors::filtered(basis, filter, centres, device, Coarse::of(device), Budget::of(device))?;
        let peak = peak(anchors.dims());
        Ok(Self { anchors, grid, peak })
    }

    /// The cells.
    pub fn grid(&self) -> Healpix {
        self.grid
    }

    /// The scores of the codes of one image, one row per sample. The codes are unscaled. The result, to the last bit,
    /// depends only on the codes and their number.
    pub fn of_image(&self, codes_kc: &Tensor) -> Result<SampleScores, ShddError> {
        // A copy begins at an aligned address. On some processors, a matrix product rounds differently otherwise.
        let codes_kc = codes_kc.f_mul_scalar(1.0)?;
        let scores_ka = self.anchors.coarse_scores(&codes_kc)?.f_div_scalar(self.peak)?;
        Ok(SampleScores { scores_ka, grid: self.grid })
    }
}

impl SampleScores {
    /// Logarithm of the density in a cell, per km², for each temperature.
    pub fn log_density_in(&self, cell: u64, temperatures: &[f64]) -> Result<Vec<f64>, ShddError> {
        let cell_1k = self.scores_ka.f_select(1, (cell % self.grid.cells()) as i64)?.f_unsqueeze(0)?;
        let scores_1ka = self.scores_ka.f_unsqueeze(0)?;
        let shift = -(self.scores_ka.size()[0] as f64).ln() - self.grid.cell_km2().ln();
        let mut logs = Vec::new();
        // Several temperatures at once, because small operations take longer to start than to run.
        for some in temperatures.chunks((NUMBERS_MAX / self.scores_ka.numel().max(1)).max(1)) {
            let factors: Vec<f32> = some.iter().map(|temperature| (1.0 / temperature) as f32).collect();
            let factors_t1 = Tensor::f_from_slice(&factors)?.f_to_device(self.scores_ka.device())?.f_unsqueeze(1)?;
            let totals_tk = scores_1ka.f_mul(&factors_t1.f_unsqueeze(2)?)?.f_logsumexp([2_i64].as_slice(), false)?;
            let log_tk = cell_1k.f_mul(&factors_t1)?.f_sub(&totals_tk)?;
            let log_t = log_tk.f_logsumexp([1_i64].as_slice(), false)?.f_to_device(Device::Cpu)?;
            let found: Vec<f32> = Vec::try_from(log_t)?;
            logs.extend(found.into_iter().map(|log| f64::from(log) + shift));
        }
        Ok(logs)
    }

    /// The probability of each cell.
    pub fn probabilities(&self, temperature: f64) -> Result<Vec<f64>, ShddError> {
        let shares_ka = self.scores_ka.f_mul_scalar(1.0 / temperature)?.f_softmax(1, Kind::Float)?;
        let shares_a = shares_ka.f_mean_dim([0_i64].as_slice(), false, Kind::Float)?.f_to_device(Device::Cpu)?;
        Ok(Vec::try_from(shares_a.f_to_kind(Kind::Double)?)?)
    }

    /// Logarithm of the share of each sample's density that lies in the prior: Σ_c probability of c · prior of c. It is
    /// exactly 0 if the prior is 1 in all cells.
    pub fn log_shares(&self, temperature: f64, prior: &CellPrior) -> Result<Vec<f64>, ShddError> {
        let scores_ka = self.scores_ka.f_mul_scalar(1.0 / temperature)?;
        let total_k = scores_ka.f_logsumexp([1_i64].as_slice(), false)?;
        let inside_k = scores_ka.f_add(&prior.log_1a)?.f_logsumexp([1_i64].as_slice(), false)?;
        let shares_k = inside_k.f_sub(&total_k)?.f_to_device(Device::Cpu)?;
        Ok(Vec::try_from(shares_k.f_to_kind(Kind::Double)?)?)
    }

    /// The probability of each cell, in proportion to density · prior.
    pub fn posterior(&self, temperature: f64, prior: &CellPrior) -> Result<Vec<f64>, ShddError> {
        let log_ka = self.scores_ka.f_mul_scalar(1.0 / temperature)?.f_log_softmax(1, Kind::Float)?;
        // Logarithms, because probabilities far from all samples would be rounded to 0.
        let log_1a = log_ka.f_logsumexp([0_i64].as_slice(), true)?.f_add(&prior.log_1a)?;
        let shares_a = log_1a.f_softmax(1, Kind::Double)?.f_squeeze_dim(0)?.f_to_device(Device::Cpu)?;
        Ok(Vec::try_from(shares_a)?)
    }

    /// The density as cells of several orders, which together cover the sphere. A cell is divided if its probability is
    /// above `divided_above`, down to the order of the grid. Each cell has its number in the scheme of [`unique_cell`],
    /// and its probability. With a prior, probabilities are in proportion to density · prior.
    pub fn cells(
        &self,
        temperature: f64,
        divided_above: f64,
        prior: Option<&CellPrior>,
    ) -> Result<Vec<(u64, f32)>, ShddError> {
        let mut orders = vec![match prior {
            Some(prior) => self.posterior(temperature, prior)?,
            None => self.probabilities(temperature)?,
        }];
        for order in (0..self.grid.order()).rev() {
            let finer = &orders[(self.grid.order() - order) as usize - 1];
            orders.push(finer.chunks_exact(4).map(|four| four.iter().sum()).collect());
        }
        orders.reverse();
        let (mut found, mut open) = (Vec::new(), (0..12).rev().map(|cell| (0, cell)).collect::<Vec<(u32, u64)>>());
        while let Some((order, cell)) = open.pop() {
            let probability = orders[order as usize][cell as usize];
            if probability > divided_above && order < self.grid.order() {
                open.extend((0..4).rev().map(|part| (order + 1, 4 * cell + part)));
            } else {
                found.push((unique_cell(order, cell), probability as f32));
            }
        }
        Ok(found)
    }
}
