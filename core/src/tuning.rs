//! Tuning of LocDiff-H: the settings to try, and the choice of the best setting on validation photos. Tuning also
//! chooses the setting of retrieval with consensus: the setting with the highest mean accuracy over the thresholds.
//!
//! The objective for LocDiff-H is the mean accuracy over the thresholds, minus ten times the mean loss of accuracy. The
//! loss at a threshold is how many percentage points LocDiff-H lacks to be 0.3 points ahead of the best of its parts. The
//! parts are LocDiff, retrieval, and retrieval with consensus. LocDiff-H should be at least as good as the best part at
//! every threshold, so a point lost at one threshold weighs more than a point won at another. The 0.3 points are there
//! because a setting that is just level with the best part on the validation photos was chosen among many, and is
//! likely to be slightly worse on other photos. A loss is penalised rather than forbidden, because small losses are
//! mostly chance.
//!
//! The setting is chosen on all validation photos. Cross-validation estimates how accurate the chosen setting is on
//! other photos: for each fold, a setting is chosen on all other folds and scored on this fold. Nearby photos must be
//! in the same fold, because they are not independent. The sphere is therefore divided into cells about 550 km wide,
//! and a hash assigns each cell to a fold.
//!
//! This module is pure. The workers compute the error of every setting on every photo, and the choice depends only on
//! these errors and the places of the photos.

use std::collections::BTreeMap;

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
/// Percentage points by which LocDiff-H should be more accurate than the best of its parts.
const SAFETY_POINTS: f64 = 0.3;

/// Invalid input: nothing to choose from, too few folds, or errors that are not finite or do not match the settings.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tuning: {0}")]
pub struct TuningError(String);

impl HasExitCode for TuningError {
    fn exit_code(&self) -> ExitCode {
        ExitCode::BadData
    }
}

/// The settings of LocDiff-H, or of retrieval with consensus.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Hybrid {
    /// How a gallery point is chosen.
    pub mode: HybridMode,
    /// Search radius around each sample (`any-sample`), or radius of the second round around the winner of the first
    /// round (`consensus`), km.
    pub radius_km: f64,
    /// Factor of the logits in the first round.
    pub scale: f64,
    /// Weight of the log density that LocDiff predicts, in the first round.
    pub density_weight: f64,
    /// Weight of the samples' log density in the first round.
    pub samples_weight: f64,
    /// Factor of the logits in the second round.
    pub fine_scale: f64,
    /// Weight of the samples' log density in the second round.
    pub fine_samples_weight: f64,
    /// Width of the kernel with which the density of the samples is estimated in the second round, km.
    pub density_km: f64,
    /// The most similar point is the answer if its logit, plus the log density that LocDiff predicts there, is at least
    /// this much higher than at the winner of the vote; 0: never.
    pub top_margin: f64,
}

impl From<&RetrievalConfig> for Hybrid {
    fn from(config: &RetrievalConfig) -> Self {
        Self {
            mode: config.mode,
            radius_km: config.radius_km,
            scale: config.scale,
            density_weight: config.density_weight,
            samples_weight: config.samples_weight,
            fine_scale: config.fine_scale,
            fine_samples_weight: config.fine_samples_weight,
            density_km: config.density_km,
            top_margin: config.top_margin,
        }
    }
}

impl std::fmt::Display for Hybrid {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            radius_km,
            scale,
            density_weight,
            samples_weight,
            fine_scale,
            fine_samples_weight,
            density_km,
            top_margin,
            ..
        } = self;
        match self.mode {
            HybridMode::AnySample => write!(out, "any-sample within {radius_km} km"),
            HybridMode::Consensus => write!(
                out,
                "consensus: first round with scale {scale}, density weight {density_weight} and samples weight \
                 {samples_weight}; second round within {radius_km} km with scale {fine_scale}, samples weight \
                 {fine_samples_weight} and kernel width {density_km} km; margin of the most similar point {top_margin}"
            ),
        }
    }
}

impl Hybrid {
    /// Retrieval with consensus, with these factors of the logits in the two rounds. LocDiff has no say.
    pub fn without_locdiff(radius_km: f64, scale: f64, fine_scale: f64) -> Self {
        Self {
            mode: HybridMode::Consensus,
            radius_km,
            scale,
            density_weight: 0.0,
            samples_weight: 0.0,
            fine_scale,
            fine_samples_weight: 0.0,
            density_km: 25.0,
            top_margin: 0.0,
        }
    }

    /// The number that the section `retrieval` of the configuration names so.
    pub fn field(&mut self, name: &str) -> Option<&mut f64> {
        Some(match name {
            "radius_km" => &mut self.radius_km,
            "scale" => &mut self.scale,
            "density_weight" => &mut self.density_weight,
            "samples_weight" => &mut self.samples_weight,
            "fine_scale" => &mut self.fine_scale,
            "fine_samples_weight" => &mut self.fine_samples_weight,
            "density_km" => &mut self.density_km,
            "top_margin" => &mut self.top_margin,
            _ => return None,
        })
    }

    /// Whether LocDiff has no say.
    pub fn is_without_locdiff(&self) -> bool {
        self.mode == HybridMode::Consensus
            && [self.density_weight, self.samples_weight, self.fine_samples_weight] == [0.0; 3]
    }

    /// This setting, and the same with samples in the second round.
    fn with_samples(self) -> [Self; 2] {
        [self, Self { fine_samples_weight: 1.0, density_km: 100.0, ..self }]
    }
}

/// In the section `retrieval`, the names of the fields of retrieval with consensus begin like this.
pub const OF_CONSENSUS: &str = "consensus_";

/// Radius of the second round in all settings that tuning tries, km.
const RADIUS_KM: f64 = 150.0;
/// The factors of the logits in the first round that tuning tries. LocDiff-H and retrieval with consensus try the same.
/// With finer steps, or with more weights below, the best of many similar settings would be the best by chance.
const SCALES: [f64; 5] = [0.25, 0.5, 1.0, 2.0, 4.0];
/// The factors of the logits in the second round that tuning tries.
const FINE_SCALES: [f64; 3] = [2.0, 4.0, 8.0];
/// The weights of p and q in the first round that tuning tries for LocDiff-H.
const WEIGHTS: [(f64, f64); 3] = [(1.0, 0.0), (2.0, 0.0), (1.0, 1.0)];
/// The margins of the most similar point that tuning tries for LocDiff-H.
const TOP_MARGINS: [f64; 2] = [0.0, 1.0];

/// The settings that tuning tries.
#[derive(Debug, Clone, PartialEq)]
pub struct Trials {
    /// The settings of retrieval with consensus.
    pub consensus: Vec<Hybrid>,
    /// The settings of LocDiff-H.
    pub hybrid: Vec<Hybrid>,
}

impl Default for Trials {
    fn default() -> Self {
        let both_rounds =
            |scale: f64| FINE_SCALES.map(|fine_scale| Hybrid::without_locdiff(RADIUS_KM, scale, fine_scale));
        let consensus: Vec<Hybrid> = SCALES.into_iter().flat_map(both_rounds).collect();
        let mut hybrid = Vec::new();
        for alone in &consensus {
            for (density_weight, samples_weight) in WEIGHTS {
                for top_margin in TOP_MARGINS {
                    hybrid.extend(Hybrid { density_weight, samples_weight, top_margin, ..*alone }.with_samples());
                }
            }
        }
        Self { consensus, hybrid }
    }
}

impl Trials {
    /// Only the settings that are left if these fields of the section `retrieval` are fixed.
    pub fn fixed(mut self, fields: &BTreeMap<String, f64>) -> Self {
        for (name, value) in fields {
            let (settings, field) = match name.strip_prefix(OF_CONSENSUS) {
                Some(field) => (&mut self.consensus, field),
                None => (&mut self.hybrid, name.as_str()),
            };
            let mut left: Vec<Hybrid> = Vec::new();
            for mut setting in std::mem::take(settings) {
                setting.field(field).into_iter().for_each(|field| *field = *value);
                if !left.contains(&setting) {
                    left.push(setting);
                }
            }
            *settings = left;
        }
        self
    }
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
    /// The chosen setting of retrieval with consensus.
    pub consensus: Hybrid,
    /// Accuracy of retrieval with consensus and this setting.
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

/// Number of answers within each threshold, for every predictor. The predictors are LocDiff, retrieval alone, retrieval
/// with consensus and each of its settings, and LocDiff-H with each setting, in this order.
#[derive(Clone)]
struct Counts {
    /// Number of settings of retrieval with consensus.
    consensus: usize,
    rows: f64,
    within: Vec<Vec<f64>>,
}

impl Counts {
    fn new(trials: &Trials, thresholds: usize) -> Self {
        let (consensus, hybrid) = (trials.consensus.len(), trials.hybrid.len());
        Self { consensus, rows: 0.0, within: vec![vec![0.0; thresholds]; 2 + consensus + hybrid] }
    }

    /// Number of the predictor that is LocDiff-H with setting number `setting`.
    fn hybrid(&self, setting: usize) -> usize {
        2 + self.consensus + setting
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

    /// The accuracy of the best part of LocDiff-H at each threshold: LocDiff, retrieval, or retrieval with consensus and
    /// its setting number `consensus`.
    fn best_part(&self, consensus: usize) -> Vec<f64> {
        let parts = [0, 1, 2 + consensus].map(|predictor| self.percent(predictor));
        (0..parts[0].len()).map(|at| parts.iter().map(|part| part[at]).fold(0.0, f64::max)).collect()
    }

    fn objective(&self, setting: usize, best_part: &[f64]) -> f64 {
        let hybrid = self.percent(self.hybrid(setting));
        let value = |at: usize| hybrid[at] - LOSS_WEIGHT * (best_part[at] + SAFETY_POINTS - hybrid[at]).max(0.0);
        (0..hybrid.len()).map(value).sum::<f64>() / hybrid.len() as f64
    }

    /// Index of the setting of retrieval with consensus that has the highest mean accuracy.
    fn best_consensus(&self) -> usize {
        first_best(self.consensus, |setting| self.percent(2 + setting).iter().sum())
    }

    /// Index of the setting of LocDiff-H that has the highest objective.
    fn best(&self) -> usize {
        let part = self.best_part(self.best_consensus());
        first_best(self.within.len() - self.hybrid(0), |setting| self.objective(setting, &part))
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

/// Chooses the best of `trials` by the errors in `rows`, which are photos with known places. The accuracy on other
/// photos is estimated by cross-validation with `folds` folds; `folds` must be at least 2.
pub fn choose(
    trials: &Trials,
    rows: &[(UnitVector, TuningErrors)],
    thresholds_km: &[f64],
    folds: u32,
) -> Result<Choice, TuningError> {
    check(trials, rows, thresholds_km, folds)?;
    let empty = Counts::new(trials, thresholds_km.len());
    let mut by_fold = vec![empty.clone(); folds as usize];
    rows.iter().for_each(|(truth, errors)| by_fold[fold_of(*truth, folds) as usize].add(errors, thresholds_km));
    let mut all = empty.clone();
    by_fold.iter().for_each(|fold| all.add_all(fold));
    let (best, consensus) = (all.best(), all.best_consensus());
    Ok(Choice {
        setting: trials.hybrid[best],
        rows: rows.len(),
        objective: all.objective(best, &all.best_part(consensus)),
        hybrid_percent: all.percent(all.hybrid(best)),
        own_percent: all.percent(0),
        retrieval_percent: all.percent(1),
        consensus: trials.consensus[consensus],
        consensus_percent: all.percent(2 + consensus),
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
        let chosen = &fold.within[empty.hybrid(others.best())];
        within.iter_mut().zip(chosen).for_each(|(sum, count)| *sum += count);
        rows += fold.rows;
    }
    Some(within.into_iter().map(|count| 100.0 * count / rows).collect())
}

fn check(
    trials: &Trials,
    rows: &[(UnitVector, TuningErrors)],
    thresholds_km: &[f64],
    folds: u32,
) -> Result<(), TuningError> {
    let invalid = |text: String| Err(TuningError(text));
    let [of_consensus, of_hybrid] = [trials.consensus.len(), trials.hybrid.len()];
    if of_consensus == 0 || of_hybrid == 0 || rows.is_empty() || thresholds_km.is_empty() || folds < 2 {
        let (rows, thresholds) = (rows.len(), thresholds_km.len());
        return invalid(format!(
            "got {of_consensus} and {of_hybrid} settings, {rows} rows, {thresholds} thresholds and {folds} folds, \
             wanted at least 1, 1, 1, 1 and 2"
        ));
    }
    for (at, (_, row)) in rows.iter().enumerate() {
        for (got, want) in [(row.consensus_km.len(), of_consensus), (row.settings_km.len(), of_hybrid)] {
            if got != want {
                return invalid(format!("row {at} has {got} errors, wanted one for each of {want} settings"));
            }
        }
        if let Some(error) = errors_km(row).find(|error| !error.is_finite()) {
            return invalid(format!("row {at} has an error of {error} km, wanted a finite number"));
        }
    }
    Ok(())
}
