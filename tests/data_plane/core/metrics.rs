//! Compares scores, confidence intervals, density and coverage with a naive computation or with a reference package.

use std::path::Path;
use std::time::Instant;

use locdiff::shdd::uniform_points;
use locdiff_core::geo::{UnitVector, fibonacci_grid, places};
use locdiff_core::metrics::{
    Bootstrap, NEAREST_K, PlaceGroups, Scores, THRESHOLDS_KM, compare, density_coverage, geo_score, score,
};
use locdiff_core::random::{Draw, Philox, Stream};
use tch::Tensor;

const FEW: Bootstrap = Bootstrap { seed: 11, resamples: 200 };

/// Random errors in km, from 10 m to about 12,000 km.
fn errors(seed: u64, rows: usize) -> Vec<f64> {
    let mut uniform = vec![0.0_f32; rows];
    let draw = Draw { stream: Stream::Test(1), step: 0, first_sample: 0, elements: rows };
    Philox::new(seed).fill_uniform(draw, &mut uniform).expect("the draw is in range");
    uniform.into_iter().map(|unit| 0.01 * (14.0 * f64::from(unit)).exp()).collect()
}

/// Groups of `rows` rows that take turns at `places` different places: row r is at place r modulo `places`.
fn turns(rows: usize, places: usize) -> PlaceGroups {
    PlaceGroups::of(&fibonacci_grid(places).into_iter().cycle().take(rows).collect::<Vec<_>>())
}

/// Groups in which every row has a place of its own.
fn apart(rows: usize) -> PlaceGroups {
    turns(rows, rows)
}

fn flatten(scores: &Scores) -> Vec<f64> {
    let others = [scores.median_km, scores.mean_km, scores.geo_score];
    let all = scores.within.iter().map(|within| within.percent).chain(others);
    all.flat_map(|interval| [interval.value, interval.lo, interval.hi]).collect()
}

fn mean(values: impl Iterator<Item = f64>, rows: usize) -> f64 {
    values.sum::<f64>() / rows as f64
}

/// The statistics of a list of errors, computed directly from their definitions.
fn naive_statistics(errors: &[f64]) -> Vec<f64> {
    let rows = errors.len();
    let mut sorted = errors.to_vec();
    sorted.sort_by(f64::total_cmp);
    let share = |km: f64| 100.0 * errors.iter().filter(|error| **error <= km).count() as f64 / rows as f64;
    let mut all: Vec<f64> = THRESHOLDS_KM.iter().map(|km| share(*km)).collect();
    all.push(0.5 * (sorted[(rows - 1) / 2] + sorted[rows / 2]));
    all.push(mean(errors.iter().copied(), rows));
    all.push(mean(errors.iter().map(|error| geo_score(*error)), rows));
    all
}

/// The value and the interval of each statistic, computed by drawing every resample explicitly. If `other` is given,
/// the values and intervals are those of the difference `one` - `other`, and each resample takes the same rows from
/// both lists. Row r belongs to place r modulo `places`, and a resample takes all rows of the places that it draws.
fn naive_intervals(one: &[f64], other: Option<&[f64]>, places: usize) -> Vec<f64> {
    let statistics = |pick: &dyn Fn(&[f64]) -> Vec<f64>| {
        let mut found = naive_statistics(&pick(one));
        if let Some(other) = other {
            found.iter_mut().zip(naive_statistics(&pick(other))).for_each(|(value, less)| *value -= less);
        }
        found
    };
    let resamples: Vec<Vec<f64>> = (0..u64::from(FEW.resamples))
        .map(|resample| {
            let mut drawn = vec![0; places];
            let draw = Draw { stream: Stream::Bootstrap, step: 0, first_sample: resample, elements: places };
            Philox::new(FEW.seed).fill_int(draw, places as u32, &mut drawn).expect("the draw is in range");
            let of_place = |errors: &[f64], place: i64| {
                errors.iter().skip(place as usize).step_by(places).copied().collect::<Vec<_>>()
            };
            statistics(&|errors: &[f64]| drawn.iter().flat_map(|place| of_place(errors, *place)).collect())
        })
        .collect();
    let quantile = |statistic: usize, part: f64| {
        let mut all: Vec<f64> = resamples.iter().map(|found| found[statistic]).collect();
        all.sort_by(f64::total_cmp);
        let place = part * (all.len() - 1) as f64;
        let (below, rest) = (place as usize, place.fract());
        all[below] * (1.0 - rest) + all[below + 1] * rest
    };
    let values = statistics(&|errors: &[f64]| errors.to_vec());
    let triple = |(statistic, value): (usize, &f64)| [*value, quantile(statistic, 0.025), quantile(statistic, 0.975)];
    values.iter().enumerate().flat_map(triple).collect()
}

#[test]
fn metrics_match_a_naive_bootstrap() {
    for (rows, places) in [(1, 1), (2, 2), (7, 7), (100, 100), (501, 501), (2, 1), (7, 5), (501, 40)] {
        let (one, other, groups) = (errors(1, rows), errors(2, rows), turns(rows, places));
        assert_eq!(groups.count(), places);
        let close = |got: Vec<f64>, want: Vec<f64>| {
            for (got, want) in got.iter().zip(&want) {
                // The two computations add the same numbers (501 at most) in different orders.
                assert!(
                    (got - want).abs() <= 1e-11 * (1.0 + want.abs()),
                    "{rows} rows, {places} places: got {got}, wanted {want}"
                );
            }
        };
        let alone = score(&one, &groups, &THRESHOLDS_KM, &FEW).expect("the errors are valid");
        close(flatten(&alone), naive_intervals(&one, None, places));
        let difference = compare(&one, &other, &groups, &THRESHOLDS_KM, &FEW).expect("the errors are valid");
        close(flatten(&difference), naive_intervals(&one, Some(&other), places));
    }
}

/// How many of 400 intervals contain the true value. Each trial has `places` places with `rows_per_place` rows each.
/// All rows of a place are located, or none, as with photos of one sight. The intervals treat the rows of each group in
/// `groups` as one place.
fn trials_covered(places: usize, rows_per_place: usize, groups: &PlaceGroups) -> u32 {
    let share = 0.3;
    let mut covered = 0;
    for trial in 0..400 {
        let mut uniform = vec![0.0_f32; places];
        let draw = Draw { stream: Stream::Test(2), step: 0, first_sample: trial, elements: places };
        Philox::new(1).fill_uniform(draw, &mut uniform).expect("the draw is in range");
        let errors: Vec<f64> = uniform.iter().map(|unit| if f64::from(*unit) < share { 0.5 } else { 5.0 }).collect();
        let errors: Vec<f64> = errors.iter().cycle().take(places * rows_per_place).copied().collect();
        let found = score(&errors, groups, &[1.0], &Bootstrap { seed: trial, resamples: 200 });
        let found = found.expect("the errors are valid").within[0].percent;
        covered += u32::from((found.lo..=found.hi).contains(&(100.0 * share)));
    }
    covered
}

#[test]
fn metrics_intervals_cover_the_true_value_in_95_percent_of_trials() {
    for (places, rows_per_place) in [(300, 1), (100, 3)] {
        let covered = trials_covered(places, rows_per_place, &turns(places * rows_per_place, places));
        // On average, 380 of the 400 intervals contain the true value. The standard deviation is 4.4.
        assert!((362..=396).contains(&covered), "{covered} of 400 intervals contain the true value, wanted 362 to 396");
    }
    // Rows of one place are not independent: if rows are resampled, far fewer intervals contain the true value.
    assert!(trials_covered(100, 3, &apart(300)) < 340, "intervals that resample rows are wide enough");
}

#[test]
fn metrics_paired_intervals_detect_small_differences() {
    let one = errors(3, 800);
    let other: Vec<f64> =
        one.iter().enumerate().map(|(row, km)| if row % 20 == 0 { km + 9000.0 } else { *km }).collect();
    let apart = apart(800);
    let same = compare(&one, &one, &apart, &THRESHOLDS_KM, &FEW).expect("the errors are valid");
    assert!(flatten(&same).iter().all(|value| *value == 0.0));
    let paired = compare(&one, &other, &apart, &THRESHOLDS_KM, &FEW).expect("the errors are valid").within[2].percent;
    assert!(paired.lo > 0.0, "the paired interval contains 0: {paired:?}");
    let [alone, worse] = [&one, &other]
        .map(|km| score(km, &apart, &THRESHOLDS_KM, &FEW).expect("the errors are valid").within[2].percent);
    assert!(alone.lo < worse.hi, "the separate intervals do not overlap: {alone:?} {worse:?}");
}

#[test]
fn metrics_refuse_invalid_distances() {
    let refused =
        |km: &[f64]| score(km, &apart(km.len()), &THRESHOLDS_KM, &FEW).expect_err("the input is not valid").to_string();
    assert_eq!(refused(&[]), "0 answers, wanted at least 1");
    assert!(refused(&[1.0, f64::NAN]).contains("answer 1: error is NaN km"));
    assert!(refused(&[f64::INFINITY]).contains("answer 0"));
    assert!(refused(&[-1.0]).contains("-1 km"));
    let text = score(&[1.0], &apart(1), &[f64::NAN], &FEW).expect_err("the input is not valid").to_string();
    assert_eq!(text, "threshold is NaN km, wanted a finite number of at least 0");
    let text = compare(&[1.0], &[1.0, 2.0], &apart(1), &[], &FEW).expect_err("the input is not valid").to_string();
    assert_eq!(text, "1 answers compared with 2, wanted the same rows in both");
    let text = score(&[1.0, 2.0], &apart(1), &[], &FEW).expect_err("the input is not valid").to_string();
    assert_eq!(text, "2 answers for 1 true places, wanted equal numbers");
}

#[test]
fn metrics_have_names_with_units() {
    let fields = serde_json::to_value(score(&[0.5, 30.0], &apart(2), &[1.0, 2.5], &FEW).expect("the errors are valid"))
        .expect("the value can be written as JSON");
    let names: Vec<&str> =
        fields.as_object().expect("the scores are a JSON object").keys().map(String::as_str).collect();
    for name in ["acc_1km", "acc_1km_lo", "acc_1km_hi", "acc_2.5km", "median_km", "mean_km_hi", "geo_score"] {
        assert!(names.contains(&name), "the field {name} is missing in {names:?}");
    }
    assert_eq!(fields["acc_1km"], 50.0);
}

fn golden(name: &str) -> Tensor {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/prdc.safetensors");
    let tensors = Tensor::read_safetensors(path).expect("the file can be read");
    tensors.into_iter().find(|(own, _)| own == name).expect("the file has this tensor").1
}

fn points(name: &str) -> Vec<UnitVector> {
    let column =
        |index| Vec::<f64>::try_from(golden(name).select(1, index).contiguous()).expect("the tensor holds f64 numbers");
    places(&column(0), &column(1)).expect("the coordinates are valid").into_iter().map(UnitVector::from).collect()
}

#[test]
fn density_and_coverage_match_the_authors_package() {
    for name in ["uniform", "near", "repeated"] {
        let found =
            density_coverage(&points(&format!("{name}.truth")), &points(&format!("{name}.predicted")), NEAREST_K);
        let found = found.expect("there are enough points");
        let want = Vec::<f64>::try_from(golden(&format!("{name}.result"))).expect("the tensor holds f64 numbers");
        println!("{name}: got {found:?}, wanted {want:?}");
        assert!((found.density - want[0]).abs() <= 1e-9, "{name}: got {found:?}, wanted density and coverage {want:?}");
        assert!(
            (found.coverage - want[1]).abs() <= 1e-9,
            "{name}: got {found:?}, wanted density and coverage {want:?}"
        );
        // Perfect predictions cover every place that can be covered.
        let truth = points(&format!("{name}.truth"));
        let perfect = density_coverage(&truth, &truth, NEAREST_K).expect("there are enough points");
        assert_eq!((perfect.coverage, found.ceiling), (perfect.ceiling, perfect.ceiling), "{name}");
        assert_eq!(found.ceiling < 1.0, name == "repeated", "{name}: the ceiling is {}", found.ceiling);
    }
}

#[test]
fn density_and_coverage_need_no_distance_matrix() {
    let truth = uniform_points(1, 0, 0, 30_000).expect("the draw is in range");
    let predicted = uniform_points(1, 1, 0, 30_000).expect("the draw is in range");
    let (start, before) = (Instant::now(), crate::resident_bytes());
    let found = density_coverage(&truth, &predicted, NEAREST_K).expect("there are enough points");
    println!("30,000 points: {:.2} s, {found:?}", start.elapsed().as_secs_f64());
    // For independent uniform points the expected density is 1, and the expected coverage with k = 3 is 1 - 2^-3.
    assert!(
        (found.density - 1.0).abs() < 0.02 && (found.coverage - 0.875).abs() < 0.01,
        "got {found:?}, wanted density 1 and coverage 0.875"
    );
    assert!(crate::resident_bytes().saturating_sub(before) < 100 << 20, "memory grew by 100 MiB or more");
    assert!(density_coverage(&truth[..3], &predicted, NEAREST_K).is_err());
    assert!(density_coverage(&truth, &[], NEAREST_K).is_err());
    assert!(density_coverage(&truth, &predicted, 0).is_err());
}
