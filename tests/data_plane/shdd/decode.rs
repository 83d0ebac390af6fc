//! Tests of the decoder, which turns codes into places. The tests cover tiles of anchors, neighbourhood sums in log
//! space and refinement.

use std::time::Instant;

use locdiff::shdd::aggregate::mean_code;
use locdiff::shdd::decode::{Anchors, Budget, Coarse, Decoder, Neighbourhood, grid_points_min, refine};
use locdiff::shdd::{Basis, Filter, uniform_points};
use locdiff_core::geo::{Degrees, EARTH_RADIUS_KM, Place, UnitVector, fibonacci_grid};
use tch::{Device, Kind, Tensor};

fn place(latitude: f64, longitude: f64) -> UnitVector {
    Place::new(Degrees(latitude), Degrees(longitude)).expect("the coordinates are valid").into()
}

/// A square grid of `side`² points around `center`. Neighbouring points are `spacing_km` apart.
fn dense_gallery(center: UnitVector, side: i32, spacing_km: f64) -> Vec<UnitVector> {
    let axes = center.tangent_basis();
    let step = spacing_km / EARTH_RADIUS_KM;
    let offset = |index: i32| f64::from(index - side / 2) * step;
    let walked = |index: i32| {
        center.walk(axes.combine([offset(index / side), offset(index % side)])).expect("the step is finite")
    };
    (0..side * side).map(walked).collect()
}

/// A budget with small tiles that keeps no harmonics in memory, so that anchors are processed in several tiles.
const SMALL: Budget = Budget { kept_bytes_max: 0, tile_bytes: 4 << 20, scores_bytes: 4 << 20 };

/// The coarsest grid from which refinement must converge. Above degree 47, computing the harmonics of the whole grid
/// takes seconds, so the grid is thinned. All points within five resolutions (π / degree) of a target are kept. Farther
/// away, side lobes are below 2 % of the peak, and only every eighth point is kept.
fn grid(degree: u32, targets: &[UnitVector]) -> Vec<UnitVector> {
    let whole = fibonacci_grid(grid_points_min(degree));
    if degree <= 47 {
        return whole;
    }
    let near = 5.0 * std::f64::consts::PI / f64::from(degree);
    let kept = |(index, anchor): &(usize, UnitVector)| {
        index % 8 == 0 || targets.iter().any(|target| target.dot(*anchor) > near.cos())
    };
    whole.into_iter().enumerate().filter(kept).map(|(_, anchor)| anchor).collect()
}

fn decode_at(degree: u32, points: &[UnitVector]) -> f64 {
    let basis = Basis::new(degree).expect("the degree is at most 511");
    let codes_bc = basis.tensor(points, Device::Cpu).expect("the codes fit into memory");
    let budget = Budget::of(Device::Cpu);
    let anchors =
        Anchors::new(basis, grid(degree, points), Device::Cpu, Coarse::F32, budget).expect("there are anchors");
    let decoder = Decoder::new(anchors, 0.0, true).expect("the radius is valid");
    let found = decoder.decode(&codes_bc).expect("the codes are finite");
    let error_m = |(found, point): (&locdiff::shdd::decode::Decoded, &UnitVector)| {
        assert!(found.converged, "degree {degree}: the search for {point:?} did not converge");
        found.point.distance(*point).0 * 1000.0
    };
    let worst = found.iter().zip(points).map(error_m).fold(0.0, f64::max);
    println!("degree {degree}: {} points decoded within {worst:.2e} m", points.len());
    worst
}

#[test]
fn decode_undoes_encode_within_a_metre() {
    let mut points = vec![
        UnitVector::NORTH_POLE,
        UnitVector::SOUTH_POLE,
        place(0.0, 180.0),
        place(51.0, -179.999_999),
        place(-17.0, 179.999_999),
        place(89.999_99, 12.0),
    ];
    points.extend(uniform_points(3, 0, 0, 26).expect("the draw is in range"));
    for (degree, count) in [(15, 32), (23, 32), (47, 32), (95, 16), (127, 12)] {
        assert!(decode_at(degree, &points[..count]) < 1.0, "degree {degree}: a place is off by more than 1 m");
    }
}

#[test]
fn decode_in_tiles_equals_decode_at_once() {
    let basis = Basis::new(23).expect("the degree is at most 511");
    let points = fibonacci_grid(5000);
    let codes_bc = basis
        .tensor(&uniform_points(4, 0, 0, 300).expect("the draw is in range"), Device::Cpu)
        .expect("the codes fit into memory");
    let all = Budget { tile_bytes: 1 << 30, ..Budget::default() };
    let best = |budget| {
        let anchors =
            Anchors::new(basis.clone(), points.clone(), Device::Cpu, Coarse::F32, budget).expect("there are anchors");
        anchors.best(&codes_bc, 5).expect("the codes are finite")
    };
    let (tiled, whole) = (best(SMALL), best(all));
    for (one, other) in tiled.rows.iter().zip(&whole.rows) {
        for ((anchor, score), (same, close)) in one.iter().zip(other) {
            // The two computations may add the 576 products of a score in different orders.
            assert!(
                (score - close).abs() < 1e-3,
                "with tiles, anchor {anchor} has score {score}; without tiles, anchor {same} has score {close}"
            );
        }
        assert_eq!(one[0].0, other[0].0);
    }
}

/// libtorch does not define which of several equal scores is best. The decoder takes the anchors with the lowest
/// indices.
#[test]
fn decode_of_equal_scores_takes_the_first_anchors() {
    let basis = Basis::new(3).expect("the degree is at most 511");
    // The codes contain only the constant harmonic, so every anchor has exactly the same score.
    let codes_bc = Tensor::zeros([2, 16], (Kind::Float, Device::Cpu));
    let _ = codes_bc.narrow(1, 0, 1).fill_(1.0);
    for (coarse, tile_bytes) in [(Coarse::F32, 4 << 20), (Coarse::F32, 16 * 4 * 7), (Coarse::F16, 4 << 20)] {
        let budget = Budget { tile_bytes, ..SMALL };
        let anchors =
            Anchors::new(basis.clone(), fibonacci_grid(60), Device::Cpu, coarse, budget).expect("there are anchors");
        for count in [1, 5] {
            for row in anchors.best(&codes_bc, count).expect("the codes are finite").rows {
                let found: Vec<usize> = row.iter().map(|(anchor, _)| *anchor).collect();
                assert_eq!(
                    found,
                    (0..count).collect::<Vec<_>>(),
                    "{coarse:?}, tiles of {tile_bytes} bytes: the first anchors were not found"
                );
            }
        }
    }
}

/// The decoder of filtered codes gives the same answers as the decoder of whole codes that are 0 in the removed
/// dimensions.
#[test]
fn decode_of_filtered_codes_equals_decode_of_zero_filled_codes() {
    let basis = Basis::new(23).expect("the degree is at most 511");
    let training = dense_gallery(place(40.0, 10.0), 20, 250.0);
    let codes = basis.tensor(&training, Device::Cpu).expect("the codes fit into memory").to_kind(Kind::Double);
    let statistics = Vec::try_from(codes.var_dim([0_i64].as_slice(), false, false)).expect("the tensor holds numbers");
    let filter = Filter::choose(&statistics, 400).expect("the filter is valid");
    let filter = Filter::from_indices(&filter.indices(), filter.dims()).expect("the indices come from a filter");
    let decoder = |filter: Option<Filter>| {
        let points = fibonacci_grid(grid_points_min(23));
        let anchors = Anchors::filtered(basis.clone(), filter, points, Device::Cpu, Coarse::F32, SMALL);
        Decoder::new(anchors.expect("there are anchors"), 0.0, true).expect("the radius is valid")
    };
    let (whole, filtered) = (decoder(None), decoder(Some(filter.clone())));
    assert_eq!((whole.anchors().dims(), filtered.anchors().dims()), (576, 400));
    let truth: Vec<UnitVector> = training.iter().step_by(23).copied().collect();
    let codes_bc = basis.tensor(&truth, Device::Cpu).expect("the codes fit into memory");
    let kept_bc = filter.to_device(Device::Cpu).and_then(|kept| kept.apply(&codes_bc)).expect("the codes are whole");
    let found = filtered.decode(&kept_bc).expect("the codes are finite");
    let want = whole.decode(&filter.scatter(&kept_bc).expect("the codes are filtered")).expect("the codes are finite");
    for ((found, want), truth) in found.iter().zip(&want).zip(&truth) {
        assert_eq!((found.anchor, found.point, found.converged), (want.anchor, want.point, true));
        // The removed dimensions hardly vary over the training points. Without them, the answer moves by less than 200
        // km, much less than the resolution of 870 km.
        assert!(found.point.distance(*truth).0 < 200.0, "the place is off by {} km", found.point.distance(*truth).0);
    }
    let mean = mean_code(&kept_bc.unsqueeze(0), &filtered).expect("the codes are finite");
    assert!(mean[0].point.distance(place(40.0, 10.0)).0 < 2500.0);
    let error = filtered.decode(&codes_bc).expect_err("the codes are not filtered").to_string();
    assert!(error.ends_with("wanted [any, 400]"), "wrong error text: {error}");
    let other = Filter::from_indices(&[0, 3], 16).expect("the filter is valid");
    let wrong =
        Anchors::filtered(basis, Some(other), truth, Device::Cpu, Coarse::F32, SMALL).expect_err("the degrees differ");
    assert_eq!(wrong.to_string(), "decoder: the filter is for codes of 16 dimensions, wanted 576");
}

/// If scores are computed only from 16-bit factors, many clean codes are decoded more than a kilometre off: over 80 %
/// with bf16 and over 20 % with f16. If the 64 anchors with the best f16 scores are scored again in f32, the right
/// anchor is found for every code.
#[test]
fn decode_rescoring_finds_what_16_bits_miss() {
    let points = dense_gallery(place(48.86, 2.35), 61, 1.05);
    let basis = Basis::new(47).expect("the degree is at most 511");
    let truth: Vec<usize> = (0..points.len()).step_by(17).collect();
    let chosen: Vec<UnitVector> = truth.iter().map(|index| points[*index]).collect();
    // The second half of the codes is multiplied by 1e6, far outside the range of f16. The factor does not change the
    // order of scores.
    let codes_bc = basis.tensor(&chosen, Device::Cpu).expect("the codes fit into memory");
    let _ = codes_bc.narrow(0, 110, truth.len() as i64 - 110).g_mul_scalar_(1e6);
    let share = |found: &[usize]| {
        let far = |(found, truth): &(&usize, &usize)| points[**found].distance(points[**truth]).0 > 1.0;
        found.iter().zip(&truth).filter(far).count() as f64 / truth.len() as f64
    };
    // `alone` repeats the decoder's coarse pass without rescoring: codes are divided by their largest value, factors
    // are rounded to 16 bits, and sums are in f32.
    let basis_ac = basis.tensor(&points, Device::Cpu).expect("the codes fit into memory");
    let small_bc = &codes_bc / codes_bc.abs().amax([1_i64].as_slice(), true);
    let alone = |kind: Kind| {
        let narrow = |tensor: &Tensor| tensor.to_kind(kind).to_kind(Kind::Float);
        let scores_ba = narrow(&small_bc).matmul(&narrow(&basis_ac).tr());
        let best: Vec<i64> = Vec::try_from(scores_ba.argmax(1, false)).expect("the tensor holds numbers");
        let missed = share(&best.into_iter().map(|anchor| anchor as usize).collect::<Vec<_>>());
        let best: Vec<Vec<i64>> =
            Vec::try_from(scores_ba.topk(64, 1, true, false).1).expect("the tensor holds numbers");
        let lacks = |(best, truth): &(&Vec<i64>, &usize)| !best.contains(&(**truth as i64));
        let lacking = best.iter().zip(&truth).filter(lacks).count() as f64 / truth.len() as f64;
        println!("{kind:?}: {:.1} % are over 1 km off, {:.1} % not in the best 64", missed * 100.0, lacking * 100.0);
        (missed, lacking)
    };
    let (missed, lacking) = alone(Kind::BFloat16);
    assert!(missed > 0.8 && lacking < 0.03);
    assert!(alone(Kind::Half).0 > 0.2);
    for coarse in [Coarse::F16, Coarse::F32] {
        let anchors =
            Anchors::new(basis.clone(), points.clone(), Device::Cpu, coarse, SMALL).expect("there are anchors");
        let rows = anchors.best(&codes_bc, 1).expect("the codes are finite").rows;
        assert_eq!(
            share(&rows.iter().map(|row| row[0].0).collect::<Vec<_>>()),
            0.0,
            "{coarse:?}: some places are more than 1 km off"
        );
    }
}

#[test]
fn decode_names_the_row_that_is_not_finite() {
    let basis = Basis::new(3).expect("the degree is at most 511");
    let anchors = Anchors::grid(basis, 100, Device::Cpu).expect("there are anchors");
    let codes_bc = Tensor::zeros([4, 16], (Kind::Float, Device::Cpu));
    let _ = codes_bc.get(2).get(5).fill_(f64::NAN);
    let refused = |codes_bc: &Tensor| {
        let error = anchors.best(codes_bc, 1).expect_err("the code is not finite").to_string();
        assert!(
            error.starts_with("decoder: row 2: the code has a value that is NaN, infinite"),
            "wrong error text: {error}"
        );
    };
    refused(&codes_bc);
    // The values of this code are finite, but the scores overflow.
    let _ = codes_bc.get(2).fill_(3e38);
    refused(&codes_bc);
    let _ = codes_bc.get(2).fill_(1e36);
    assert!(
        anchors.best(&codes_bc, 1).expect("the codes are large but finite").rows.iter().all(|row| row[0].1.is_finite())
    );
    let wrong = anchors.best(&codes_bc.narrow(1, 0, 9), 1).expect_err("the degrees differ");
    assert_eq!(wrong.to_string(), "decoder: codes have shape [4, 9], wanted [any, 16]");
    let none = Anchors::new(Basis::new(3).expect("the degree is at most 511"), vec![], Device::Cpu, Coarse::F32, SMALL);
    assert_eq!(none.expect_err("there are no anchors").to_string(), "decoder: 0 anchors, wanted at least 1");
}

fn brute_force_log_sums(points: &[UnitVector], scores: &[f32], radius_km: f64) -> Vec<f64> {
    let around = |center: &UnitVector| {
        let near = points.iter().zip(scores).filter(|(point, _)| center.distance(**point).0 <= radius_km);
        let near: Vec<f64> = near.map(|(_, score)| f64::from(*score)).collect();
        let largest = near.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        near.iter().map(|score| (score - largest).exp()).sum::<f64>().ln() + largest
    };
    points.iter().map(around).collect()
}

#[test]
fn decode_neighbourhood_sums_equal_brute_force() {
    let mut points = fibonacci_grid(800);
    points.extend(dense_gallery(place(89.9, 30.0), 9, 40.0));
    points.extend(dense_gallery(place(0.0, 180.0), 9, 40.0));
    let basis = Basis::new(15).expect("the degree is at most 511");
    let anchors =
        Anchors::new(basis.clone(), points.clone(), Device::Cpu, Coarse::F32, SMALL).expect("there are anchors");
    for (target, radius_km) in [(place(89.9, 0.0), 90.0), (place(0.0, 179.9), 500.0), (place(10.0, 20.0), 25_000.0)] {
        let codes_bc = basis.tensor(&[target], Device::Cpu).expect("the codes fit into memory") * 9.0;
        let scores: Vec<f32> =
            anchors.scores(&codes_bc).expect("the codes are finite").view([-1]).try_into().expect("scores are f32");
        let wanted = brute_force_log_sums(&points, &scores, radius_km);
        let largest = wanted.iter().copied().fold(0.0, f64::max);
        assert!(largest > 150.0, "the largest log sum is {largest}, too small to test for overflow");
        let found = Neighbourhood::new(&points, radius_km).expect("the radius is valid").log_sums(&scores);
        for (anchor, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            // `log_sums` omits terms below e⁻³² times the largest term. A sum loses fewer than a thousand such terms,
            // so only small sums are inexact. Small sums are not compared.
            let close = (found - wanted).abs() < 1e-4 || *wanted < largest - 20.0;
            assert!(close, "the log sum of anchor {anchor} within {radius_km} km is {found}, wanted {wanted}");
        }
    }
}

/// Many neighbouring anchors with slightly lower scores outweigh a single anchor with the highest score.
#[test]
fn decode_with_a_neighbourhood_prefers_the_crowd() {
    let basis = Basis::new(23).expect("the degree is at most 511");
    let (crowd, alone) = (place(40.0, 20.0), place(-30.0, -60.0));
    let mut points = dense_gallery(crowd, 7, 5.0);
    points.push(alone);
    let codes_bc = basis.tensor(&[crowd], Device::Cpu).expect("the codes fit into memory")
        + basis.tensor(&[alone], Device::Cpu).expect("the codes fit into memory") * 1.02;
    let decode = |radius_km| {
        let anchors =
            Anchors::new(basis.clone(), points.clone(), Device::Cpu, Coarse::F32, SMALL).expect("there are anchors");
        Decoder::new(anchors, radius_km, false)
            .expect("the radius is valid")
            .decode(&codes_bc)
            .expect("the codes are finite")[0]
            .point
    };
    assert_eq!(decode(0.0), alone);
    // The whole crowd is within 30 km of several anchors, so any of these anchors may have the largest sum.
    assert!(decode(30.0).distance(crowd).0 < 15.0);
}

#[test]
fn decode_refuses_an_invalid_radius() {
    for radius_km in [-1.0, f64::NAN, f64::INFINITY] {
        let error = Neighbourhood::new(&fibonacci_grid(10), radius_km).expect_err("the radius is invalid");
        assert!(error.to_string().contains("wanted a finite number above 0"), "wrong error text: {error}");
    }
}

#[test]
fn decode_neighbourhoods_of_100k_anchors_are_fast() {
    let points = fibonacci_grid(100_000);
    let target = place(12.0, 34.0);
    // The scores of a clean code of degree 47, approximated by a parabola around the peak.
    let score = |point: &UnitVector| (183.3 - 0.5 * 105_560.0 * point.angle(target).powi(2)).max(-5.0) as f32;
    let scores: Vec<f32> = points.iter().map(score).collect();
    let began = Instant::now();
    let neighbourhood = Neighbourhood::new(&points, 200.0).expect("the radius is valid");
    let built = began.elapsed();
    let began = Instant::now();
    let sums = neighbourhood.log_sums(&scores);
    println!("100k anchors, 200 km: built in {built:?}, summed in {:?}", began.elapsed());
    let best = (0..sums.len()).max_by(|a, b| sums[*a].total_cmp(&sums[*b])).expect("there are anchors");
    assert!(points[best].distance(target).0 < 200.0);
    // The sums take milliseconds. The limit only detects a sum over all pairs of anchors, which would take a minute.
    assert!(began.elapsed().as_secs_f64() < 5.0);
}

/// Upper bound in bytes for the memory of a decode that keeps no harmonics. It includes the points, two copies of the
/// scores and four copies of a tile, but not the codes.
fn bytes_bound(anchors: usize, budget: Budget) -> usize {
    anchors * 24 + 2 * budget.scores_bytes.max(4 * anchors) + 4 * budget.tile_bytes
}

/// Checks that the bound for a million anchors at degree 47 is below 2 GB. Then decodes with 60,000 anchors and checks
/// that the measured memory stays within the bound for that number.
#[test]
fn decode_of_a_million_anchors_stays_below_two_gigabytes() {
    let basis = Basis::new(47).expect("the degree is at most 511");
    // The bound includes the memory in which 16 threads compute the sums over neighbourhoods.
    let bound = bytes_bound(1_000_000, Budget::of(Device::Cpu)) + neighbourhood_bytes(1_000_000, 16);
    println!("a million anchors at L = 47: at most {} MB", bound >> 20);
    assert!(bound < 2_000_000_000);

    let codes_bc = basis
        .tensor(&uniform_points(5, 0, 0, 64).expect("the draw is in range"), Device::Cpu)
        .expect("the codes fit into memory");
    let budget = Budget { kept_bytes_max: 0, tile_bytes: 32 << 20, scores_bytes: 16 << 20 };
    let anchors =
        Anchors::new(basis, fibonacci_grid(60_000), Device::Cpu, Coarse::F32, budget).expect("there are anchors");
    // A first decode triggers the one-time allocations of libraries, so that they are not counted below.
    anchors.best(&codes_bc.narrow(0, 0, 1), 1).expect("the codes are finite");
    let before = crate::resident_bytes();
    reset_peak();
    let best = anchors.best(&codes_bc, 64).expect("the codes are finite");
    let grown = peak_bytes().saturating_sub(before);
    println!("60000 anchors: {} MB more at the peak, bound {} MB", grown >> 20, bytes_bound(60_000, budget) >> 20);
    assert_eq!(best.rows.len(), 64);
    // The harmonics of all 60,000 anchors at once would take 553 MB.
    assert!(grown < bytes_bound(60_000, budget) as u64, "memory grew by {grown} bytes, wanted less than the bound");
}

/// Bytes for the sums over neighbourhoods: two integers and a vector per anchor. In addition, every thread needs a sum
/// and its logarithm for each anchor.
fn neighbourhood_bytes(anchors: usize, threads: usize) -> usize {
    anchors * (40 + 16 * threads)
}

/// Resets the peak of resident memory that Linux records for this process.
fn reset_peak() {
    std::fs::write("/proc/self/clear_refs", "5").expect("a process may reset its own peak");
}

fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux has /proc");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("Linux records the peak");
    line.split_whitespace().next().expect("the line has a value").parse::<u64>().expect("the value is a number") * 1024
}

#[test]
fn decode_refinement_reports_failure_to_converge() {
    let basis = Basis::new(8).expect("the degree is at most 511");
    let flat = refine(&basis, &vec![0.0; basis.dims()], place(1.0, 2.0)).expect("the code has the right length");
    assert!(!flat.converged && flat.steps == 0, "a flat code gave {flat:?}");
    for wrong in [f64::NAN, f64::INFINITY] {
        let mut code = vec![0.5; basis.dims()];
        code[7] = wrong;
        let error = refine(&basis, &code, place(1.0, 2.0)).expect_err("the code is not finite");
        assert_eq!(error.to_string(), format!("decoder: coefficient 7 of the code is {wrong}, wanted a finite number"));
    }
    // Refinement that starts far from the peak of a clean code may end at another maximum. The value at the end is
    // never lower than the value at the start.
    let point = place(33.0, 44.0);
    let code = basis.encode_f64(&[point]);
    let start = place(-30.0, -130.0);
    let low = basis.value_gradient_hessian(&code, start).expect("the code has the right length").value;
    let end = refine(&basis, &code, start).expect("the code has the right length");
    assert!(end.value >= low && end.value.is_finite(), "the search started at {low} and ended at {end:?}");
}
