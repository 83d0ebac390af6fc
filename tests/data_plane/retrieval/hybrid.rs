//! Tests of LocDiff-H: the answers of every mode follow the definition of the mode, and tuning chooses the right
//! setting.

use locdiff::retrieval::{
    Gallery, ImageSamples, QueryHead, Retriever, Surroundings, Voters, locate, locate_alone, try_settings,
};
use locdiff::shdd::{Basis, uniform_points};
use locdiff_core::config::{HybridMode, Prior};
use locdiff_core::geo::{Degrees, Km, UnitVector};
use locdiff_core::protocol::TuningErrors;
use locdiff_core::random::{Draw, Philox, Stream};
use locdiff_core::tuning::{Hybrid, Trials, choose, fold_of};
use tch::{Device, Tensor};

use super::normals;

const THRESHOLDS: [f64; 3] = [25.0, 200.0, 2500.0];

fn uniform(step: u64, count: usize) -> Vec<f64> {
    let mut values = vec![0.0_f32; count];
    let draw = Draw { stream: Stream::Test(4), step, first_sample: 0, elements: count };
    Philox::new(3).fill_uniform(draw, &mut values).expect("the counters are in range");
    values.into_iter().map(f64::from).collect()
}

/// Random places within 500 km of one of six towns. About 3 % lie exactly on a town, so some places are equal.
fn crowd(step: u64, count: usize) -> Vec<UnitVector> {
    let towns = uniform_points(2, 0, 0, 6).expect("the counters are in range");
    let numbers = uniform(step, 3 * count);
    let place = |three: &[f64]| {
        let town = towns[(6.0 * three[0]) as usize];
        town.displace(Degrees(360.0 * three[1]), Km((500.0 * three[2] * three[2]).round()))
            .expect("the displacement is finite")
    };
    numbers.chunks_exact(3).map(place).collect()
}

/// Degree of the predicted codes.
const DEGREE: u32 = 6;

fn images(count: usize) -> Vec<ImageSamples> {
    let basis = Basis::new(DEGREE).expect("the degree is valid");
    let image = |samples: &[UnitVector]| {
        let codes = basis.encode_f64(samples);
        let mean = |at: usize| (codes.iter().skip(at).step_by(basis.dims()).sum::<f64>() / 8.0) as f32;
        ImageSamples {
            aggregate: samples[0],
            samples: samples.to_vec(),
            weights: Vec::new(),
            expected: (0..basis.dims()).map(mean).collect(),
        }
    };
    crowd(7, 8 * count).chunks_exact(8).map(image).collect()
}

/// A gallery of places around six towns, photos, and their logits at every gallery point.
struct Scene {
    gallery: Gallery,
    queries: Tensor,
    images: Vec<ImageSamples>,
    logits: Vec<Vec<f32>>,
    /// Distance from each gallery point to the nearest training photo, km.
    training_km: Vec<f32>,
}

impl Scene {
    fn new() -> Self {
        let (points, count) = (crowd(1, 700), 40);
        let embeddings = normals(11, &[points.len() as i64, 24]);
        let gallery = Gallery::of_embeddings("test".into(), points, embeddings).expect("the gallery is valid");
        let queries = QueryHead::knn(8.0, Device::Cpu).queries(&normals(12, &[count as i64, 1, 24]));
        let queries = queries.expect("the embeddings are valid");
        let everything: Vec<Vec<u32>> = vec![(0..700).collect(); count];
        let retriever = Retriever::new(&gallery, Device::Cpu, 1).expect("the gallery fits in memory");
        let scored = retriever.score(&queries, &everything, 1, None).expect("the inputs are valid");
        let training_km = uniform(31, 700).iter().map(|value| (60.0 * value * value) as f32).collect();
        Self {
            queries,
            images: images(count),
            logits: scored.into_iter().map(|one| one.logits).collect(),
            training_km,
            gallery,
        }
    }

    fn surroundings(&self, prior: Prior) -> Surroundings {
        Surroundings::new(self.gallery.index(), prior, Some(&self.training_km), 1)
    }
}

/// The definition of the vote, computed directly. Returns whether `answer` may win under `setting`: rounding may decide
/// between points whose votes differ by less than a thousandth.
fn may_win(scene: &Scene, image: usize, setting: &Hybrid, prior: Prior, top: usize, answer: UnitVector) -> bool {
    let (points, logits, locdiff) = (scene.gallery.points(), &scene.logits[image], &scene.images[image]);
    let km = |one: usize, other: usize| points[one].distance(points[other]).0;
    let mut similar: Vec<usize> = (0..points.len()).collect();
    similar.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    similar.truncate(top);
    let uses_locdiff = [setting.density_weight, setting.samples_weight, setting.fine_samples_weight] != [0.0; 3];
    let is_near = |at: &usize| uses_locdiff && locdiff.aggregate.distance(points[*at]).0 <= setting.radius_km;
    let near: Vec<usize> = (0..points.len()).filter(is_near).filter(|at| !similar.contains(at)).collect();
    let voters = [similar, near].concat();
    let is_unknown = uses_locdiff && prior == Prior::Even && scene.training_km[voters[0]] > 2.0;
    let (scale_factor, fine_factor) = if is_unknown { (4.0, 2.0) } else { (1.0, 1.0) };
    let reach_km = |at: usize| f64::from(15.0 * scene.training_km[at]);
    let samples = |at: usize, width_km: f64| {
        let near = |sample: &UnitVector| (-sample.distance(points[at]).0 / width_km).exp();
        (0.002 + locdiff.samples.iter().map(near).sum::<f64>() / 8.0).ln()
    };
    let log_factor = |at: usize, within_km: f64| {
        let count = (0..points.len()).filter(|other| km(at, *other) < within_km).count();
        if prior == Prior::Even { -(count as f64).ln() } else { 0.0 }
    };
    let predicted = |at: usize| smoothed_density(locdiff, points[at], reach_km(at)).max(0.002).ln();
    let first = |at: usize| {
        let of_samples = samples(at, smoothing_km(reach_km(at)).max(250.0));
        let similarity = scale_factor * setting.scale * f64::from(logits[at]) + log_factor(at, 100.0);
        similarity + setting.density_weight * predicted(at) + setting.samples_weight * of_samples
    };
    let second = |at: usize| {
        let of_samples = setting.fine_samples_weight * samples(at, setting.density_km);
        fine_factor * setting.fine_scale * f64::from(logits[at]) + of_samples + log_factor(at, 25.0)
    };
    let in_region = |one, other| [200.0, 750.0].map(|width| (-km(one, other) / width).exp()).iter().sum();
    let top_ahead = |winner: usize| {
        let score = |at: usize| f64::from(logits[at]) + predicted(at);
        setting.top_margin > 0.0 && score(voters[0]) - score(winner) >= setting.top_margin
    };
    winners(&voters, votes_of(&voters, first), in_region).iter().any(|centre| {
        let is_near = |at: &usize| km(*centre, *at) <= setting.radius_km;
        let near: Vec<usize> = voters.iter().copied().filter(is_near).collect();
        let closeness = |one, other| [1.0, 25.0, 200.0].map(|width| (-km(one, other) / width).exp()).iter().sum();
        winners(&near, votes_of(&near, second), closeness)
            .iter()
            .any(|winner| points[if top_ahead(*winner) { voters[0] } else { *winner }] == answer)
    })
}

/// The largest of four widths that is at most `reach_km`.
fn smoothing_km(reach_km: f64) -> f64 {
    [0.0, 150.0, 300.0, 600.0].into_iter().filter(|width| *width <= reach_km).fold(0.0, f64::max)
}

/// The density that LocDiff predicts at `point`, smoothed over `smoothing_km(reach_km)`.
/// The kernel of the smoothing is 1 at its maximum.
fn smoothed_density(image: &ImageSamples, point: UnitVector, reach_km: f64) -> f64 {
    let width = smoothing_km(reach_km) / 6371.0088;
    let values = Basis::new(DEGREE).expect("the degree is valid").encode_f64(&[point]);
    let (mut sum, mut at_maximum, mut index) = (0.0, 0.0, 0);
    for l in 0..=DEGREE {
        let factor = (-f64::from(l * (l + 1)) * width * width / 2.0).exp();
        at_maximum += f64::from(2 * l + 1) / (4.0 * std::f64::consts::PI) * factor;
        for _ in 0..=2 * l {
            sum += factor * values[index] * f64::from(image.expected[index]);
            index += 1;
        }
    }
    sum / at_maximum
}

/// The weight of each voter, in a sum of 1. A voter whose weight is less than e⁻⁹ of the largest weight does not take
/// part.
fn votes_of(voters: &[usize], score: impl Fn(usize) -> f64) -> Vec<f64> {
    let scores: Vec<f64> = voters.iter().map(|at| score(*at)).collect();
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weight = |score: &f64| if *score >= highest - 9.0 { (score - highest).exp() } else { 0.0 };
    let sum: f64 = scores.iter().map(weight).sum();
    scores.iter().map(|score| weight(score) / sum).collect()
}

/// The voters that may win a round.
fn winners(voters: &[usize], weights: Vec<f64>, closeness: impl Fn(usize, usize) -> f64) -> Vec<usize> {
    let taking_part: Vec<(usize, f64)> =
        voters.iter().copied().zip(weights).filter(|(_, weight)| *weight > 0.0).collect();
    let votes = |one: usize| taking_part.iter().map(|(other, weight)| weight * closeness(one, *other)).sum();
    let votes: Vec<(usize, f64)> = taking_part.iter().map(|(one, _)| (*one, votes(*one))).collect();
    let most = votes.iter().map(|(_, votes)| *votes).fold(0.0, f64::max);
    votes.into_iter().filter(|(_, votes)| *votes >= 0.999 * most).map(|(at, _)| at).collect()
}

fn some_settings() -> Vec<Hybrid> {
    let alone = Hybrid::without_locdiff(150.0, 0.7, 2.0);
    vec![
        alone,
        Hybrid { scale: 2.0, fine_scale: 1.0, radius_km: 40.0, ..alone },
        Hybrid { density_weight: 1.0, ..alone },
        Hybrid { samples_weight: 3.0, ..alone },
        Hybrid { density_weight: 1.0, top_margin: 0.4, ..alone },
        Hybrid { density_weight: 4.0, fine_samples_weight: 2.0, density_km: 60.0, ..alone },
        Hybrid { scale: 0.2, fine_samples_weight: 4.0, radius_km: 300.0, ..alone },
    ]
}

const TOP: usize = 120;

fn voters(consensus: Hybrid) -> Voters {
    Voters { neighbours: 1, points: TOP, consensus }
}

#[test]
fn vote_follows_the_definition() {
    let scene = Scene::new();
    let retriever = Retriever::new(&scene.gallery, Device::Cpu, 2).expect("the gallery fits in memory");
    let (mut moved, mut by_prior) = (0, 0);
    let mut answers_before: Option<Vec<UnitVector>> = None;
    for prior in [Prior::Training, Prior::Even] {
        let surroundings = scene.surroundings(prior);
        let gallery = (&retriever, &surroundings);
        let mut all = Vec::new();
        for setting in some_settings() {
            let alone = Hybrid::without_locdiff(setting.radius_km, setting.scale, setting.fine_scale);
            let found = locate(gallery, &scene.queries, &scene.images, &setting, voters(alone), None);
            let found = found.expect("the inputs are valid");
            let places = locate_alone(gallery, &scene.queries, voters(alone), None).expect("the inputs are valid");
            for (image, (found, places)) in found.iter().zip(places).enumerate() {
                let hybrid = found.hybrid.expect("a gallery point always wins");
                let is_right = may_win(&scene, image, &setting, prior, TOP, hybrid);
                assert!(is_right, "image {image}, {prior:?}, {setting}");
                let is_right = may_win(&scene, image, &alone, prior, TOP, found.consensus);
                assert!(is_right, "image {image}, {prior:?}, {alone}");
                assert_eq!(places.consensus, found.consensus, "retrieval with consensus depends on LocDiff");
                moved += u32::from(hybrid != found.consensus);
                all.push(found.consensus);
            }
        }
        let before = answers_before.replace(all.clone()).unwrap_or_else(|| all.clone());
        by_prior += before.iter().zip(&all).filter(|(one, other)| one != other).count();
    }
    assert!(
        moved > 50 && by_prior > 10,
        "LocDiff moved {moved} answers, and the prior moved {by_prior}; wanted over 50 and 10"
    );
}

#[test]
fn any_sample_chooses_the_most_similar_point_near_a_sample() {
    let scene = Scene::new();
    let retriever = Retriever::new(&scene.gallery, Device::Cpu, 2).expect("the gallery fits in memory");
    let (points, mut fallbacks) = (scene.gallery.points(), 0);
    for radius_km in [3.0, 30.0, 200.0] {
        let setting = Hybrid { mode: HybridMode::AnySample, radius_km, ..some_settings()[0] };
        let (surroundings, voters) = (Surroundings::default(), voters(some_settings()[0]));
        let found = locate((&retriever, &surroundings), &scene.queries, &scene.images, &setting, voters, None);
        for (image, found) in found.expect("the inputs are valid").iter().enumerate() {
            let is_near = |at: &usize| {
                scene.images[image].samples.iter().any(|sample| sample.distance(points[*at]).0 <= radius_km)
            };
            let logit = |at: &usize| scene.logits[image][*at];
            let want = (0..points.len()).filter(is_near).max_by(|a, b| logit(a).total_cmp(&logit(b)).then(b.cmp(a)));
            assert_eq!(found.hybrid, want.map(|at| points[at]), "image {image}, {radius_km} km");
            fallbacks += u32::from(want.is_none());
        }
    }
    assert!(fallbacks > 3, "only {fallbacks} photos had no point in range");
}

#[test]
fn tuning_errors_equal_those_of_each_setting() {
    let scene = Scene::new();
    let retriever = Retriever::new(&scene.gallery, Device::Cpu, 2).expect("the gallery fits in memory");
    let surroundings = scene.surroundings(Prior::Even);
    let (gallery, truths) = ((&retriever, &surroundings), crowd(2, scene.images.len()));
    let mut trials = Trials::default();
    // All settings of the default trials have the same radius.
    trials.hybrid = trials.hybrid.into_iter().step_by(7).collect();
    let errors =
        try_settings(gallery, &scene.queries, &scene.images, &truths, &trials, voters(trials.consensus[0]), None);
    let errors = errors.expect("the inputs are valid");
    for (at, (consensus, setting)) in trials.consensus.iter().cycle().zip(&trials.hybrid).enumerate() {
        let found = locate(gallery, &scene.queries, &scene.images, setting, voters(*consensus), None);
        let own = scene.images.iter().map(|image| image.aggregate);
        let found = found.expect("the inputs are valid").into_iter().zip(own);
        for (((found, own), truth), errors) in found.zip(&truths).zip(&errors) {
            let km = |place: UnitVector| truth.distance(place).0 as f32;
            assert_eq!(errors.settings_km[at], km(found.hybrid_or(own)), "{setting}");
            assert_eq!(errors.consensus_km[at % trials.consensus.len()], km(found.consensus), "{consensus}");
        }
    }
}

#[test]
fn region_with_the_most_weight_wins_the_first_round() {
    let here = uniform_points(2, 0, 0, 1).expect("the counters are in range")[0];
    let there = |bearing: f64, km: f64| here.displace(Degrees(bearing), Km(km)).expect("the displacement is finite");
    // The point with the largest logit is far from all others. Three points with slightly lower logits are within 2 km
    // of each other.
    let points = vec![there(0.0, 5000.0), there(180.0, 100.0), there(180.0, 101.0), there(180.0, 102.0)];
    let logits = [5.0, 4.8, 4.8, 4.8];
    let best: Vec<(u32, f32)> = (0..).zip(logits).collect();
    assert_eq!(locdiff::retrieval::knn_place(&points, &best), Some(2));
    assert_eq!(locdiff::retrieval::knn_place(&points, &best[..1]), Some(0));
}

type TuneRow = (UnitVector, TuningErrors);

fn row(truth: UnitVector, own_km: f32, retrieval_km: f32, errors_km: &[f32]) -> TuneRow {
    let consensus_km = vec![retrieval_km; two_settings().consensus.len()];
    (truth, TuningErrors { own_km, retrieval_km, consensus_km, settings_km: errors_km.to_vec() })
}

/// Two settings of LocDiff-H, which differ in their radius, and four settings of retrieval with consensus.
fn two_settings() -> Trials {
    let setting = |radius_km| Hybrid::without_locdiff(radius_km, 1.0, 1.0);
    Trials { consensus: [1.0, 2.0, 3.0, 4.0].map(setting).to_vec(), hybrid: vec![setting(10.0), setting(20.0)] }
}

#[test]
fn tuning_does_not_trade_one_scale_for_another() {
    // LocDiff's own answers are all within 200 km of the truth. Retrieval is within 25 km for a sixth of the photos.
    // The first setting is within 25 km for a third of the photos, but beyond 200 km for 4 %. The second setting is
    // within 25 km for a sixth and always within 200 km.
    let places = uniform_points(4, 0, 0, 1200).expect("the counters are in range");
    let rows: Vec<TuneRow> = places
        .iter()
        .enumerate()
        .map(|(at, place)| {
            let [all, half] = [3, 6].map(|one_in| if at % one_in == 0 { 1.0 } else { 100.0 });
            let greedy = if at % 25 == 1 { 400.0 } else { all };
            row(*place, 100.0, if at % 6 == 0 { 1.0 } else { 9000.0 }, &[greedy, half])
        })
        .collect();
    let choice = choose(&two_settings(), &rows, &[25.0, 200.0, 2500.0], 5).expect("the rows are valid");
    assert_eq!(choice.setting.radius_km, 20.0, "{choice:?}");
    let near = |percents: &[f64], want: [f64; 3]| percents.iter().zip(want).all(|(got, want)| (got - want).abs() < 0.1);
    assert!(near(&choice.own_percent, [0.0, 100.0, 100.0]), "{choice:?}");
    assert!(near(&choice.retrieval_percent, [100.0 / 6.0; 3]), "{choice:?}");
    assert!(near(&choice.hybrid_percent, [100.0 / 6.0, 100.0, 100.0]), "{choice:?}");
    assert!(choice.held_out_percent.is_some_and(|percents| near(&percents, [100.0 / 6.0, 100.0, 100.0])));
    assert_eq!((choice.rows, choice.folds), (1200, 5));
}

#[test]
fn fields_that_are_fixed_are_not_tried() {
    let all = Trials::default();
    let fields = [("fine_scale", 16.0), ("consensus_scale", 3.0)].map(|(name, value)| (name.to_owned(), value));
    let fixed = all.clone().fixed(&fields.into());
    assert!(fixed.hybrid.iter().all(|setting| setting.fine_scale == 16.0));
    assert!(fixed.consensus.iter().all(|setting| setting.scale == 3.0));
    assert_eq!((fixed.hybrid.len(), fixed.consensus.len()), (all.hybrid.len() / 3, all.consensus.len() / 5));
}

/// The first setting has the higher mean accuracy, but is only level with retrieval within 25 km. The second setting is
/// ahead of it at both distances.
#[test]
fn tuning_prefers_a_setting_that_is_ahead_at_every_distance() {
    let places = uniform_points(6, 0, 0, 1000).expect("the counters are in range");
    let rows: Vec<TuneRow> = places
        .iter()
        .enumerate()
        .map(|(at, place)| {
            let km = |near: usize, far: usize| {
                if at < near {
                    1.0
                } else if at < far {
                    100.0
                } else {
                    9000.0
                }
            };
            row(*place, 9000.0, km(500, 500), &[km(500, 540), km(504, 526)])
        })
        .collect();
    let choice = choose(&two_settings(), &rows, &[25.0, 200.0], 5).expect("the rows are valid");
    assert_eq!(choice.setting.radius_km, 20.0, "{choice:?}");
}

#[test]
fn tuning_chooses_a_consensus_and_compares_locdiff_h_with_it() {
    // With the fourth setting, retrieval with consensus is within 25 km for half of the photos. The first setting has the
    // higher mean accuracy, but only the second setting is as good as consensus within 25 km.
    let places = uniform_points(6, 0, 0, 1000).expect("the counters are in range");
    let rows: Vec<TuneRow> = places
        .iter()
        .enumerate()
        .map(|(at, place)| {
            let (half, most) = (if at % 2 == 0 { 1.0 } else { 9000.0 }, if at % 5 < 4 { 100.0 } else { 9000.0 });
            let (truth, mut errors) = row(*place, 9000.0, 9000.0, &[most, half]);
            errors.consensus_km[3] = half;
            (truth, errors)
        })
        .collect();
    let choice = choose(&two_settings(), &rows, &[25.0, 200.0, 2500.0], 5).expect("the rows are valid");
    assert_eq!((choice.consensus.radius_km, choice.setting.radius_km), (4.0, 20.0), "{choice:?}");
    assert_eq!(choice.consensus_percent, [50.0; 3]);
}

#[test]
fn tuning_folds_keep_neighbours_together_and_expose_overfitting() {
    // The first setting is right only in the cells of fold 0, the second setting only in the cells of fold 1. The
    // setting that is chosen on one fold is therefore wrong on the held-out fold.
    let places = uniform_points(4, 0, 0, 3000).expect("the counters are in range");
    let rows: Vec<TuneRow> = places
        .iter()
        .map(|place| {
            let first = if fold_of(*place, 2) == 0 { 1.0 } else { 500.0 };
            row(*place, 9000.0, 9000.0, &[first, 501.0 - first])
        })
        .collect();
    let choice = choose(&two_settings(), &rows, &THRESHOLDS, 2).expect("the rows are valid");
    let held_out = choice.held_out_percent.expect("there are two folds");
    assert!(choice.hybrid_percent[0] > 49.0 && held_out[0] == 0.0, "{:?} {held_out:?}", choice.hybrid_percent);
    let mut sizes = [0_u32; 5];
    places.iter().for_each(|place| sizes[fold_of(*place, 5) as usize] += 1);
    assert!(
        sizes.iter().all(|size| (400..=800).contains(size)),
        "the folds have {sizes:?} places, wanted 400 to 800 each"
    );
    let together = places.iter().filter(|place| {
        let neighbour = place.displace(Degrees(77.0), Km(5.0)).expect("the displacement is finite");
        fold_of(**place, 5) == fold_of(neighbour, 5)
    });
    // A cell is about 550 km wide, so a displacement of 5 km leads to another cell about once in 95 times.
    assert!(together.count() > 2900);
}

#[test]
fn tuning_refuses_invalid_rows_and_settings() {
    let place = UnitVector::NORTH_POLE;
    let refused = |rows: &[TuneRow], folds: u32| {
        choose(&two_settings(), rows, &THRESHOLDS, folds).expect_err("the input is invalid").to_string()
    };
    assert!(refused(&[], 5).contains("0 rows"));
    assert!(refused(&[row(place, 1.0, 1.0, &[1.0, 1.0])], 1).contains("1 folds"));
    assert!(refused(&[row(place, 1.0, 1.0, &[1.0])], 5).contains("row 0 has 1 errors, wanted one for each of 2"));
    assert!(refused(&[row(place, 1.0, f32::NAN, &[1.0, 1.0])], 5).contains("NaN"));
    let nothing = Trials { hybrid: Vec::new(), ..two_settings() };
    let none = choose(&nothing, &[row(place, 1.0, 1.0, &[])], &THRESHOLDS, 5).expect_err("the input is invalid");
    assert!(none.to_string().contains("4 and 0 settings"), "{none}");
    let one =
        choose(&two_settings(), &[row(place, 1.0, 1.0, &[1.0, 1.0])], &THRESHOLDS, 5).expect("the rows are valid");
    assert_eq!(one.held_out_percent, None, "held-out rows were scored, although all rows are in one fold");
}
