//! Tests of LocDiff-H: the answers of every mode follow the definition of the mode, and tuning chooses the right
//! setting.

use locdiff::retrieval::{Grid, ImageSamples};
use locdiff::shdd::uniform_points;
use locdiff_core::config::HybridMode;
use locdiff_core::geo::{Degrees, Km, SphereIndex, UnitVector};
use locdiff_core::protocol::TuningErrors;
use locdiff_core::random::{Draw, Philox, Stream};
use locdiff_core::tuning::{CONSENSUS_SCALES, Hybrid, choose, fold_of};

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

fn images(count: usize) -> Vec<ImageSamples> {
    let all = crowd(7, 8 * count);
    all.chunks_exact(8).map(|samples| ImageSamples { aggregate: samples[0], samples: samples.to_vec() }).collect()
}

/// The answer computed directly from the definition, with great-circle distances to every gallery point.
fn answer_by_definition(setting: &Hybrid, image: &ImageSamples, points: &[UnitVector], logits: &[f32]) -> Option<u32> {
    let centres =
        if setting.mode == HybridMode::AnySample { &image.samples[..] } else { std::slice::from_ref(&image.aggregate) };
    let in_range = |point: &UnitVector| centres.iter().any(|centre| centre.distance(*point).0 <= setting.radius_km);
    let score = |at: usize| {
        let density: f64 =
            image.samples.iter().map(|sample| (-sample.distance(points[at]).0 / setting.density_km).exp()).sum();
        let fuses = matches!(setting.mode, HybridMode::Fusion | HybridMode::Consensus);
        let weight = if fuses { setting.density_weight } else { 0.0 };
        f64::from(logits[at]) + if weight > 0.0 { weight * density.ln() } else { 0.0 }
    };
    let scored: Vec<(usize, f64)> =
        (0..points.len()).filter(|at| in_range(&points[*at])).map(|at| (at, score(at))).collect();
    match setting.mode {
        HybridMode::Consensus => consensus_by_definition(points, scored),
        _ => largest(scored),
    }
}

/// The point with the most votes, computed directly from the definition. The 64 points with the highest scores take
/// part, except points whose score is more than 9 below the highest. Each point that takes part votes for all points
/// that take part, itself included. The weight of a vote is exp(score) · Σ exp(-distance / width). Here score is the
/// score of the voter, distance is the distance between the two points, and the sum is over four widths.
fn consensus_by_definition(points: &[UnitVector], mut scored: Vec<(usize, f64)>) -> Option<u32> {
    scored.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    scored.truncate(64);
    let highest = scored.first()?.1;
    scored.retain(|(_, score)| *score >= highest - 9.0);
    let votes = scored.iter().map(|(here, _)| {
        let vote = |(there, score): &(usize, f64)| {
            let distance = points[*here].distance(points[*there]).0;
            let widths = [1.0, 25.0, 200.0, 750.0].map(|width: f64| (-distance / width).exp());
            (score - highest).exp() * widths.iter().sum::<f64>()
        };
        (*here, scored.iter().map(vote).sum())
    });
    largest(votes.collect())
}

/// The first point with the largest score. Scores that differ by at most 1e-9 count as equal, because the program
/// computes distances from chords, which round differently from arcs.
fn largest(scored: Vec<(usize, f64)>) -> Option<u32> {
    let mut best: Option<(usize, f64)> = None;
    for (at, score) in scored {
        if best.is_none_or(|(_, most)| score > most + 1e-9) {
            best = Some((at, score));
        }
    }
    best.map(|(at, _)| at as u32)
}

fn some_settings() -> Grid {
    let mut settings = Vec::new();
    for radius_km in [0.0, 30.0, 100.0, 300.0] {
        for mode in [HybridMode::AnySample, HybridMode::Aggregate, HybridMode::Fusion, HybridMode::Consensus] {
            settings.push(Hybrid { mode, radius_km, density_weight: 2.0, density_km: 40.0 });
        }
        settings.push(Hybrid { mode: HybridMode::Fusion, radius_km, density_weight: 0.0, density_km: 40.0 });
    }
    Grid { settings }
}

#[test]
fn hybrid_answers_follow_the_definition() {
    let points = crowd(1, 1500);
    let index = SphereIndex::new(points.clone());
    let (mut fallbacks, mut fusions) = (0, 0);
    for (at, image) in images(60).iter().enumerate() {
        let logits: Vec<f32> =
            uniform(100 + at as u64, points.len()).iter().map(|value| (12.0 * value) as f32).collect();
        for setting in &some_settings().settings {
            let candidates = image.candidates(setting, &index);
            let theirs: Vec<f32> = candidates.iter().map(|point| logits[*point as usize]).collect();
            let answer = image.answer(setting, &points, &candidates, &theirs);
            let want = answer_by_definition(setting, image, &points, &logits);
            if setting.mode == HybridMode::Consensus {
                // Gallery points at the same place have equal votes up to rounding, so places are compared instead of
                // points.
                let spot = |point: Option<u32>| point.map(|point| points[point as usize]);
                assert_eq!(spot(answer), spot(want), "wrong answer for image {at} with {setting}");
            } else {
                assert_eq!(answer, want, "wrong answer for image {at} with {setting}");
            }
            fallbacks += u32::from(answer.is_none());
            let alone = Hybrid { mode: HybridMode::Aggregate, ..*setting };
            let without_fusion = || answer_by_definition(&alone, image, &points, &logits);
            fusions += u32::from(setting.mode == HybridMode::Fusion && answer != without_fusion());
        }
    }
    assert!(
        fallbacks > 50 && fusions > 20,
        "only {fallbacks} answers had no candidate, and fusion changed only {fusions} answers; wanted over 50 and 20"
    );
}

#[test]
fn hybrid_consensus_prefers_the_place_with_most_weight() {
    let here = uniform_points(2, 0, 0, 1).expect("the counters are in range")[0];
    let there = |bearing: f64, km: f64| here.displace(Degrees(bearing), Km(km)).expect("the displacement is finite");
    // The point with the largest logit is far from all others. Three points with slightly lower logits are within 2 km
    // of each other.
    let points = [there(0.0, 150.0), there(180.0, 100.0), there(180.0, 101.0), there(180.0, 102.0)];
    let image = ImageSamples { aggregate: here, samples: vec![here] };
    let setting = |mode| Hybrid { mode, radius_km: 200.0, density_weight: 0.0, density_km: 25.0 };
    let logits = [5.0, 4.8, 4.8, 4.8];
    let answer = |mode| image.answer(&setting(mode), &points, &[0, 1, 2, 3], &logits);
    assert_eq!(answer(HybridMode::Fusion), Some(0));
    assert_eq!(answer(HybridMode::Consensus), Some(2));
    assert_eq!(image.answer(&setting(HybridMode::Consensus), &points, &[], &[]), None);
}

#[test]
fn tuning_errors_equal_those_of_each_setting() {
    let points = crowd(1, 1500);
    let index = SphereIndex::new(points.clone());
    let truths = crowd(2, 60);
    for (at, (image, truth)) in images(60).iter().zip(&truths).enumerate() {
        let logits: Vec<f32> =
            uniform(200 + at as u64, points.len()).iter().map(|value| (12.0 * value) as f32).collect();
        let of = |candidates: &[u32]| candidates.iter().map(|point| logits[*point as usize]).collect::<Vec<f32>>();
        for grid in [some_settings(), Grid::default()] {
            let all = grid.candidates(&index, image);
            let errors = grid.errors_km(*truth, image, &points, &all, &of(&all));
            for (setting, error) in grid.settings.iter().zip(errors) {
                let candidates = image.candidates(setting, &index);
                let answer = image.answer(setting, &points, &candidates, &of(&candidates));
                let place = answer.map_or(image.aggregate, |point| points[point as usize]);
                assert_eq!(error, truth.distance(place).0 as f32, "wrong error for image {at} with {setting}");
            }
        }
    }
}

type TuneRow = (UnitVector, TuningErrors);

fn row(truth: UnitVector, own_km: f32, retrieval_km: f32, errors_km: &[f32]) -> TuneRow {
    let consensus_km = vec![retrieval_km; CONSENSUS_SCALES.len()];
    (truth, TuningErrors { own_km, retrieval_km, consensus_km, settings_km: errors_km.to_vec() })
}

fn two_settings() -> [Hybrid; 2] {
    let setting = |radius_km| Hybrid { mode: HybridMode::Aggregate, radius_km, density_weight: 0.0, density_km: 1.0 };
    [setting(10.0), setting(20.0)]
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
fn tuning_chooses_a_scale_and_compares_locdiff_h_with_consensus() {
    // With the fourth scale, retrieval with consensus is within 25 km for half of the photos. The first setting has the
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
    assert_eq!((choice.consensus_scale, choice.setting.radius_km), (CONSENSUS_SCALES[3], 20.0), "{choice:?}");
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
    let none = choose(&[], &[row(place, 1.0, 1.0, &[])], &THRESHOLDS, 5).expect_err("the input is invalid");
    assert!(none.to_string().contains("0 settings"), "{none}");
    let one =
        choose(&two_settings(), &[row(place, 1.0, 1.0, &[1.0, 1.0])], &THRESHOLDS, 5).expect("the rows are valid");
    assert_eq!(one.held_out_percent, None, "held-out rows were scored, although all rows are in one fold");
}
