//! The settings of LocDiff-H, chosen on photos that are not the test's.
//!
//! Objective: the mean over the thresholds of the percentage of answers within them, less ten times what LocDiff-H loses at each
//! against the better of LocDiff and retrieval alone. LocDiff-H is there to be as good as the better part at every scale: a point
//! lost at one is worth more than what fine retrieval can win at another. No strict rule, for the least of losses on these photos
//! is mostly luck.
//!
//! The choice is made on all rows. What it is worth on others is estimated by folds: a setting chosen on all folds but one is
//! scored on that one. Photos of one neighbourhood must not fall into different folds, for what is learnt from the one holds for
//! the other: the sphere is cut into cells some 550 km wide, and a cell goes to a fold by its hash.
//!
//! Pure. Errors of every setting are computed photo by photo ([`Grid::errors_km`]), wherever the photo is; the choice needs
//! nothing else.

use std::collections::BTreeMap;

use locdiff_core::config::HybridMode;
use locdiff_core::geo::{Km, Place, SphereIndex, UnitVector};
use serde::{Deserialize, Serialize};

use super::error::RetrievalError;
use super::hybrid::{Hybrid, Samples, chord_km, chord2, consensus, log_density, within_any};

/// Height of a cell, degrees; its width is about the same on the ground.
const CELL_DEGREES: f64 = 5.0;
/// How many points won one point lost against the better part outweighs.
const LOSS_WEIGHT: f64 = 10.0;

/// Settings to try.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid {
    settings: Vec<Hybrid>,
}

impl Default for Grid {
    /// The paper's form, retrieval around the aggregate, fusion and consensus: 5 + 6 + 6·6·4 + 5·5·4 settings.
    fn default() -> Self {
        let radii = [10.0, 25.0, 50.0, 100.0, 200.0, 400.0];
        let mut settings = Vec::new();
        // No wider than the paper's 200 km: sixteen discs of 400 km are most of a continent.
        for (mode, radii) in [(HybridMode::AnySample, &radii[..5]), (HybridMode::Aggregate, &radii[..])] {
            let plain = |radius_km: &f64| Hybrid { mode, radius_km: *radius_km, density_weight: 0.0, density_km: 25.0 };
            settings.extend(radii.iter().map(plain));
        }
        let mut cross = |mode, radii: &[f64], weights: &[f64], widths: &[f64]| {
            for (radius_km, density_weight, density_km) in product(radii, weights, widths) {
                settings.push(Hybrid { mode, radius_km, density_weight, density_km });
            }
        };
        cross(HybridMode::Fusion, &radii, &[0.5, 1.0, 2.0, 3.0, 5.0, 8.0], &[10.0, 25.0, 50.0, 100.0]);
        cross(HybridMode::Consensus, &radii[1..], &[0.5, 1.0, 2.0, 4.0, 8.0], &[10.0, 25.0, 50.0, 100.0]);
        Self { settings }
    }
}

fn product(radii: &[f64], weights: &[f64], widths: &[f64]) -> Vec<(f64, f64, f64)> {
    let pairs =
        |radius: f64| weights.iter().flat_map(move |weight| widths.iter().map(move |width| (radius, *weight, *width)));
    radii.iter().flat_map(|radius| pairs(*radius)).collect()
}

impl Grid {
    /// These settings.
    pub fn new(settings: Vec<Hybrid>) -> Result<Self, RetrievalError> {
        if settings.is_empty() {
            return Err(RetrievalError::Tune("0 settings to try, wanted at least 1".to_owned()));
        }
        Ok(Self { settings })
    }

    /// The settings, in the order of the errors.
    pub fn settings(&self) -> &[Hybrid] {
        &self.settings
    }

    /// Gallery points that any setting asks for an image, ascending.
    pub fn candidates(&self, index: &SphereIndex, image: &Samples) -> Vec<u32> {
        let mut found = within_any(index, &image.samples, Km(self.radius_max(|mode| mode == HybridMode::AnySample)));
        found.extend(index.within(image.aggregate, Km(self.radius_max(|mode| mode != HybridMode::AnySample))));
        found.sort_unstable();
        found.dedup();
        found
    }

    fn radius_max(&self, of: impl Fn(HybridMode) -> bool) -> f64 {
        // Below 0: nothing, not even what is on the spot.
        self.settings.iter().filter(|setting| of(setting.mode)).fold(-1.0, |most, setting| most.max(setting.radius_km))
    }

    /// The error of an image under each setting. `candidates` are those of [`Self::candidates`], `logits` theirs.
    pub fn errors_km(
        &self,
        truth: UnitVector,
        image: &Samples,
        points: &[UnitVector],
        candidates: &[u32],
        logits: &[f32],
    ) -> Vec<f32> {
        let mut answers = vec![None; self.settings.len()];
        let mut order = Order::new(image, points, candidates, self);
        for group in self.groups() {
            let setting = &self.settings[group[0].1];
            let logit = |place: usize| f64::from(logits[place]);
            match setting.mode {
                HybridMode::AnySample => {
                    best_within(&order.by_sample, candidates, &group, |_, place| logit(place), &mut answers);
                }
                HybridMode::Aggregate => {
                    best_within(&order.by_aggregate, candidates, &group, |_, place| logit(place), &mut answers);
                }
                HybridMode::Fusion => {
                    let (near, density) = order.density(setting.density_km);
                    let score = |rank: usize, place: usize| setting.fused(logit(place), density[rank]);
                    best_within(near, candidates, &group, score, &mut answers);
                }
                HybridMode::Consensus => {
                    let (near, density) = order.density(setting.density_km);
                    let fused =
                        |(rank, (_, place)): (usize, &(f64, usize))| setting.fused(logit(*place), density[rank]);
                    let scores: Vec<f64> = near.iter().enumerate().map(fused).collect();
                    let ids: Vec<u32> = near.iter().map(|(_, place)| candidates[*place]).collect();
                    for (radius, at) in &group {
                        let end = near.partition_point(|(distance, _)| distance <= radius);
                        answers[*at] = consensus(points, &ids[..end], &scores[..end]).map(|rank| ids[rank]);
                    }
                }
            }
        }
        let error =
            |answer: Option<u32>| answer.map_or(image.aggregate, |point| points[point as usize]).distance(truth);
        answers.into_iter().map(|answer| error(answer).0 as f32).collect()
    }

    /// Settings that differ in their radius alone: (radius, position), radii ascending.
    fn groups(&self) -> Vec<Vec<(f64, usize)>> {
        let mut groups: BTreeMap<(u8, u64, u64), Vec<(f64, usize)>> = BTreeMap::new();
        for (at, setting) in self.settings.iter().enumerate() {
            let key = match setting.mode {
                HybridMode::AnySample => (0, 0, 0),
                HybridMode::Aggregate => (1, 0, 0),
                HybridMode::Fusion => (2, setting.density_weight.to_bits(), setting.density_km.to_bits()),
                HybridMode::Consensus => (3, setting.density_weight.to_bits(), setting.density_km.to_bits()),
            };
            groups.entry(key).or_default().push((setting.radius_km, at));
        }
        let mut groups: Vec<_> = groups.into_values().collect();
        groups.iter_mut().for_each(|group| group.sort_by(|a, b| a.0.total_cmp(&b.0)));
        groups
    }
}

/// The candidates of one image by distance, as far as any setting goes; places are positions among them.
struct Order {
    /// (distance to the aggregate, place), ascending.
    by_aggregate: Vec<(f64, usize)>,
    /// (distance to the nearest sample, place), ascending.
    by_sample: Vec<(f64, usize)>,
    /// Distances to all samples, in the order of `by_aggregate`.
    distances_km: Vec<f64>,
    samples: usize,
    densities: BTreeMap<u64, Vec<f64>>,
}

impl Order {
    fn new(image: &Samples, points: &[UnitVector], candidates: &[u32], grid: &Grid) -> Self {
        let sorted = |radius: f64, distance: &dyn Fn(UnitVector) -> f64| {
            let at = |(place, point): (usize, &u32)| (distance(points[*point as usize]), place);
            let mut all: Vec<(f64, usize)> = candidates.iter().enumerate().map(at).collect();
            all.retain(|(distance, _)| *distance <= radius);
            all.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            all
        };
        // The chord tells which sample is nearest; how near it is, the distance that radii are compared with.
        let nearest = |point: UnitVector| {
            let nearer = |a: UnitVector, b: UnitVector| if chord2(b, point) < chord2(a, point) { b } else { a };
            image.samples.iter().copied().reduce(nearer).map_or(f64::INFINITY, |sample| sample.distance(point).0)
        };
        let by_aggregate =
            sorted(grid.radius_max(|mode| mode != HybridMode::AnySample), &|point| image.aggregate.distance(point).0);
        let to_samples = |(_, place): &(f64, usize)| {
            let point = points[candidates[*place] as usize];
            image.samples.iter().map(move |sample| chord_km(point, *sample))
        };
        Self {
            distances_km: by_aggregate.iter().flat_map(to_samples).collect(),
            by_aggregate,
            by_sample: sorted(grid.radius_max(|mode| mode == HybridMode::AnySample), &nearest),
            samples: image.samples.len(),
            densities: BTreeMap::new(),
        }
    }

    /// Candidates by their distance to the aggregate, and the log density of the samples at each, computed once for each width.
    fn density(&mut self, width_km: f64) -> (&[(f64, usize)], &[f64]) {
        let (samples, count) = (self.samples, self.by_aggregate.len());
        let distances_km = &self.distances_km;
        let of_rank = |rank: usize| log_density(&distances_km[rank * samples..(rank + 1) * samples], width_km);
        let densities = self.densities.entry(width_km.to_bits()).or_insert_with(|| (0..count).map(of_rank).collect());
        (&self.by_aggregate, densities)
    }
}

/// Walks outwards and notes the best so far at each radius. `score` is told how many are nearer, and the place.
fn best_within(
    order: &[(f64, usize)],
    candidates: &[u32],
    group: &[(f64, usize)],
    score: impl Fn(usize, usize) -> f64,
    answers: &mut [Option<u32>],
) {
    let mut best: Option<(f64, usize)> = None;
    let mut walked = 0;
    for (radius, at) in group {
        while let Some((_, place)) = order.get(walked).filter(|(distance, _)| distance <= radius) {
            let score = score(walked, *place);
            if best.is_none_or(|(most, first)| score > most || (score == most && *place < first)) {
                best = Some((score, *place));
            }
            walked += 1;
        }
        answers[*at] = best.map(|(_, place)| candidates[place]);
    }
}

/// One validation photo.
#[derive(Debug, Clone, PartialEq)]
pub struct TuneRow {
    /// Where it was taken.
    pub truth: UnitVector,
    /// LocDiff's error.
    pub own_km: f32,
    /// The error of retrieval alone.
    pub retrieval_km: f32,
    /// The error under each setting of the grid.
    pub errors_km: Vec<f32>,
}

/// What was chosen, and how good it is. Percentages are those within each threshold.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// The settings.
    pub setting: Hybrid,
    /// Validation photos.
    pub rows: usize,
    /// The objective on all of them.
    pub objective: f64,
    /// LocDiff-H on all of them.
    pub hybrid_percent: Vec<f64>,
    /// LocDiff.
    pub own_percent: Vec<f64>,
    /// Retrieval alone.
    pub retrieval_percent: Vec<f64>,
    /// LocDiff-H with settings chosen on other folds; none where all rows are in one fold.
    pub held_out_percent: Option<Vec<f64>>,
    /// Folds.
    pub folds: u32,
}

/// The fold of a place: neighbours share one.
pub fn fold_of(place: UnitVector, folds: u32) -> u32 {
    let place = Place::from(place);
    let band = ((place.latitude().0 + 90.0) / CELL_DEGREES).floor();
    let middle = (band + 0.5) * CELL_DEGREES - 90.0;
    let cells = (360.0 * middle.to_radians().cos() / CELL_DEGREES).round().max(1.0);
    let cell = ((place.longitude().0 + 180.0) / 360.0 * cells).floor();
    // The finaliser of SplitMix64: near cells go to any folds.
    let mut hash = (band as u64) << 32 | cell as u64;
    hash = (hash ^ hash >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ hash >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((hash ^ hash >> 31) % u64::from(folds.max(1))) as u32
}

/// Answers within each threshold, for every predictor: LocDiff, retrieval, then the settings.
#[derive(Clone)]
struct Counts {
    rows: f64,
    within: Vec<Vec<f64>>,
}

impl Counts {
    fn new(predictors: usize, thresholds: usize) -> Self {
        Self { rows: 0.0, within: vec![vec![0.0; thresholds]; predictors] }
    }

    fn add(&mut self, row: &TuneRow, thresholds_km: &[f64]) {
        self.rows += 1.0;
        let errors = [row.own_km, row.retrieval_km].into_iter().chain(row.errors_km.iter().copied());
        for (counts, error) in self.within.iter_mut().zip(errors) {
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

    fn objective(&self, setting: usize) -> f64 {
        let [own, retrieval, hybrid] = [0, 1, 2 + setting].map(|predictor| self.percent(predictor));
        let value = |at: usize| hybrid[at] - LOSS_WEIGHT * (own[at].max(retrieval[at]) - hybrid[at]).max(0.0);
        (0..hybrid.len()).map(value).sum::<f64>() / hybrid.len() as f64
    }

    /// The setting with the best objective; of equals the first.
    fn best(&self) -> usize {
        let objectives: Vec<f64> = (0..self.within.len() - 2).map(|setting| self.objective(setting)).collect();
        let better = |best: usize, next: usize| if objectives[next] > objectives[best] { next } else { best };
        (0..objectives.len()).reduce(better).unwrap_or(0)
    }
}

/// Chooses among the settings of a grid; `folds` (at least 2) tell what the choice is worth on other places.
pub fn choose(grid: &Grid, rows: &[TuneRow], thresholds_km: &[f64], folds: u32) -> Result<Choice, RetrievalError> {
    check(grid, rows, thresholds_km, folds)?;
    let empty = Counts::new(2 + grid.settings.len(), thresholds_km.len());
    let mut by_fold = vec![empty.clone(); folds as usize];
    rows.iter().for_each(|row| by_fold[fold_of(row.truth, folds) as usize].add(row, thresholds_km));
    let mut all = empty.clone();
    by_fold.iter().for_each(|fold| all.add_all(fold));
    let best = all.best();
    Ok(Choice {
        setting: grid.settings[best],
        rows: rows.len(),
        objective: all.objective(best),
        hybrid_percent: all.percent(2 + best),
        own_percent: all.percent(0),
        retrieval_percent: all.percent(1),
        held_out_percent: held_out(&by_fold, &empty),
        folds,
    })
}

/// Percentages of what is chosen without a fold, on that fold, over all folds.
fn held_out(by_fold: &[Counts], empty: &Counts) -> Option<Vec<f64>> {
    let (mut within, mut rows) = (vec![0.0; empty.within[0].len()], 0.0);
    for (own, fold) in by_fold.iter().enumerate().filter(|(_, fold)| fold.rows > 0.0) {
        let mut others = empty.clone();
        by_fold.iter().enumerate().filter(|(other, _)| *other != own).for_each(|(_, fold)| others.add_all(fold));
        if others.rows == 0.0 {
            return None;
        }
        let chosen = &fold.within[2 + others.best()];
        within.iter_mut().zip(chosen).for_each(|(sum, count)| *sum += count);
        rows += fold.rows;
    }
    Some(within.into_iter().map(|count| 100.0 * count / rows).collect())
}

fn check(grid: &Grid, rows: &[TuneRow], thresholds_km: &[f64], folds: u32) -> Result<(), RetrievalError> {
    let refuse = |text: String| Err(RetrievalError::Tune(text));
    if rows.is_empty() || thresholds_km.is_empty() || folds < 2 {
        let counts = format!("{} rows, {} thresholds, {folds} folds", rows.len(), thresholds_km.len());
        return refuse(format!("{counts}, wanted at least 1, 1 and 2"));
    }
    let settings = grid.settings.len();
    for (at, row) in rows.iter().enumerate() {
        if row.errors_km.len() != settings {
            return refuse(format!(
                "row {at} has {} errors, wanted one for each of {settings} settings",
                row.errors_km.len()
            ));
        }
        let mut errors = [row.own_km, row.retrieval_km].into_iter().chain(row.errors_km.iter().copied());
        if let Some(error) = errors.find(|error| !error.is_finite()) {
            return refuse(format!("row {at} has an error of {error} km, wanted finite numbers"));
        }
    }
    Ok(())
}
