//! The error of LocDiff-H for one photo under each setting that tuning chooses from (`locdiff_core::tuning`).
//!
//! All functions are pure. Settings that differ only in their radius share one pass over the candidates.

use std::collections::BTreeMap;

use locdiff_core::config::HybridMode;
use locdiff_core::geo::{Km, SphereIndex, UnitVector};
use locdiff_core::tuning;

use super::hybrid::{Hybrid, ImageSamples, chord_km, chord2, consensus, log_density, within_any};

/// The settings of LocDiff-H that tuning tries.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid {
    /// The settings to try. [`Grid::errors_km`] returns the errors in the same order.
    pub settings: Vec<Hybrid>,
}

impl Default for Grid {
    fn default() -> Self {
        Self { settings: tuning::settings() }
    }
}

impl Grid {
    /// The indices of the gallery points that are candidates of an image under at least one setting, ascending.
    pub fn candidates(&self, index: &SphereIndex, image: &ImageSamples) -> Vec<u32> {
        let mut found = within_any(index, &image.samples, Km(self.radius_max(|mode| mode == HybridMode::AnySample)));
        found.extend(index.within(image.aggregate, Km(self.radius_max(|mode| mode != HybridMode::AnySample))));
        found.sort_unstable();
        found.dedup();
        found
    }

    fn radius_max(&self, of: impl Fn(HybridMode) -> bool) -> f64 {
        // If no setting has a mode that `of` selects, the radius is -1. Then no point is in range, not even a point at
        // distance 0.
        self.settings.iter().filter(|setting| of(setting.mode)).fold(-1.0, |most, setting| most.max(setting.radius_km))
    }

    /// The error of an image in km under each setting. `candidates` is the result of [`Self::candidates`], and `logits`
    /// holds the logit of each candidate.
    pub fn errors_km(
        &self,
        truth: UnitVector,
        image: &ImageSamples,
        points: &[UnitVector],
        candidates: &[u32],
        logits: &[f32],
    ) -> Vec<f32> {
        let mut answers = vec![None; self.settings.len()];
        let mut order = NearestCandidates::new(image, points, candidates, self);
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

    /// Groups the settings that differ only in their radius. A group lists its settings as pairs (radius, index in
    /// `settings`), with ascending radii.
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

/// The candidates of one image, sorted by distance. The lists `by_aggregate` and `by_sample` serve different settings,
/// and each list ends at the largest radius of its settings. In this file, a variable `place` is the index of a
/// candidate in the list of candidates, not a location.
struct NearestCandidates {
    /// Pairs (distance to the aggregate in km, index of the candidate), with ascending distances.
    by_aggregate: Vec<(f64, usize)>,
    /// Pairs (distance to the nearest sample in km, index of the candidate), with ascending distances.
    by_sample: Vec<(f64, usize)>,
    /// The distances from each candidate to all samples. The candidates are in the order of `by_aggregate`.
    distances_km: Vec<f64>,
    samples: usize,
    densities: BTreeMap<u64, Vec<f64>>,
}

impl NearestCandidates {
    fn new(image: &ImageSamples, points: &[UnitVector], candidates: &[u32], grid: &Grid) -> Self {
        let sorted = |radius: f64, distance: &dyn Fn(UnitVector) -> f64| {
            let at = |(place, point): (usize, &u32)| (distance(points[*point as usize]), place);
            let mut all: Vec<(f64, usize)> = candidates.iter().enumerate().map(at).collect();
            all.retain(|(distance, _)| *distance <= radius);
            all.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            all
        };
        // The nearest sample is found by chord, which is fast to compute. The exact distance to that sample is compared
        // with the radius.
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

    /// The candidates, sorted by distance to the aggregate, and the log density of the samples at each candidate, for a
    /// kernel of width `width_km`. The densities of each width are computed only once.
    fn density(&mut self, width_km: f64) -> (&[(f64, usize)], &[f64]) {
        let (samples, count) = (self.samples, self.by_aggregate.len());
        let distances_km = &self.distances_km;
        let of_rank = |rank: usize| log_density(&distances_km[rank * samples..(rank + 1) * samples], width_km);
        let densities = self.densities.entry(width_km.to_bits()).or_insert_with(|| (0..count).map(of_rank).collect());
        (&self.by_aggregate, densities)
    }
}

/// For each setting in `group`, writes the best candidate within its radius to `answers`. One pass over `order` is
/// enough, because the radii in `group` and the distances in `order` ascend. `score` is called with the position of a
/// candidate in `order` and its position in `candidates`.
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
