//! Derivatives along the sphere equal finite differences. At the peak of a clean code (the code of a single
//! point) they equal closed formulas.

use std::f64::consts::PI;

use locdiff::shdd::Basis;
use locdiff::shdd::points::uniform_points_of;
use locdiff_core::geo::UnitVector;
use locdiff_core::random::Stream;

fn points() -> Vec<UnitVector> {
    let mut points = uniform_points_of(Stream::Test(2), 3, 0, 0, 6).expect("the draw is in range");
    points.extend([UnitVector::NORTH_POLE, UnitVector::SOUTH_POLE]);
    points.push(UnitVector::from_height(1.0 - 1e-12, 0.3).expect("the height is in range"));
    points.push(UnitVector::from_height(0.0, PI).expect("the height is in range"));
    points
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn shdd_derivatives_equal_finite_differences() {
    const STEP: f64 = 1e-3;
    let basis = Basis::new(15).expect("the degree is at most 511");
    // The function is rough: its coefficients of high degree are as large as its coefficients of low degree.
    let coefficients: Vec<f64> = (0..basis.dims()).map(|index| (1.0 + index as f64).powi(2).sin()).collect();
    for point in points() {
        let local = basis.value_gradient_hessian(&coefficients, point).expect("the code has the right length");
        let value = |point: UnitVector| dot(&coefficients, &basis.encode_f64(&[point]));
        assert!((local.value - value(point)).abs() < 1e-12);
        assert!(dot(&local.gradient, &point.xyz()).abs() < 1e-11, "the gradient is not in the tangent plane");
        for direction in [[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.8, -0.6]] {
            let tangent = local.basis.combine(direction);
            let at = |steps: f64| {
                let there = point.walk(tangent.map(|component| component * steps * STEP)).expect("the step is finite");
                value(there)
            };
            let slope = (8.0 * (at(1.0) - at(-1.0)) - (at(2.0) - at(-2.0))) / (12.0 * STEP);
            let bend = (16.0 * (at(1.0) + at(-1.0)) - (at(2.0) + at(-2.0)) - 30.0 * at(0.0)) / (12.0 * STEP * STEP);
            let [e, n] = direction;
            let [[ee, en], [_, nn]] = local.hessian;
            let (slope_error, bend_error) = (
                (dot(&local.gradient, &tangent) - slope).abs(),
                (e * e * ee + 2.0 * e * n * en + n * n * nn - bend).abs(),
            );
            // With step h, the truncation error is h⁴ f⁽⁵⁾/30 for the slope (first derivative) and h⁴ f⁽⁶⁾/90 for the
            // bend (second derivative). The derivatives f⁽ᵏ⁾ are at most 15ᵏ · 10, so the errors are at most 3e-7 and
            // 1.3e-6.
            assert!(
                slope_error < 3e-7 && bend_error < 1.3e-6,
                "at {point:?}, the first derivative is off by {slope_error:e} and the second by {bend_error:e}"
            );
        }
    }
}

#[test]
fn shdd_clean_code_peaks_at_its_point_with_the_known_curvature() {
    for degree in [15, 47, 127, 255] {
        let basis = Basis::new(degree).expect("the degree is at most 511");
        let l = f64::from(degree);
        let (height, curvature) = ((l + 1.0).powi(2) / (4.0 * PI), l * (l + 1.0).powi(2) * (l + 2.0) / (16.0 * PI));
        for point in points() {
            let local = basis
                .value_gradient_hessian(&basis.encode_f64(&[point]), point)
                .expect("the code has the right length");
            // Rounding moves the point by about 1e-16 radians, which changes the slope by 1e-16 times the curvature.
            let slope = dot(&local.gradient, &local.gradient).sqrt() / curvature;
            let [[ee, en], [_, nn]] = local.hessian.map(|row| row.map(|value| value / curvature));
            assert!(
                (local.value / height - 1.0).abs() < 1e-11,
                "degree {degree}, {point:?}: the peak has the wrong height"
            );
            assert!(slope < 1e-12, "degree {degree}, {point:?}: the slope at the peak is {slope:e}, wanted 0");
            let error = (ee + 1.0).abs().max((nn + 1.0).abs()).max(en.abs());
            assert!(error < 1e-9, "degree {degree}, {point:?}: the curvature is off by {error:e}");
        }
    }
}

#[test]
fn shdd_derivatives_check_their_input() {
    let basis = Basis::new(2).expect("the degree is at most 511");
    let error = basis.value_gradient_hessian(&[0.0; 8], UnitVector::NORTH_POLE).expect_err("the code is too short");
    assert_eq!(error.to_string(), "coefficients: length is 8, wanted 9");
}
