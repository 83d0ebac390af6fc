//! Tuning of LocDiff-H: the settings to try, and the choice of the best setting on validation photos. Tuning also
//! chooses the scale of retrieval with consensus: the scale with the highest mean accuracy over the thresholds.
//!
//! The objective for LocDiff-H is the mean accuracy over the thresholds, minus ten times the mean loss of accuracy. The
//! loss at a threshold is the number of percentage points by which LocDiff-H is less accurate than the best of its
//! parts: LocDiff, retrieval, and retrieval with consensus. LocDiff-H should be at least as good as the best part at
//! every threshold, so a point lost at one threshold weighs more than a point won at another. A loss is penalised
//! rather than forbidden, because small losses on the validation photos are mostly chance.
//!
//! The setting is chosen on all validation photos. Cross-validation estimates how accurate the chosen setting is on
//! other photos: for each fold, a setting is chosen on all other folds and scored on this fold. Nearby photos must be
//! in the same fold, because they are not independent. The sphere is therefore divided into cells about 550 km wide,
//! and a hash assigns each cell to a fold.
//!
//! This module is pure. The workers compute the error of every setting on every photo, and the choice depends only on
//! these errors and the places of the photos.

use serde::Serialize;

use crate::config::{HybridMode, RetrievalConfig};
use crate::exit_code::{ExitCode, HasExitCode};
use crate::geo::{UnitVector, cell_of};
use crate::protocol::TuningErrors;
use crate::random::splitmix;

/// Height of a cell, in degrees of latitude.
const CELL_DEGREES: f64 = 5.0;
/// The penalty is this factor times the accuracy that LocDiff-H loses against the best of its parts.
const LOSS_WEIGHT: f64 = 10.0;

/// Invalid input: nothing to choose from, too few folds, or errors that are not finite or do not match the settings.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tuning: {0}")]
pub struct TuningError(String);

impl HasExitCode for TuningError {
    fn exit_code(&self) -> ExitCode {
        ExitCode::BadData
    }
}

/// The settings of LocDiff-H.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Hybrid {
    /// Which gallery points are considered, and how one of them is chosen.
    pub mode: HybridMode,
    /// Search radius around LocDiff's answer or samples, km. Only gallery points within this radius are considered.
    pub radius_km: f64,
    /// Weight λ of the samples' log density in the score of a gallery point.
    pub density_weight: f64,
    /// Width h of the kernel with which the density of the samples is estimated, km.
    pub density_km: f64,
}

impl From<&RetrievalConfig> for Hybrid {
    fn from(config: &RetrievalConfig) -> Self {
        Self {
            mode: config.mode,
            radius_km: config.radius_km,
            density_weight: config.density_weight,
            density_km: config.density_km,
        }
    }
}

impl std::fmt::Display for Hybrid {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mode = match self.mode {
            HybridMode::AnySample => "any-sample",
            HybridMode::Aggregate => "aggregate",
            HybridMode::Fusion => "fusion",
            HybridMode::Consensus => "consensus",
        };
        write!(out, "{mode} within {} km", self.radius_km)?;
        if matches!(self.mode, HybridMode::Fusion | HybridMode::Consensus) {
            write!(out, ", density weight {}, kernel width {} km", self.density_weight, self.density_km)?;
        }
        Ok(())
    }
}

impl Hybrid {
    /// The fused score of a gallery point: its retrieval logit plus its weighted log density.
    pub fn fused(&self, logit: f64, log_density: f64) -> f64 {
        logit + self.density_weight * log_density
    }
}

/// The values of `retrieval.consensus_scale` to try.
pub const CONSENSUS_SCALES: [f64; 6] = [0.125, 0.25, 0.5, 1.0, 2.0, 4.0];

/// All settings to try: 5 of the mode `any-sample` (the paper's method), 6 of `aggregate`, 6·6·4 of `fusion` and 5·5·4
/// of `consensus`.
pub fn settings() -> Vec<Hybrid> {
    let radii = [10.0, 25.0, 50.0, 100.0, 200.0, 400.0];
    let mut settings = Vec::new();
    let mut cross = |mode, radii: &[f64], weights: &[f64], widths: &[f64]| {
        for radius_km in radii {
            for density_weight in weights {
                for density_km in widths {
                    let (radius_km, density_weight, density_km) = (*radius_km, *density_weight, *density_km);
                    settings.push(Hybrid { mode, radius_km, density_weight, density_km });
                }
            }
        }
    };
    // `any-sample` is not tried with a radius above the paper's 200 km: with 400 km, the discs around sixteen samples
    // could cover most of a continent.
    cross(HybridMode::AnySample, &radii[..5], &[0.0], &[25.0]);
    cross(HybridMode::Aggregate, &radii, &[0.0], &[25.0]);
    cross(HybridMode::Fusion, &radii, &[0.5, 1.0, 2.0, 3.0, 5.0, 8.0], &[10.0, 25.0, 50.0, 100.0]);
    cross(HybridMode::Consensus, &radii[1..], &[0.5, 1.0, 2.0, 4.0, 8.0], &[10.0, 25.0, 50.0, 100.0]);
    settings
}

/// The chosen setting and its accuracy. Each list of percentages has one entry per threshold.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Choice {
    /// The chosen setting.
    pub setting: Hybrid,
    /// Number of validation photos.
    pub rows: usize,
    /// The objective of the chosen setting, on all rows.
    pub objective: f64,
    /// Accuracy of LocDiff-H with the chosen setting, on all rows.
    pub hybrid_percent: Vec<f64>,
    /// Accuracy of LocDiff alone.
    pub own_percent: Vec<f64>,
    /// Accuracy of retrieval alone.
    pub retrieval_percent: Vec<f64>,
    /// The chosen value of `retrieval.consensus_scale`.
    pub consensus_scale: f64,
    /// Accuracy of retrieval with consensus at this scale.
    pub consensus_percent: Vec<f64>,
    /// Accuracy of LocDiff-H by cross-validation: each fold is scored with the setting chosen on the other folds.
    /// `None` if all rows are in one fold.
    pub held_out_percent: Option<Vec<f64>>,
    /// Number of folds.
    pub folds: u32,
}

/// The fold of a place. Places in the same cell share a fold.
pub fn fold_of(place: UnitVector, folds: u32) -> u32 {
    // The hash spreads adjacent cells over the folds.
    (splitmix(cell_of(place.into(), CELL_DEGREES)) % u64::from(folds.max(1))) as u32
}

/// Position of the first setting of LocDiff-H among the predictors.
const FIRST_SETTING: usize = 2 + CONSENSUS_SCALES.len();

/// Number of answers within each threshold, for every predictor. The predictors are LocDiff, retrieval alone, retrieval
/// with consensus at each scale, and LocDiff-H with each setting, in this order.
#[derive(Clone)]
struct Counts {
    rows: f64,
    within: Vec<Vec<f64>>,
}

impl Counts {
    fn new(predictors: usize, thresholds: usize) -> Self {
        Self { rows: 0.0, within: vec![vec![0.0; thresholds]; predictors] }
    }

    fn add(&mut self, row: &TuningErrors, thresholds_km: &[f64]) {
        self.rows += 1.0;
        for (counts, error) in self.within.iter_mut().zip(errors_km(row)) {
            let hits = thresholds_km.iter().map(|threshold| f64::from(u8::from(f64::from(error) <= *threshold)));
            counts.iter_mut().zip(hits).for_each(|(count, hit)| *count += hit);
        }
    }

    fn add_all(&mut self, other: &Self) {
        self.rows += other.rows;
        for (own, other) in self.within.iter_mut().zip(&other.within) {
            own.iter_mut().zip(other).for_each(|(own, other)| *own += other);
        }
    }

    fn percent(&self, predictor: usize) -> Vec<f64> {
        self.within[predictor].iter().map(|count| 100.0 * count / self.rows).collect()
    }

    /// The accuracy of the best part of LocDiff-H at each threshold: LocDiff, retrieval, or retrieval with consensus at
    /// scale `CONSENSUS_SCALES[scale]`.
    fn best_part(&self, scale: usize) -> Vec<f64> {
        let parts = [0, 1, 2 + scale].map(|predictor| self.percent(predictor));
        (0..parts[0].len()).map(|at| parts.iter().map(|part| part[at]).fold(0.0, f64::max)).collect()
    }

    fn objective(&self, setting: usize, best_part: &[f64]) -> f64 {
        let hybrid = self.percent(FIRST_SETTING + setting);
        let value = |at: usize| hybrid[at] - LOSS_WEIGHT * (best_part[at] - hybrid[at]).max(0.0);
        (0..hybrid.len()).map(value).sum::<f64>() / hybrid.len() as f64
    }

    /// Index of the scale with the highest mean accuracy.
    fn best_scale(&self) -> usize {
        first_best(CONSENSUS_SCALES.len(), |scale| self.percent(2 + scale).iter().sum())
    }

    /// Index of the setting with the highest objective.
    fn best(&self) -> usize {
        let part = self.best_part(self.best_scale());
        first_best(self.within.len() - FIRST_SETTING, |setting| self.objective(setting, &part))
    }
}

/// The index, below `count`, with the highest value. On a tie, the first such index wins.
fn first_best(count: usize, value: impl Fn(usize) -> f64) -> usize {
    let values: Vec<f64> = (0..count).map(value).collect();
    (0..count).reduce(|best, next| if values[next] > values[best] { next } else { best }).unwrap_or(0)
}

/// The errors of all predictors, in the order of [`Counts`].
fn errors_km(row: &TuningErrors) -> impl Iterator<Item = f32> {
    let parts = [row.own_km, row.retrieval_km].into_iter().chain(row.consensus_km.iter().copied());
    parts.chain(row.settings_km.iter().copied())
}

/// Chooses the best of `settings` by the errors in `rows`, which are photos with known places. The accuracy on other
/// photos is estimated by cross-validation with `folds` folds; `folds` must be at least 2.
pub fn choose(
    settings: &[Hybrid],
    rows: &[(UnitVector, TuningErrors)],
    thresholds_km: &[f64],
    folds: u32,
) -> Result<Choice, TuningError> {
    check(settings, rows, thresholds_km, folds)?;
    let empty = Counts::new(FIRST_SETTING + settings.len(), thresholds_km.len());
    let mut by_fold = vec![empty.clone(); folds as usize];
    rows.iter().for_each(|(truth, errors)| by_fold[fold_of(*truth, folds) as usize].add(errors, thresholds_km));
    let mut all = empty.clone();
    by_fold.iter().for_each(|fold| all.add_all(fold));
    let (best, scale) = (all.best(), all.best_scale());
    Ok(Choice {
        setting: settings[best],
        rows: rows.len(),
        objective: all.objective(best, &all.best_part(scale)),
        hybrid_percent: all.percent(FIRST_SETTING + best),
        own_percent: all.percent(0),
        retrieval_percent: all.percent(1),
        consensus_scale: CONSENSUS_SCALES[scale],
        consensus_percent: all.percent(2 + scale),
        held_out_percent: held_out(&by_fold, &empty),
        folds,
    })
}

/// Accuracy over the rows of all folds. Each fold is scored with the setting that is best on the other folds. `None` if
/// all rows are in one fold.
fn held_out(by_fold: &[Counts], empty: &Counts) -> Option<Vec<f64>> {
    let (mut within, mut rows) = (vec![0.0; empty.within[0].len()], 0.0);
    for (own, fold) in by_fold.iter().enumerate().filter(|(_, fold)| fold.rows > 0.0) {
        let mut others = empty.clone();
        by_fold.iter().enumerate().filter(|(other, _)| *other != own).for_each(|(_, fold)| others.add_all(fold));
        if others.rows == 0.0 {
            return None;
        }
        let chosen = &fold.within[FIRST_SETTING + others.best()];
        within.iter_mut().zip(chosen).for_each(|(sum, count)| *sum += count);
        rows += fold.rows;
    }
    Some(within.into_iter().map(|count| 100.0 * count / rows).collect())
}

fn check(
    settings: &[Hybrid],
    rows: &[(UnitVector, TuningErrors)],
    thresholds_km: &[f64],
    folds: u32,
) -> Result<(), TuningError> {
    let invalid = |text: String| Err(TuningError(text));
    if settings.is_empty() || rows.is_empty() || thresholds_km.is_empty() || folds < 2 {
        let counts = [settings.len(), rows.len(), thresholds_km.len(), folds as usize];
        let [settings, rows, thresholds, folds] = counts;
        return invalid(format!(
            "got {settings} settings, {rows} rows, {thresholds} thresholds and {folds} folds, wanted at least 1, 1, 1 \
             and 2"
        ));
    }
    for (at, (_, row)) in rows.iter().enumerate() {
        let (got, want) = (row.settings_km.len(), settings.len());
        let (scales, all_scales) = (row.consensus_km.len(), CONSENSUS_SCALES.len());
        if scales != all_scales {
            return invalid(format!("row {at} has {scales} errors of consensus, wanted {all_scales}"));
        }
        if got != want {
            return invalid(format!("row {at} has {got} errors, wanted one for each of {want} settings"));
        }
        if let Some(error) = errors_km(row).find(|error| !error.is_finite()) {
            return invalid(format!("row {at} has an error of {error} km, wanted a finite number"));
        }
    }
    Ok(())
}
