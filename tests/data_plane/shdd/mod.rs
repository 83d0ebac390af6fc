//! Spherical harmonics obey their theorems, and all implementations give the same values.

mod aggregate;
mod decode;
mod density;
mod derivatives;
mod prior;

use std::f64::consts::PI;

use locdiff::shdd::filter::Filter;
use locdiff::shdd::points::uniform_points_of;
use locdiff::shdd::{Basis, ShddError, uniform_points};
use locdiff_core::geo::{Degrees, Place, UnitVector, places};
use locdiff_core::random::Stream;
use tch::{Device, Kind, Tensor};

use crate::model::support::Golden;

fn points(count: usize) -> Vec<UnitVector> {
    uniform_points_of(Stream::Test(1), 11, 0, 0, count).expect("the draw is in range")
}

/// Points at which formulas with angles may fail: the poles, points near them, the equator and the date line.
fn hard_points() -> Vec<UnitVector> {
    let latitudes = [90.0, -90.0, 89.999_999_9, -89.999, 0.0, 0.0, 45.0, 1e-12];
    let longitudes = [0.0, 77.0, 12.0, -180.0, -180.0, 179.999_999, 90.0, 0.0];
    places(&latitudes, &longitudes).expect("the coordinates are valid").into_iter().map(UnitVector::from).collect()
}

fn basis(degree: u32) -> Basis {
    Basis::new(degree).expect("the degree is at most 511")
}

/// The right side of the addition theorem: the sum of (2l+1)/4π · P_l(t) over l = 0, ..., `degree`. The Legendre
/// polynomials P_l are computed by recursion.
fn kernel(degree: u32, t: f64) -> f64 {
    let (mut older, mut old, mut sum) = (0.0, 1.0, 1.0);
    for l in 1..=degree {
        let l = f64::from(l);
        (older, old) = (old, ((2.0 * l - 1.0) * t * old - (l - 1.0) * older) / l);
        sum += (2.0 * l + 1.0) * old;
    }
    sum / (4.0 * PI)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn shdd_addition_theorem_at_degree_127() {
    let degree = 127;
    let scale = 128.0 * 128.0 / (4.0 * PI);
    let random = points(40);
    let mut pairs: Vec<_> = random.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
    for point in random.iter().take(5).copied().chain(hard_points()) {
        pairs.extend([(point, point), (point, point.antipode()), (point, UnitVector::NORTH_POLE)]);
    }
    let mut largest = 0.0_f64;
    for (p, q) in pairs {
        let codes = basis(degree).encode_f64(&[p, q]);
        let (code_p, code_q) = codes.split_at(codes.len() / 2);
        largest = largest.max((dot(code_p, code_q) - kernel(degree, p.dot(q))).abs() / scale);
    }
    println!("addition theorem at degree {degree}: off by {largest:e} of (L+1)^2/4pi");
    // As a function of t = p·q, the kernel has a slope of up to degree²/2 times its largest value. Rounding t by 1e-16
    // therefore changes the kernel by about 1e-12 of its largest value.
    assert!(largest <= 1e-11, "the addition theorem is off by {largest:e}");
}

/// Nodes and weights of Gauss-Legendre quadrature on [-1, 1], by Newton's method from Tricomi's initial guess.
fn gauss_legendre(count: usize) -> Vec<(f64, f64)> {
    let node = |index: usize| {
        let mut z = (PI * (index as f64 + 0.75) / (count as f64 + 0.5)).cos();
        let mut slope = 0.0;
        for _ in 0..10 {
            let (mut older, mut old) = (0.0, 1.0);
            for l in 1..=count {
                let l = l as f64;
                (older, old) = (old, ((2.0 * l - 1.0) * z * old - (l - 1.0) * older) / l);
            }
            slope = count as f64 * (z * old - older) / (z * z - 1.0);
            z -= old / slope;
        }
        (z, 2.0 / ((1.0 - z * z) * slope * slope))
    };
    (0..count).map(node).collect()
}

#[test]
fn shdd_harmonics_are_orthonormal_at_degree_47() {
    let basis = basis(47);
    // A product of two harmonics has degree up to 94 in z and frequencies up to 94 in longitude. A quadrature with 48
    // heights and 96 longitudes integrates it exactly.
    let (heights, turns) = (48, 96);
    let mut nodes = Vec::new();
    let mut weights = Vec::new();
    for (z, weight) in gauss_legendre(heights) {
        for turn in 0..turns {
            let angle = 2.0 * PI * f64::from(turn) / f64::from(turns);
            nodes.push(UnitVector::from_height(z, angle).expect("the height is in range"));
            weights.push((weight * 2.0 * PI / f64::from(turns)).sqrt());
        }
    }
    let dims = basis.dims() as i64;
    let codes =
        Tensor::from_slice(&basis.encode_f64(&nodes)).view([-1, dims]) * Tensor::from_slice(&weights).view([-1, 1]);
    let gram = codes.tr().matmul(&codes);
    let error = (gram - Tensor::eye(dims, (Kind::Double, Device::Cpu))).abs().max().double_value(&[]);
    println!("orthonormality at degree 47: off by {error:e}");
    // Each integral is a sum of 4608 products, each below 0.006, and the nodes are exact to 1e-15.
    assert!(error <= 1e-10, "the harmonics differ from an orthonormal basis by {error:e}");
}

#[test]
fn shdd_fast_form_equals_the_scalar_form() {
    for degree in [0, 1, 2, 7, 22, 23, 47, 95, 127, 255] {
        let basis = basis(degree);
        // These counts give full and partial blocks of points.
        for count in [1, 7, 8, 29] {
            let mut all = hard_points();
            all.extend(points(count));
            let all = &all[..count];
            let mut want = vec![0.0; basis.dims()];
            let (wide, narrow) = (basis.encode_f64(all), basis.encode_f32(all, 1));
            for ((point, wide), narrow) in
                all.iter().zip(wide.chunks_exact(basis.dims())).zip(narrow.chunks_exact(basis.dims()))
            {
                basis.encode_scalar(*point, &mut want).expect("the code has the right length");
                // The fast form and the scalar form do the same operations in the same order, so their results must be
                // equal bit for bit.
                assert!(wide == want, "degree {degree}, {count} points: the f64 codes of {point:?} differ");
                assert!(
                    narrow.iter().zip(&want).all(|(narrow, want)| *narrow == *want as f32),
                    "degree {degree}: the f32 codes of {point:?} differ"
                );
            }
        }
    }
}

#[test]
fn shdd_number_of_threads_changes_no_bit() {
    let (basis, points) = (basis(23), points(103));
    let one = basis.encode_f32(&points, 1);
    for threads in [0, 2, 3, 16, 500] {
        assert!(basis.encode_f32(&points, threads) == one, "{threads} threads change the codes");
    }
    assert!(basis.encode_f32(&[], 4).is_empty());
    let tensor = basis.tensor(&points, Device::Cpu).expect("the codes fit into memory");
    assert_eq!((tensor.size(), tensor.kind()), (vec![103, 576], Kind::Float));
    assert!(Vec::<f32>::try_from(tensor.view([-1])).expect("the codes are f32") == one);
}

#[test]
fn shdd_squares_of_each_degree_have_the_same_sum_everywhere() {
    // For each degree l, the sum of Y_lm² over m is (2l+1)/4π at every point, also at the poles. No value can therefore
    // exceed √((2l+1)/4π).
    let mut all = points(200);
    all.extend(hard_points());
    for degree in [47, 127, 255, 511] {
        let basis = basis(degree);
        let mut largest = 0.0_f64;
        for code in basis.encode_f64(&all).chunks_exact(basis.dims()) {
            assert!(code.iter().all(|value| value.is_finite()), "degree {degree}: a value is not finite");
            for l in 0..=degree as usize {
                let part = &code[l * l..(l + 1) * (l + 1)];
                let share = (2 * l + 1) as f64 / (4.0 * PI);
                let error = (dot(part, part) / share - 1.0).abs();
                // Near a pole, a harmonic of degree l has a slope of about l² in z, so the rounding error of z, 1e-16,
                // changes the harmonic by up to 3e-11 at degree 511. Each of the l steps of the recursion adds its own
                // rounding error.
                assert!(error < 1e-9, "degree {degree}, l = {l}: the sum of squares is off by {error:e}");
                largest = part.iter().fold(largest, |largest, value| largest.max(value.abs()));
            }
        }
        println!("degree {degree}: max |Y| = {largest:.3}");
        assert!(largest <= (f64::from(2 * degree + 1) / (4.0 * PI)).sqrt() * (1.0 + 1e-9));
    }
}

#[test]
fn shdd_largest_value_at_random_points_grows_slowly_with_the_degree() {
    // The largest values are near the poles, where the zonal harmonics of degree L reach √((2L+1)/4π). The maximum over
    // random points therefore depends on how close a point happens to be to a pole. This is why the tolerance is wide.
    // A broken recursion would be off by powers of ten.
    let all: Vec<_> = points(2_000);
    for (degree, want) in [(47, 1.8), (127, 2.2), (255, 2.4)] {
        let basis = basis(degree);
        let largest = all.chunks(100).flat_map(|some| basis.encode_f32(some, 1)).fold(0.0, |a: f32, b| a.max(b.abs()));
        println!("degree {degree}: max |Y| over 2000 random points = {largest:.2}, wanted {want}");
        assert!(
            (0.7 * want..1.4 * want).contains(&f64::from(largest)),
            "degree {degree}: the largest value is {largest}, wanted about {want}"
        );
    }
}

#[test]
fn shdd_first_harmonics_equal_the_textbook() {
    let point = UnitVector::from(Place::new(Degrees(25.0), Degrees(-70.0)).expect("the coordinates are valid"));
    let [x, y, z] = point.xyz();
    let (one, three) = ((1.0 / (4.0 * PI)).sqrt(), (3.0 / (4.0 * PI)).sqrt());
    let fifteen = (15.0 / (4.0 * PI)).sqrt();
    let zonal = (5.0 / (16.0 * PI)).sqrt() * (3.0 * z * z - 1.0);
    let want = [
        one,
        three * y,
        three * z,
        three * x,
        fifteen * x * y,
        fifteen * y * z,
        zonal,
        fifteen * x * z,
        fifteen / 2.0 * (x * x - y * y),
    ];
    for (got, want) in basis(2).encode_f64(&[point]).iter().zip(want) {
        assert!((got - want).abs() < 1e-15, "a harmonic is {got}, wanted {want}");
    }
}

/// Compares the harmonics with the paper's closed form, which `tests/golden/make_harmonics.py` computes to 80 digits.
/// The comparison checks the sign, the position and the magnitude of each of the 2304 coefficients.
#[test]
fn shdd_harmonics_equal_the_closed_form_at_degree_47() {
    let golden = Golden::of("harmonics.safetensors");
    let points: Vec<f64> = golden.get("points").contiguous().view([-1]).try_into().expect("the golden tensors are f64");
    let wants: Vec<f64> =
        golden.get("harmonics").contiguous().view([-1]).try_into().expect("the golden tensors are f64");
    let basis = basis(47);
    assert_eq!(wants.len(), points.len() / 3 * basis.dims());
    let mut largest = 0.0_f64;
    for (xyz, want) in points.chunks_exact(3).zip(wants.chunks_exact(basis.dims())) {
        let point = UnitVector::new([xyz[0], xyz[1], xyz[2]]).expect("the golden points are unit vectors");
        let code = basis.encode_f64(&[point]);
        for (index, (got, want)) in code.iter().zip(want).enumerate() {
            largest = largest.max((got - want).abs());
            // Causes of the difference: coordinates are rounded by 1e-16, the harmonics have slopes of up to 47 × 2.8,
            // and the errors of 47 recursion steps add up.
            assert!((got - want).abs() < 1e-12, "dimension {index} of {xyz:?} is {got}, wanted {want}");
        }
    }
    println!("the largest difference from the closed form is {largest:e}");
}

#[test]
fn shdd_degrees_and_lengths_are_checked() {
    assert_eq!(
        Basis::new(512).expect_err("the degree is too high").to_string(),
        "harmonics: degree is 512, wanted 0 to 511"
    );
    let error = basis(3).encode_into(&points(2), &mut [0.0; 31]).expect_err("the slice is too short");
    assert_eq!(error.to_string(), "codes: length is 31, wanted 32");
}

#[test]
fn shdd_random_points_depend_only_on_seed_step_and_index() {
    let whole = uniform_points(5, 3, 0, 100).expect("the draw is in range");
    assert_eq!(uniform_points(5, 3, 40, 60).expect("the draw is in range"), whole[40..]);
    assert_ne!(uniform_points(5, 4, 0, 100).expect("the draw is in range"), whole);
    assert_ne!(uniform_points(6, 3, 0, 100).expect("the draw is in range"), whole);
    let many = uniform_points(1, 0, 0, 100_000).expect("the draw is in range");
    for axis in 0..3 {
        let mean = |power: i32| many.iter().map(|point| point.xyz()[axis].powi(power)).sum::<f64>() / 1e5;
        // The tolerances are five standard errors. The standard error is √(1/3 / 1e5) = 0.0018 for the mean and
        // √(4/45 / 1e5) = 0.00094 for the mean square.
        assert!(
            mean(1).abs() < 0.0092 && (mean(2) - 1.0 / 3.0).abs() < 0.0048,
            "axis {axis}: the mean or the mean square is wrong"
        );
    }
}

#[test]
fn shdd_filter_keeps_the_dimensions_of_largest_variance() {
    let filter = Filter::choose(&[1.0, 3.0, 2.0, 3.0, 0.0, 2.0], 3).expect("the variances are valid");
    // Dimensions 2 and 5 both have variance 2. The filter keeps the first of them.
    assert_eq!(filter.indices(), [1, 2, 3]);
    assert_eq!(Filter::from_indices(&filter.indices(), 6).expect("the indices come from a filter"), filter);
    let codes = Tensor::arange(12, (Kind::Float, Device::Cpu)).view([2, 6]);
    let selection = filter.to_device(Device::Cpu).expect("the filter is valid");
    let kept = selection.apply(&codes).expect("the codes have all dimensions");
    assert_eq!(Vec::<f32>::try_from(kept.view([-1])).expect("the codes are f32"), [1.0, 2.0, 3.0, 7.0, 8.0, 9.0]);
    let back = filter.scatter(&kept).expect("the codes are filtered");
    let want = [0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 7.0, 8.0, 9.0, 0.0, 0.0];
    assert_eq!(Vec::<f32>::try_from(back.view([-1])).expect("the codes are f32"), want);
    let error = selection.apply(&kept).expect_err("the codes are already filtered");
    assert_eq!(error.to_string(), "last dimension of codes: length is 3, wanted 6");
}

#[test]
fn shdd_invalid_filters_are_refused() {
    let text = |result: Result<Filter, ShddError>| result.expect_err("the filter is invalid").to_string();
    assert_eq!(text(Filter::choose(&[1.0; 4], 5)), "filter: 5 dimensions kept, wanted 1 to 4");
    assert_eq!(text(Filter::choose(&[1.0; 4], 0)), "filter: 0 dimensions kept, wanted 1 to 4");
    let not_a_number = text(Filter::choose(&[1.0, f64::NAN], 1));
    assert_eq!(not_a_number, "filter: variance of dimension 1 is NaN, wanted a finite number of at least 0");
    assert!(text(Filter::from_indices(&[0, 2, 2], 4)).contains("position 2"));
    assert_eq!(text(Filter::from_indices(&[0, 4], 4)), "filter: index is 4, wanted below 4");
}
