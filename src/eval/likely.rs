//! Sums up the samples of an image for people: how far they are from the answer, and which other places are likely.

use locdiff_core::geo::{EARTH_RADIUS_KM, UnitVector};

/// Alternatives are at least this far from the answer and from each other. Places that are nearer count as the same
/// place.
const APART_KM: f64 = 200.0;
/// Most alternatives of an answer.
const ALTERNATIVES_MAX: usize = 5;

/// What the samples of an image say about its answer.
#[derive(Debug, Clone, PartialEq)]
pub struct LikelyPlaces {
    /// Mean distance from the samples to the answer, km.
    pub spread_km: f64,
    /// Share of the samples, by weight, that are nearer to the answer than to any alternative.
    pub weight: f64,
    /// The alternatives, each with the share of the samples that are nearest to it, largest share first. The shares and
    /// `weight` add up to 1.
    pub alternatives: Vec<(UnitVector, f64)>,
}

impl LikelyPlaces {
    /// Finds the alternatives to `answer`. Each alternative is the sample with the most samples within 200 km,
    /// among the samples that are farther than 200 km from the answer and from all earlier alternatives. `weights`
    /// holds the weight of each sample; if it is empty, all samples have the weight 1.
    pub fn of(answer: UnitVector, samples: &[UnitVector], weights: &[f64]) -> Self {
        // Distances are compared by their cosines, which takes a tenth of the time.
        let near = (APART_KM / EARTH_RADIUS_KM).cos();
        let is_near = |one: UnitVector, other: UnitVector| one.dot(other) >= near;
        let mut places = vec![answer];
        while places.len() <= ALTERNATIVES_MAX {
            let is_free = |(sample, _): &(UnitVector, f64)| !places.iter().any(|place| is_near(*place, *sample));
            let free: Vec<(UnitVector, f64)> = weighted(samples, weights).filter(is_free).collect();
            let support = |place: UnitVector| {
                free.iter().filter(|(other, _)| is_near(place, *other)).map(|(_, weight)| weight).sum::<f64>()
            };
            let supported: Vec<(UnitVector, f64)> = free.iter().map(|(place, _)| (*place, support(*place))).collect();
            // `max_by` takes the last of equals, and the first sample should win.
            let best = supported.iter().rev().max_by(|one, other| one.1.total_cmp(&other.1));
            let Some((best, _)) = best else { break };
            places.push(*best);
        }
        let (mut sums, mut total) = (vec![0.0; places.len()], 0.0);
        for (sample, weight) in weighted(samples, weights) {
            let farness = |index: &usize| -places[*index].dot(sample);
            let nearest = (0..places.len()).min_by(|one, other| farness(one).total_cmp(&farness(other)));
            sums[nearest.unwrap_or_default()] += weight;
            total += weight;
        }
        let mut found = places.into_iter().zip(sums.into_iter().map(|sum| if total > 0.0 { sum / total } else { 0.0 }));
        let weight = found.next().map_or(0.0, |(_, weight)| weight);
        let mut alternatives: Vec<(UnitVector, f64)> = found.collect();
        alternatives.sort_by(|one, other| other.1.total_cmp(&one.1));
        Self { spread_km: spread_km(answer, samples, weights), weight, alternatives }
    }
}

/// Mean distance from the samples to the answer, km; 0 without samples. `weights` as in [`LikelyPlaces::of`].
pub fn spread_km(answer: UnitVector, samples: &[UnitVector], weights: &[f64]) -> f64 {
    let (mut sum, mut total) = (0.0, 0.0);
    for (sample, weight) in weighted(samples, weights) {
        sum += weight * answer.distance(sample).0;
        total += weight;
    }
    if total > 0.0 { sum / total } else { 0.0 }
}

/// Each sample with its weight.
fn weighted<'a>(samples: &'a [UnitVector], weights: &'a [f64]) -> impl Iterator<Item = (UnitVector, f64)> + 'a {
    samples.iter().enumerate().map(|(at, sample)| (*sample, weights.get(at).copied().unwrap_or(1.0)))
}

#[cfg(test)]
mod tests {
    use locdiff_core::geo::{Degrees, Place};

    use super::*;

    fn at(latitude: f64, longitude: f64) -> UnitVector {
        Place::new(Degrees(latitude), Degrees(longitude)).expect("the coordinates are valid").into()
    }

    #[test]
    fn clusters_become_alternatives_with_their_shares() {
        let answer = at(48.86, 2.35);
        let samples = [at(48.9, 2.3), at(40.7, -74.0), at(40.8, -74.1), at(48.8, 2.4), at(-33.9, 151.2)];
        let found = LikelyPlaces::of(answer, &samples, &[]);
        assert_eq!(found.weight, 0.4);
        let shares: Vec<f64> = found.alternatives.iter().map(|(_, weight)| *weight).collect();
        assert_eq!(shares, [0.4, 0.2]);
        assert_eq!(found.alternatives[0].0, samples[1], "the first of two equal samples wins");
        assert_eq!(found.alternatives[1].0, samples[4]);
        let mean = samples.iter().map(|sample| answer.distance(*sample).0).sum::<f64>() / 5.0;
        assert_eq!(found.spread_km, mean);
    }

    #[test]
    fn samples_count_by_weight() {
        let answer = at(48.86, 2.35);
        let samples = [at(48.9, 2.3), at(40.7, -74.0), at(40.8, -74.1), at(-33.9, 151.2)];
        let found = LikelyPlaces::of(answer, &samples, &[1.0, 0.1, 0.1, 0.8]);
        assert_eq!(found.weight, 0.5);
        assert_eq!(found.alternatives[0], (samples[3], 0.4), "one heavy sample counts more than two light ones");
        assert!((found.alternatives[1].1 - 0.1).abs() < 1e-12, "{found:?}");
        let mean = [1.0, 0.1, 0.1, 0.8].iter().zip(&samples).map(|(weight, place)| weight * answer.distance(*place).0);
        assert!((found.spread_km - mean.sum::<f64>() / 2.0).abs() < 1e-9);
    }

    #[test]
    fn samples_around_the_answer_leave_no_alternative_and_many_places_leave_five() {
        let answer = at(0.0, 0.0);
        let found = LikelyPlaces::of(answer, &[at(0.1, 0.0), at(0.0, 1.0)], &[]);
        assert_eq!((found.weight, found.alternatives.len()), (1.0, 0));
        let spread: Vec<UnitVector> = (0..12).map(|index| at(0.0, f64::from(index) * 30.0 - 165.0)).collect();
        let found = LikelyPlaces::of(answer, &spread, &[]);
        assert_eq!(found.alternatives.len(), 5);
        let total = found.weight + found.alternatives.iter().map(|(_, weight)| weight).sum::<f64>();
        assert!((total - 1.0).abs() < 1e-12, "{total}");
    }

    #[test]
    fn no_samples_give_an_answer_without_alternatives() {
        let found = LikelyPlaces::of(at(1.0, 2.0), &[], &[]);
        assert_eq!((found.spread_km, found.weight, found.alternatives.len()), (0.0, 0.0, 0));
    }
}
