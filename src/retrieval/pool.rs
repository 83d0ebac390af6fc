//! The vote of LocDiff-H and of retrieval with consensus.
//!
//! The voters are the gallery points that are most similar to the photo and, for LocDiff-H, the points near LocDiff's
//! answer. They vote in two rounds. In each round, voter j has the weight exp(s_j), and the winner is the voter i with
//! the largest sum of votes Σ_j exp(s_j) Σ_w exp(-d_ij / w). Here d_ij is the distance between the two voters, and w
//! runs over the widths of the round. If exp(s) is proportional to the probability of each point, the winner is the
//! point that is expected to be close to the truth on these scales.
//!
//! | round  | voters                                 | score s                                                | w, km      |
//! |--------|----------------------------------------|--------------------------------------------------------|------------|
//! | first  | all                                    | `scale` · logit + `density_weight` · log p + `samples_weight` · log q + log f | 200, 750   |
//! | second | those within the radius of the winner  | `fine_scale` · logit + `fine_samples_weight` · log q + log f | 1, 25, 200 |
//!
//! p is the density that LocDiff predicts from the photo before it draws samples, relative to the density of a place
//! that is known exactly. It finds regions better than a few samples do. A network that has seen no photos of an area
//! gives it almost no density, so p is smoothed at points that are far from every training photo; the maximum of the
//! smoothing kernel is 1. f is the factor of the point in this round under `eval.prior`, times the user's prior at the
//! point ([`Surroundings`]). q = ε + mean_k exp(-d_k / h) is the density of LocDiff's samples, where d_k is the
//! distance to sample k; with a prior of the user, the mean is weighted. The width h is 250 km in the first round, or
//! the width over which p is smoothed if that is larger, and `density_km` in the second round.
//!
//! A vote prefers areas with many likely points, and so it may leave the one point that is exactly right. With
//! `top_margin` m, the answer is the point with the largest logit if logit + log p + log π is higher there than at the
//! winner by at least m; π is the user's prior.
//!
//! A logit distinguishes streets well but confuses continents, so the similarities count more in the second round. They
//! also count more in both rounds of LocDiff-H if the prior is even and the most similar point is far from every
//! training photo, because LocDiff cannot confirm such a point: `scale` is multiplied by 4, and `fine_scale` by 2.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use locdiff_core::geo::{EARTH_RADIUS_KM, UnitVector};

use super::hybrid::{Hybrid, ImageSamples, chord_km, chord2};
use super::surroundings::{SMOOTHED_KM, Surroundings};
use crate::shdd::Basis;

/// A point votes only if its weight is at least e⁻⁹ times the largest weight.
const DEPTH: f64 = 9.0;
/// Of the points near LocDiff's answer, those with the largest logits vote, at most this many.
const NEAR_POINTS: usize = 500;
/// Kernel widths of the first round, km.
const REGION_KM: [f64; 2] = [200.0, 750.0];
/// `scale` and `fine_scale` are multiplied by these factors if LocDiff does not know the most similar point.
const UNKNOWN_SCALES: [f64; 2] = [4.0, 2.0];
/// Kernel widths of the second round, km.
const PLACE_KM: [f64; 3] = [1.0, 25.0, 200.0];
/// The least value of the density p, and ε in the density q.
const DENSITY_MIN: f64 = 0.002;
/// Least width h of the kernel of the density q in the first round, km.
const REGION_SAMPLES_KM: f64 = 250.0;
/// Number of points whose harmonics are computed at once.
const POINTS_AT_ONCE: usize = 64;

/// The voters of one photo.
pub(super) struct Pool<'a> {
    image: Option<&'a ImageSamples>,
    /// The gallery points.
    ids: Vec<u32>,
    vectors: Vec<UnitVector>,
    logits: Vec<f64>,
    /// Logarithms of the factor f of each point in the two rounds.
    log_factors: Vec<[f64; 2]>,
    /// Logarithms of the densities p and q of the first round at each point; 0 without LocDiff.
    log_densities: Vec<[f64; 2]>,
    /// Logarithm of the user's prior at each point.
    log_priors: Vec<f64>,
    /// Number of points that are among the most similar. They come first. Without LocDiff, only these points vote.
    similar: usize,
    /// Whether the prior is even and the most similar point is far from every training photo.
    is_unknown: bool,
}

impl<'a> Pool<'a> {
    /// The voters of a photo. `best` lists the most similar points with their logits. `near` lists the points near
    /// LocDiff's answer with their logits; points that are also in `best` are dropped. `image` is `None` if only
    /// retrieval is asked for.
    pub(super) fn new(
        (points, surroundings): (&[UnitVector], &Surroundings),
        best: &[(u32, f32)],
        near: &[(u32, f32)],
        image: Option<&'a ImageSamples>,
    ) -> Self {
        let known: std::collections::HashSet<u32> = best.iter().map(|(id, _)| *id).collect();
        let mut near: Vec<(u32, f32)> = near.iter().copied().filter(|(id, _)| !known.contains(id)).collect();
        near.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        near.truncate(NEAR_POINTS);
        let (ids, logits): (Vec<u32>, Vec<f64>) =
            best.iter().chain(&near).map(|(id, logit)| (*id, f64::from(*logit))).unzip();
        let vectors: Vec<UnitVector> = ids.iter().map(|id| points[*id as usize]).collect();
        let levels: Vec<usize> = ids.iter().map(|id| surroundings.level(*id)).collect();
        Self {
            log_densities: image
                .map_or_else(|| vec![[0.0; 2]; ids.len()], |image| region_densities(image, &vectors, &levels)),
            log_factors: ids.iter().map(|id| surroundings.log_factors(*id)).collect(),
            log_priors: ids.iter().map(|id| surroundings.log_prior(*id)).collect(),
            similar: best.len(),
            is_unknown: best.first().is_some_and(|(id, _)| surroundings.is_probable_but_unknown(*id)),
            image,
            ids,
            vectors,
            logits,
        }
    }

    /// The winner of the vote under each setting. `None` if there are no voters. Settings share the rounds in which they
    /// do not differ.
    pub(super) fn answers(&self, settings: &[Hybrid]) -> Vec<Option<u32>> {
        let mut winners = vec![None; settings.len()];
        if self.similar == 0 {
            return winners;
        }
        let mut densities = BTreeMap::new();
        for ((_, centre, _), of_centre) in self.by_centre(settings) {
            let first = &settings[of_centre[0]];
            let is_near = |at: &usize| chord_km(self.vectors[centre], self.vectors[*at]) <= first.radius_km;
            let near: Vec<usize> = (0..self.voters(first)).filter(is_near).collect();
            let places: Vec<UnitVector> = near.iter().map(|at| self.vectors[*at]).collect();
            let fine = |at: &usize| {
                let setting = &settings[*at];
                [self.scales(setting)[1], setting.fine_samples_weight, setting.density_km].map(f64::to_bits)
            };
            let rounds = distinct(&of_centre, fine);
            let weigh = |same: &Vec<usize>| weights_of(&self.place_scores(&settings[same[0]], &near, &mut densities));
            let weights: Vec<Vec<f32>> = rounds.values().map(weigh).collect();
            let found = vote(&places, ClosenessTable::of_places(), weights);
            for (same, winner) in rounds.values().zip(found) {
                // If scores are not finite, nobody wins the second round, and the winner of the first round stays.
                let winner = winner.map_or(centre, |place| near[place]);
                same.iter().for_each(|at| winners[*at] = Some(self.ids[self.answer(&settings[*at], winner)]));
            }
        }
        winners
    }

    /// The voter that is the answer: the winner of the vote or the most similar point.
    fn answer(&self, setting: &Hybrid, winner: usize) -> usize {
        let score = |at: usize| self.logits[at] + self.log_densities[at][0] + self.log_priors[at];
        let is_ahead = setting.top_margin > 0.0 && score(0) - score(winner) >= setting.top_margin;
        if is_ahead { 0 } else { winner }
    }

    /// Holds the first round. Groups the settings, given by their positions, by their voters, by the winner of the first
    /// round and by the radius around it.
    fn by_centre(&self, settings: &[Hybrid]) -> BTreeMap<(usize, usize, u64), Vec<usize>> {
        let coarse = |at: &usize| {
            let setting = &settings[*at];
            let [scale, _] = self.scales(setting);
            let weights = [scale, setting.density_weight, setting.samples_weight];
            (self.voters(setting), weights.map(f64::to_bits))
        };
        let all: Vec<usize> = (0..settings.len()).collect();
        let rounds = distinct(&all, coarse);
        let weights: Vec<Vec<f32>> =
            rounds.values().map(|same| weights_of(&self.region_scores(&settings[same[0]]))).collect();
        // If scores are not finite, nobody wins, and the most similar point is the answer.
        let regions = vote(&self.vectors, ClosenessTable::of_regions(), weights);
        let regions = regions.into_iter().map(|winner| winner.unwrap_or(0));
        let mut groups: BTreeMap<_, Vec<usize>> = BTreeMap::new();
        for (same, centre) in rounds.into_values().zip(regions) {
            for at in same {
                let key = (self.voters(&settings[at]), centre, settings[at].radius_km.to_bits());
                groups.entry(key).or_default().push(at);
            }
        }
        groups
    }

    /// Number of points that vote.
    fn voters(&self, setting: &Hybrid) -> usize {
        if setting.is_without_locdiff() { self.similar } else { self.ids.len() }
    }

    /// The factors of the logits in the two rounds.
    fn scales(&self, setting: &Hybrid) -> [f64; 2] {
        let [first, second] = if self.is_unknown && !setting.is_without_locdiff() { UNKNOWN_SCALES } else { [1.0; 2] };
        [first * setting.scale, second * setting.fine_scale]
    }

    /// The score s of each voter in the first round.
    fn region_scores(&self, setting: &Hybrid) -> Vec<f64> {
        let [scale, _] = self.scales(setting);
        let score = |at: usize| {
            let [predicted, of_samples] = self.log_densities[at];
            let locdiff = setting.density_weight * predicted + setting.samples_weight * of_samples;
            scale * self.logits[at] + locdiff + self.log_factors[at][0]
        };
        (0..self.voters(setting)).map(score).collect()
    }

    /// The score s of the voters `near` in the second round. `densities` keeps log q of each voter and width.
    fn place_scores(&self, setting: &Hybrid, near: &[usize], densities: &mut BTreeMap<(u64, usize), f64>) -> Vec<f64> {
        let [_, scale] = self.scales(setting);
        let mut score = |at: &usize| {
            let similarity = scale * self.logits[*at] + self.log_factors[*at][1];
            let (Some(image), true) = (self.image, setting.fine_samples_weight > 0.0) else { return similarity };
            let density = || log_sample_density(image, self.vectors[*at], setting.density_km);
            let log_q = densities.entry((setting.density_km.to_bits(), *at)).or_insert_with(density);
            similarity + setting.fine_samples_weight * *log_q
        };
        near.iter().map(&mut score).collect()
    }
}

/// Groups the elements of `all` by their keys.
fn distinct<Key: Ord>(all: &[usize], key: impl Fn(&usize) -> Key) -> BTreeMap<Key, Vec<usize>> {
    let mut groups: BTreeMap<Key, Vec<usize>> = BTreeMap::new();
    all.iter().for_each(|one| groups.entry(key(one)).or_default().push(*one));
    groups
}

/// The winners of several votes among the same points: `weights` has a list for each vote. Only the first points vote if
/// a list is shorter than `points`. `None` if nobody votes, or if weights are not finite.
fn vote(points: &[UnitVector], table: &ClosenessTable, weights: Vec<Vec<f32>>) -> Vec<Option<usize>> {
    let weight = |weights: &Vec<f32>, at: usize| weights.get(at).copied().unwrap_or(0.0);
    // Points that vote nowhere change no sum.
    let has_vote = |at: &usize| weights.iter().any(|weights| weight(weights, *at) != 0.0);
    let voters: Vec<usize> = (0..points.len()).filter(has_vote).collect();
    let places: Vec<UnitVector> = voters.iter().map(|at| points[*at]).collect();
    let closeness = closeness_matrix(&places, table);
    let of_voters = |weights: &Vec<f32>| voters.iter().map(|at| weight(weights, *at)).collect();
    let weights: Vec<Vec<f32>> = weights.iter().map(of_voters).collect();
    // Many votes at once read each row of a large matrix once.
    let few_at_once = weights.chunks(4).flat_map(|weights| vote_at_once::<4>(&closeness, weights));
    let many_at_once = weights.chunks(32).flat_map(|weights| vote_at_once::<32>(&closeness, weights));
    let winners: Vec<Option<usize>> = if weights.len() <= 4 { few_at_once.collect() } else { many_at_once.collect() };
    winners.into_iter().map(|winner| winner.map(|at| voters[at])).collect()
}

/// The winners of at most `VOTES` votes. `weights_of_votes` has the weights of all points in each vote, and `closeness`
/// holds how close each point is to each other point, row by row.
fn vote_at_once<const VOTES: usize>(closeness: &[f32], weights_of_votes: &[Vec<f32>]) -> Vec<Option<usize>> {
    let count = weights_of_votes[0].len();
    let mut weights = vec![[0.0_f32; VOTES]; count];
    for (vote, of_vote) in weights_of_votes.iter().enumerate() {
        weights.iter_mut().zip(of_vote).for_each(|(weights, weight)| weights[vote] = *weight);
    }
    let mut best = [(0.0_f32, None); VOTES];
    for (at, own) in weights.iter().enumerate() {
        // The compiler turns the sums into vector instructions.
        let mut sums = [0.0_f32; VOTES];
        for (close, weights) in closeness[at * count..(at + 1) * count].iter().zip(&weights) {
            sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += close * weight);
        }
        for (best, (sum, own)) in best.iter_mut().zip(sums.into_iter().zip(own)) {
            if *own > 0.0 && sum > best.0 {
                *best = (sum, Some(at));
            }
        }
    }
    best[..weights_of_votes.len()].iter().map(|(_, winner)| *winner).collect()
}

/// exp(s) of each score, divided by the largest. Weights below e⁻⁹ become 0.
fn weights_of(scores: &[f64]) -> Vec<f32> {
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weight = |score: &f64| if *score < highest - DEPTH { 0.0 } else { (score - highest).exp() as f32 };
    scores.iter().map(weight).collect()
}

/// log p and log q in the first round, at each point. `levels` says how far the densities are smoothed at each point.
fn region_densities(image: &ImageSamples, points: &[UnitVector], levels: &[usize]) -> Vec<[f64; 2]> {
    let predicted = log_densities(image, points, levels);
    let of_point = |(predicted, (point, level)): (f64, (&UnitVector, &usize))| {
        [predicted, log_sample_density(image, *point, SMOOTHED_KM[*level].max(REGION_SAMPLES_KM))]
    };
    predicted.into_iter().zip(points.iter().zip(levels)).map(of_point).collect()
}

/// log p at each point. `levels` says how far the density is smoothed at each point.
fn log_densities(image: &ImageSamples, points: &[UnitVector], levels: &[usize]) -> Vec<f64> {
    let degree = ((image.expected.len() as f64).sqrt().round() as u32).saturating_sub(1);
    let Ok(basis) = Basis::new(degree) else { return vec![0.0; points.len()] };
    if image.expected.len() != basis.dims() {
        return vec![0.0; points.len()];
    }
    let codes: Vec<Vec<f64>> = SMOOTHED_KM.iter().map(|km| smoothed(&image.expected, degree, *km)).collect();
    let (points, levels) = (points.chunks(POINTS_AT_ONCE), levels.chunks(POINTS_AT_ONCE));
    let of_chunk = |(points, levels): (&[UnitVector], &[usize])| {
        let harmonics = basis.encode_f64(points);
        let value = |(values, level): (&[f64], &usize)| {
            let density: f64 = values.iter().zip(&codes[*level]).map(|(value, coefficient)| value * coefficient).sum();
            density.max(DENSITY_MIN).ln()
        };
        harmonics.chunks_exact(basis.dims()).zip(levels).map(value).collect::<Vec<f64>>()
    };
    points.zip(levels).flat_map(of_chunk).collect()
}

/// The code of a density that is smoothed over `km`. The density of an exactly known place is 1 at this place, however
/// far it is smoothed. With a low-pass filter, it is 1 only on average over all places.
fn smoothed(code: &[f32], degree: u32, km: f64) -> Vec<f64> {
    let width = km / EARTH_RADIUS_KM;
    let factor = |l: u32| (-f64::from(l * (l + 1)) * width * width / 2.0).exp();
    // Dimensions that a low-pass filter drops are 0, and no other number that a network predicts is. The sum of the
    // squares of all harmonics of degree l is (2l + 1) / 4π.
    let kept =
        |l: u32| code[(l * l) as usize..((l + 1) * (l + 1)) as usize].iter().filter(|value| **value != 0.0).count();
    let highest: f64 = (0..=degree).map(|l| kept(l) as f64 / (4.0 * std::f64::consts::PI) * factor(l)).sum();
    let highest = highest.max(f64::MIN_POSITIVE);
    let of_degree = |l: u32| std::iter::repeat_n(factor(l) / highest, 2 * l as usize + 1);
    code.iter().zip((0..=degree).flat_map(of_degree)).map(|(value, factor)| f64::from(*value) * factor).collect()
}

/// log q at a point, for a kernel of width `width_km`.
fn log_sample_density(image: &ImageSamples, point: UnitVector, width_km: f64) -> f64 {
    let term = |sample: &UnitVector| (-chord_km(point, *sample) / width_km).exp();
    let terms = image.samples.iter().map(term);
    let mean = if image.weights.is_empty() {
        terms.sum::<f64>() / image.samples.len().max(1) as f64
    } else {
        terms.zip(&image.weights).map(|(term, weight)| term * weight).sum::<f64>() / image.weights.iter().sum::<f64>()
    };
    (DENSITY_MIN + mean).ln()
}

/// How close each point is to each other point, row by row.
fn closeness_matrix(vectors: &[UnitVector], table: &ClosenessTable) -> Vec<f32> {
    let count = vectors.len();
    let mut closeness = vec![table.at(0.0); count * count];
    for (one, here) in vectors.iter().enumerate() {
        for (other, there) in vectors.iter().enumerate().skip(one + 1) {
            let close = table.at(chord2(*here, *there) as f32);
            (closeness[one * count + other], closeness[other * count + one]) = (close, close);
        }
    }
    closeness
}

/// Σ_w exp(-d / w) over the widths of a round, as a function of the squared chord, by linear interpolation. A photo can
/// have more than a million pairs of voters, and the table is ten times as fast as exponentials.
struct ClosenessTable(Vec<f32>);

impl ClosenessTable {
    /// The smallest squared chord in the table, 2⁻⁴⁰, belongs to a distance of 6 m.
    const FIRST: f32 = 9.094_947e-13;
    /// Number of low bits of an f32 between two entries: each power of two has 256 entries.
    const STEP_BITS: u32 = 15;

    fn of_regions() -> &'static Self {
        static TABLE: OnceLock<ClosenessTable> = OnceLock::new();
        TABLE.get_or_init(|| Self::new(&REGION_KM))
    }

    fn of_places() -> &'static Self {
        static TABLE: OnceLock<ClosenessTable> = OnceLock::new();
        TABLE.get_or_init(|| Self::new(&PLACE_KM))
    }

    fn new(widths_km: &[f64]) -> Self {
        let last = (4.1_f32.to_bits() - Self::FIRST.to_bits()) >> Self::STEP_BITS;
        let entry = |index: u32| {
            let square = f64::from(f32::from_bits(Self::FIRST.to_bits() + (index << Self::STEP_BITS)));
            let half = (0.5 * square.sqrt()).min(1.0);
            closeness(2.0 * EARTH_RADIUS_KM * half.asin(), widths_km) as f32
        };
        Self((0..=last + 1).map(entry).collect())
    }

    /// The closeness of two points whose chord has the squared length `square`, in squared Earth radii.
    fn at(&self, square: f32) -> f32 {
        let bits = square.clamp(Self::FIRST, 4.0).to_bits() - Self::FIRST.to_bits();
        let (index, rest) = ((bits >> Self::STEP_BITS) as usize, bits & ((1 << Self::STEP_BITS) - 1));
        let part = rest as f32 / (1_u32 << Self::STEP_BITS) as f32;
        self.0[index] + part * (self.0[index + 1] - self.0[index])
    }
}

fn closeness(distance_km: f64, widths_km: &[f64]) -> f64 {
    widths_km.iter().map(|width_km| (-distance_km / width_km).exp()).sum()
}

#[cfg(test)]
mod tests {
    use locdiff_core::config::Prior;
    use locdiff_core::geo::{Degrees, Km, SphereIndex, fibonacci_grid};

    use super::*;

    #[test]
    fn closeness_table_is_close_to_the_formula() {
        for (table, widths_km) in
            [(ClosenessTable::of_regions(), &REGION_KM[..]), (ClosenessTable::of_places(), &PLACE_KM[..])]
        {
            for step in 0..4000 {
                let distance_km = 0.001 * (20_015_000.0_f64).powf(f64::from(step) / 4000.0);
                let square = (2.0 * (0.5 * distance_km / EARTH_RADIUS_KM).sin()).powi(2);
                let (got, want) = (f64::from(table.at(square as f32)), closeness(distance_km, widths_km));
                assert!(
                    (got - want).abs() < 0.01 || (distance_km > 0.01 && (got - want).abs() < 2e-5),
                    "{distance_km} km: {got}, wanted {want}"
                );
            }
        }
    }

    /// The density of an exactly known place is 1 at this place at every width, and wider kernels reach farther.
    #[test]
    fn smoothed_density_is_one_at_a_known_place() {
        let (degree, place) = (23, fibonacci_grid(50)[17]);
        let basis = Basis::new(degree).expect("the degree is valid");
        let expected = basis.encode_f64(&[place]).iter().map(|value| *value as f32).collect();
        let image = ImageSamples { aggregate: place, samples: vec![place], weights: Vec::new(), expected };
        let far = place.displace(Degrees(40.0), Km(1000.0)).expect("the displacement is finite");
        let mut last = f64::NEG_INFINITY;
        for level in 0..SMOOTHED_KM.len() {
            let found = log_densities(&image, &[place, far], &[level, level]);
            assert!(found[0].abs() < 1e-5, "level {level}: {found:?}");
            if level > 1 {
                assert!(found[1] > last, "level {level}: {found:?}, wanted more than {last}");
            }
            last = found[1];
        }
    }

    /// Settings that share a first round but differ in the radius have second rounds of their own.
    #[test]
    fn settings_with_different_radii_do_not_share_a_second_round() {
        let points = fibonacci_grid(2000);
        let best: Vec<(u32, f32)> = (0..300).map(|id| (id, (id * 37 % 101) as f32 / 10.0)).collect();
        let pool = Pool::new((&points, &Surroundings::default()), &best, &[], None);
        let settings = [100.0, 5000.0].map(|radius_km| Hybrid::without_locdiff(radius_km, 0.1, 8.0));
        let alone = settings.map(|setting| pool.answers(&[setting])[0]);
        assert_ne!(alone[0], alone[1]);
        assert_eq!(pool.answers(&settings), alone);
    }

    /// In both rounds, a single very similar point wins against many that are less similar if the prior is even and no
    /// training photo is near it. The vote without LocDiff does not depend on training photos.
    #[test]
    fn similarities_count_more_where_locdiff_does_not_know_the_area() {
        let (alone, many) = (fibonacci_grid(3)[0], fibonacci_grid(3)[2]);
        let around = |index: u32| many.displace(Degrees(f64::from(index) * 9.0), Km(120.0)).expect("it is finite");
        let points: Vec<UnitVector> = std::iter::once(alone).chain((0..40).map(around)).collect();
        let image = ImageSamples { aggregate: many, samples: vec![many], weights: Vec::new(), expected: vec![1.0] };
        let index = SphereIndex::new(points.clone());
        let wins = |prior: Prior, training_km: Option<f32>, highest: f32, setting: (f64, f64, f64)| {
            let best: Vec<(u32, f32)> = (0..41).map(|id| (id, if id == 0 { highest } else { 10.0 })).collect();
            let training_km = training_km.map(|km| vec![km; points.len()]);
            let surroundings = Surroundings::new(&index, prior, training_km.as_deref(), 1);
            let pool = Pool::new((&points, &surroundings), &best, &[], Some(&image));
            let (radius_km, scale, fine_scale) = setting;
            let without = Hybrid::without_locdiff(radius_km, scale, fine_scale);
            let answers = pool.answers(&[Hybrid { density_weight: 1.0, ..without }, without]);
            answers.into_iter().map(|answer| answer == Some(0)).collect::<Vec<bool>>()
        };
        // Only points near the winner of the first round take part in the second.
        let first = (150.0, 0.5, 2.0);
        assert_eq!(wins(Prior::Even, Some(2.5), 11.0, first), [true, false]);
        assert_eq!(wins(Prior::Even, Some(1.5), 11.0, first), [false, false]);
        assert_eq!(wins(Prior::Even, None, 11.0, first), [false, false]);
        assert_eq!(wins(Prior::Training, Some(2.5), 12.0, first), [false, false]);
        // All points take part in the second round.
        let second = (20_000.0, 0.5, 0.5);
        assert_eq!(wins(Prior::Even, Some(2.5), 11.5, second), [true, false]);
        assert_eq!(wins(Prior::Even, Some(1.5), 11.5, second), [false, false]);
        // With and without LocDiff, the first round has the same voters and the same winner, but the second differs.
        assert_eq!(wins(Prior::Even, Some(2.5), 11.5, (20_000.0, 1.0, 0.5)), [true, false]);
    }

    /// A crowd wins against the most similar point only if this point is not ahead by the margin.
    #[test]
    fn most_similar_point_wins_if_it_is_ahead_by_the_margin() {
        let lone = fibonacci_grid(2)[0];
        let mut points = vec![lone];
        points.extend((0..20).map(|at| {
            lone.antipode().displace(Degrees(18.0 * f64::from(at)), Km(5.0)).expect("the distance is finite")
        }));
        let best: Vec<(u32, f32)> = (0..21).map(|id| (id, if id == 0 { 11.0 } else { 10.0 })).collect();
        let with = |top_margin| Hybrid { top_margin, ..Hybrid::without_locdiff(100.0, 1.0, 1.0) };
        let is_lone = |surroundings: &Surroundings, margins: &[f64]| {
            let settings: Vec<Hybrid> = margins.iter().map(|margin| with(*margin)).collect();
            let answers = Pool::new((&points, surroundings), &best, &[], None).answers(&settings);
            answers.into_iter().map(|answer| answer == Some(0)).collect::<Vec<bool>>()
        };
        let plain = Surroundings::default();
        assert_eq!(is_lone(&plain, &[0.0, 0.9, 1.1]), [false, true, false]);
        assert_eq!(is_lone(&plain, &[0.9]), [true]);
        // The user's prior counts like the logit.
        let log_prior = (0..21).map(|at| if at == 0 { -0.5 } else { 0.0 }).collect();
        assert_eq!(is_lone(&plain.with_log_prior(log_prior), &[0.4, 0.6]), [true, false]);
    }

    /// Scores that are too large for a number leave an answer: the most similar point.
    #[test]
    fn infinite_scores_leave_the_most_similar_point() {
        let points = fibonacci_grid(50);
        let pool = Pool::new((&points, &Surroundings::default()), &[(3, 20.0), (7, 1.0)], &[], None);
        let settings = [(1e308, 1.0), (1.0, 1e308), (1e308, 1e308)]
            .map(|(scale, fine_scale)| Hybrid::without_locdiff(100.0, scale, fine_scale));
        assert_eq!(pool.answers(&settings), [Some(3); 3]);
    }
}
