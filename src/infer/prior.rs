//! A prior over the places of photos, prepared for the codes of one degree.
//!
//! Each feature of the prior is filled with HEALPix cells, which are smaller than those of densities. They have two
//! uses:
//! - **Means.** The mean of the prior over each cell of a density. Even a feature that is much smaller than a cell has
//!   a mean above 0.
//! - **Anchors.** The decoder selects only among points where the prior is above 0. If a feature has fewer than 64 of
//!   them, the centres of its cells are added. So a photo can be found in a village without gallery points, and at sea.

use std::path::Path;
use std::sync::Arc;

use locdiff_core::geo::{Healpix, PlacePrior, UnitVector};
use locdiff_core::prior_file::PriorFile;
use locdiff_core::pulse;

use super::error::InferError;
use crate::shdd::density::density_grid;

/// A feature has at least this many anchors.
const FEATURE_ANCHORS: usize = 64;
/// With very many features, there are fewer anchors for each, in total about this many.
const ANCHORS: usize = 1 << 14;

/// A prior and the cells that fill it.
#[derive(Debug)]
pub struct PreparedPrior {
    prior: Arc<PlacePrior>,
    features: Vec<FilledFeature>,
    /// The cells of densities.
    grid: Healpix,
    /// Least number of anchors of a feature.
    anchors_min: usize,
}

/// The cells of a feature where no other feature has a larger value.
#[derive(Debug)]
struct FilledFeature {
    grid: Healpix,
    /// Each cell with the logarithm of the prior at its centre.
    cells: Vec<(u64, f64)>,
}

impl PreparedPrior {
    /// Reads the file `path`. Fails if a feature is so narrow that no cell has its centre in it.
    pub fn open(path: &Path, degree: u32) -> Result<Self, InferError> {
        let prior = PriorFile::read(path)?.prior()?;
        let grid = density_grid((degree as usize + 1).pow(2));
        let anchors_min = (ANCHORS / prior.features().max(1)).clamp(1, FEATURE_ANCHORS);
        let fill = |feature: usize| {
            pulse::advance();
            let found = prior.even_cells(feature, grid.order() + 1, anchors_min).ok_or_else(|| {
                let path = path.display();
                InferError::BadData(format!(
                    "{path}: feature {feature} is too narrow, so no point of a fine grid is in it"
                ))
            })?;
            let own = |cell: u64| {
                let value = prior.at(found.grid.centre(cell)).filter(|value| value.feature == feature)?;
                Some((cell, value.log))
            };
            Ok(FilledFeature { grid: found.grid, cells: found.cells.iter().copied().filter_map(own).collect() })
        };
        let features = (0..prior.features()).map(fill).collect::<Result<Vec<_>, InferError>>()?;
        Ok(Self { prior: Arc::new(prior), features, grid, anchors_min })
    }

    /// The prior.
    pub fn prior(&self) -> &Arc<PlacePrior> {
        &self.prior
    }

    /// The points of `own` where the prior is above 0, and the centres of the cells of the features that have too few.
    pub fn anchors(&self, own: Vec<UnitVector>) -> Vec<UnitVector> {
        let (mut anchors, mut near) = (Vec::new(), vec![0_usize; self.features.len()]);
        for (number, point) in own.into_iter().enumerate() {
            if let Some(value) = self.prior.at(point) {
                near[value.feature] += usize::from(value.is_near);
                anchors.push(point);
            }
            if number % 4096 == 0 {
                pulse::advance();
            }
        }
        let few = self.features.iter().zip(near).filter(|(_, near)| *near < self.anchors_min);
        let added = few.flat_map(|(feature, _)| feature.cells.iter().map(|(cell, _)| feature.grid.centre(*cell)));
        anchors.extend(added);
        anchors
    }

    /// The mean of the prior over each cell of a density.
    pub fn cell_means(&self) -> Vec<f64> {
        let mut means = vec![0.0; self.grid.cells() as usize];
        for feature in &self.features {
            let orders = feature.grid.order() - self.grid.order();
            for (cell, log) in &feature.cells {
                means[(cell >> (2 * orders)) as usize] += log.exp() / (1_u64 << (2 * orders)) as f64;
            }
        }
        means
    }
}
