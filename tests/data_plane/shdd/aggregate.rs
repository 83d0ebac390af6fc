//! Tests of the aggregators, which combine the samples of an image into one place.

use locdiff::shdd::aggregate::{
    Ensemble, TEMPERING, aggregate, geometric_median, kernel_medoid, mean_vector, mixture, posterior_medoid,
};
use locdiff::shdd::decode::{Anchors, Budget, Coarse, Decoder, grid_points_min};
use locdiff::shdd::{Basis, ShddError, uniform_points};
use locdiff_core::config::Aggregator;
use locdiff_core::geo::{Degrees, Km, Place, UnitVector, fibonacci_grid};
use tch::{Device, Kind, Tensor};

const ALL: [Aggregator; 6] = [
    Aggregator::PosteriorMedoid,
    Aggregator::KernelMedoid,
    Aggregator::MeanVector,
    Aggregator::GeometricMedian,
    Aggregator::MeanCode,
    Aggregator::Mixture,
];

fn place(latitude: f64, longitude: f64) -> UnitVector {
    Place::new(Degrees(latitude), Degrees(longitude)).expect("the coordinates are valid").into()
}

/// The answers of the three aggregators that need only the places of the samples: medoid, mean and median.
fn aggregate_places(points: &[UnitVector]) -> [UnitVector; 3] {
    let medoid = points[kernel_medoid(points, &[]).expect("there are samples")];
    [medoid, mean_vector(points).expect("there are samples"), geometric_median(points).expect("there are samples")]
}

fn decoder(extra: &[UnitVector]) -> Decoder {
    let mut points = fibonacci_grid(6000);
    points.extend(extra);
    let basis = Basis::new(23).expect("the degree is at most 511");
    let anchors = Anchors::new(basis, points, Device::Cpu, Coarse::F32, Budget::default()).expect("there are anchors");
    Decoder::new(anchors, 0.0, false).expect("the radius is valid")
}

fn codes(decoder: &Decoder, points: &[UnitVector]) -> Tensor {
    decoder.anchors().basis().tensor(points, Device::Cpu).expect("the codes fit into memory").unsqueeze(0)
}

/// Aggregates samples. There is no network here, so the mean of the samples' codes replaces the code that a network
/// would predict for the image.
fn aggregate_samples(how: Aggregator, codes_ikc: &Tensor, decoder: &Decoder) -> Result<Vec<UnitVector>, ShddError> {
    let expected_ic = match codes_ikc.dim() {
        3 => codes_ikc.mean_dim([1_i64].as_slice(), false, None::<Kind>),
        _ => codes_ikc.shallow_clone(),
    };
    aggregate(how, Ensemble { codes_ikc, expected_ic: &expected_ic, expected_ik: None, weights: &[] }, decoder)
}

#[test]
fn aggregate_of_one_or_equal_samples_is_that_place() {
    for point in [place(10.0, 20.0), UnitVector::NORTH_POLE, place(0.0, 180.0)] {
        let decoder = decoder(&[point]);
        for count in [1, 5] {
            let points = vec![point; count];
            for found in aggregate_places(&points) {
                assert!(found.distance(point).0 < 1e-6, "{count} samples at {point:?} gave {found:?}");
            }
            for how in ALL {
                let found = aggregate_samples(how, &codes(&decoder, &points), &decoder).expect("there are samples")[0];
                assert!(found.distance(point).0 < 1e-6, "{how:?}: {count} samples at {point:?} gave {found:?}");
            }
        }
    }
}

#[test]
fn aggregate_across_date_line_and_pole_stays_between_the_samples() {
    for center in [place(0.0, 180.0), UnitVector::NORTH_POLE, UnitVector::SOUTH_POLE, place(60.0, -180.0)] {
        let around: Vec<UnitVector> = (0..8)
            .map(|turn| center.displace(Degrees(45.0 * f64::from(turn)), Km(100.0)).expect("the step is finite"))
            .collect();
        let decoder = decoder(&[center]);
        let [medoid, mean, median] = aggregate_places(&around);
        assert!((medoid.distance(center).0 - 100.0).abs() < 1e-6);
        assert!(
            mean.distance(center).0 < 1e-6 && median.distance(center).0 < 1e-3,
            "around {center:?}, the mean is {mean:?} and the median {median:?}"
        );
        for how in ALL {
            let found = aggregate_samples(how, &codes(&decoder, &around), &decoder).expect("there are samples")[0];
            // Samples are first decoded to anchors. The nearest anchor may be almost 200 km away.
            assert!(found.distance(center).0 < 250.0, "{how:?} is {} km from {center:?}", found.distance(center).0);
        }
    }
}

#[test]
fn aggregate_by_medoid_median_and_mixture_ignores_outliers() {
    let center = place(48.0, 11.0);
    let mut points: Vec<UnitVector> = (0..11)
        .map(|turn| center.displace(Degrees(33.0 * f64::from(turn)), Km(20.0)).expect("the step is finite"))
        .collect();
    points.extend([place(-33.0, 151.0), place(40.0, -74.0), place(35.0, 139.0), place(-23.0, -46.0)]);
    let [medoid, mean, median] = aggregate_places(&points);
    assert!(medoid.distance(center).0 < 21.0);
    assert!(median.distance(center).0 < 60.0, "the median is {} km from the center", median.distance(center).0);
    assert!(mean.distance(center).0 > 200.0, "the mean did not move towards the outliers");
    let decoder = decoder(&points);
    let found = mixture(&codes(&decoder, &points), &decoder, TEMPERING).expect("there are samples")[0];
    assert!(found.point.distance(center).0 < 100.0 && found.score < 0.0, "the mixture gave {found:?}");
}

/// The logarithm of the mixture's density at the point `at`, computed directly from the definition. The density is the
/// mean over samples k of exp(s f_k(at)) / Z_k. Here s is the tempering, f_k(p) is the dot product of the codes of
/// sample k and point p, and Z_k is the sum of exp(s f_k) over all anchors.
fn log_mixture(decoder: &Decoder, samples: &[UnitVector], at: UnitVector) -> f64 {
    let basis = decoder.anchors().basis();
    let score = |one: UnitVector, other: UnitVector| {
        let codes = basis.encode_f64(&[one, other]);
        let (one, other) = codes.split_at(basis.dims());
        TEMPERING * one.iter().zip(other).map(|(a, b)| a * b).sum::<f64>()
    };
    let density = |sample: &UnitVector| {
        let total: f64 = decoder.anchors().points().iter().map(|anchor| score(*sample, *anchor).exp()).sum();
        score(*sample, at).exp() / total
    };
    (samples.iter().map(density).sum::<f64>() / samples.len() as f64).ln()
}

/// If all samples are equal, the answer is refined to their place. If the samples differ, the answer is refined to a
/// maximum of the mixture's density.
#[test]
fn aggregate_by_mixture_refines_to_the_mode_of_the_mixture() {
    let basis = Basis::new(15).expect("the degree is at most 511");
    let anchors = Anchors::grid(basis, grid_points_min(15), Device::Cpu).expect("there are anchors");
    let decoder = Decoder::new(anchors, 0.0, true).expect("the radius is valid");
    let center = place(48.0, 11.0);
    let alone = mixture(&codes(&decoder, &[center; 3]), &decoder, TEMPERING).expect("there are samples")[0];
    assert!(alone.converged && alone.point.distance(center).0 < 0.001, "equal samples gave {alone:?}");
    // Four samples lie unevenly around the center, closer to each other than the resolution of L = 15 (1300 km). A
    // fifth sample is far away.
    let mut samples: Vec<UnitVector> = [(0.0, 100.0), (80.0, 500.0), (200.0, 300.0), (290.0, 700.0)]
        .map(|(bearing, distance)| center.displace(Degrees(bearing), Km(distance)).expect("the step is finite"))
        .to_vec();
    samples.push(place(-30.0, -60.0));
    let found = mixture(&codes(&decoder, &samples), &decoder, TEMPERING).expect("there are samples")[0];
    let nearest = decoder.anchors().points()[found.anchor];
    assert!(
        found.converged && found.point.distance(center).0 < 600.0 && found.point != nearest,
        "the samples gave {found:?}"
    );
    // The program computes codes and normalisation in f32, and `log_mixture` in f64.
    let height = log_mixture(&decoder, &samples, found.point);
    assert!((found.score - height).abs() < 1e-4, "the score is {}, wanted {height}", found.score);
    assert!(height > log_mixture(&decoder, &samples, nearest));
    for turn in 0..8 {
        let beside = found.point.displace(Degrees(45.0 * f64::from(turn)), Km(1.0)).expect("the step is finite");
        // One kilometre away from the maximum, the density is lower, and the difference is larger than the rounding
        // errors of f32 codes.
        assert!(
            log_mixture(&decoder, &samples, beside) < height,
            "the density 1 km away at bearing {} is not lower",
            45 * turn
        );
    }
}

/// Many neighbouring anchors with slightly lower density outweigh a single anchor with the highest density.
#[test]
fn aggregate_by_mixture_sums_over_a_neighbourhood() {
    let (crowd, alone) = (place(40.0, 20.0), place(-30.0, -60.0));
    let axes = crowd.tangent_basis();
    let mut points: Vec<UnitVector> = (0..30)
        .map(|step| crowd.walk(axes.combine([1e-3 * f64::from(step), 0.0])).expect("the step is finite"))
        .collect();
    points.push(alone);
    let basis = Basis::new(23).expect("the degree is at most 511");
    let decode = |radius_km| {
        let anchors = Anchors::new(basis.clone(), points.clone(), Device::Cpu, Coarse::F32, Budget::default());
        let decoder = Decoder::new(anchors.expect("there are anchors"), radius_km, false).expect("the radius is valid");
        mixture(&codes(&decoder, &[crowd, alone]), &decoder, TEMPERING).expect("there are samples")[0]
    };
    assert_eq!(decode(0.0).point, alone);
    let found = decode(400.0);
    assert!(found.point.distance(crowd).0 < 200.0 && found.score > -1.0, "the neighbourhood gave {found:?}");
}

/// The mean vector of two antipodes is 0 and has no direction. The medoid, the mean and the median are then the first
/// sample.
#[test]
fn aggregate_of_antipodes_is_a_sample_and_never_nan() {
    for point in [place(12.0, 34.0), UnitVector::NORTH_POLE] {
        let pair = [point, point.antipode()];
        assert_eq!(aggregate_places(&pair), [point; 3]);
        let decoder = decoder(&pair);
        for how in ALL {
            let found = aggregate_samples(how, &codes(&decoder, &pair), &decoder).expect("there are samples")[0];
            assert!(found.xyz().iter().all(|value| value.is_finite()), "{how:?} gave {found:?}");
        }
    }
}

#[test]
fn aggregate_ties_go_to_the_earliest_sample() {
    let (one, other) = (place(10.0, 0.0), place(10.0, 1.0));
    assert_eq!(kernel_medoid(&[one, other], &[]), Ok(0));
    assert_eq!(kernel_medoid(&[other, one, other, one], &[]), Ok(0));
    assert_eq!(kernel_medoid(&[place(-40.0, 7.0), one, other, one], &[]), Ok(1));
}

/// Nine samples are in one region and seven in another. In the posterior medoid, the weight of a sample depends on
/// the density that the network expects at the sample's place. The test first passes these densities directly, and
/// then passes a code from which the densities are computed.
#[test]
fn aggregate_favours_samples_near_the_expected_code() {
    let around = |latitude: f64, count: u32| (0..count).map(move |step| place(latitude, 20.0 + 0.1 * f64::from(step)));
    let points: Vec<UnitVector> = around(50.0, 9).chain(around(-30.0, 7)).collect();
    let expecting = |first: f64, second: f64| [vec![first; 9], vec![second; 7]].concat();
    assert!(kernel_medoid(&points, &[]).expect("there are samples") < 9);
    for (expected, is_second) in [([0.2, 0.6], true), ([0.5, 0.5], false), ([-0.3, 0.1], true), ([0.0, 0.0], false)] {
        let found = posterior_medoid(&points, &expecting(expected[0], expected[1]), &[]).expect("there are samples");
        assert_eq!(found >= 9, is_second, "the expected densities {expected:?} gave sample {found}");
    }
    let decoder = decoder(&points);
    let codes_ikc = codes(&decoder, &points);
    for (latitude, want) in [(50.0, &points[..9]), (-30.0, &points[9..])] {
        let expected_ic = codes(&decoder, &[place(latitude, 20.5)]).squeeze_dim(1);
        let ensemble = Ensemble { codes_ikc: &codes_ikc, expected_ic: &expected_ic, expected_ik: None, weights: &[] };
        let found = aggregate(Aggregator::PosteriorMedoid, ensemble, &decoder).expect("there are samples")[0];
        assert!(want.contains(&found), "a code at latitude {latitude} gave {found:?}");
    }
}

/// A step of 1 km from the median in any direction does not lower the sum of distances to the samples. This also holds
/// if the median is one of the samples.
#[test]
fn aggregate_median_has_the_least_sum_of_distances() {
    for step in 0..40 {
        let mut points = uniform_points(9, step, 0, 16).expect("the draw is in range");
        if step % 2 == 0 {
            // All samples are within about 30 degrees of one place, so the median is unique.
            let walked =
                |point: &UnitVector| place(20.0, 170.0).walk(point.xyz().map(|x| x * 0.5)).expect("the step is finite");
            points = points.iter().map(walked).collect();
        }
        if step % 4 == 0 {
            points.extend([points[3]; 9]);
        }
        let median = geometric_median(&points).expect("there are samples");
        let cost = |place: UnitVector| points.iter().map(|point| place.angle(*point)).sum::<f64>();
        for turn in 0..12 {
            let beside = median.displace(Degrees(30.0 * f64::from(turn)), Km(1.0)).expect("the step is finite");
            assert!(
                cost(median) <= cost(beside) + 1e-12,
                "step {step}: the sum is {} at the median and {} beside it",
                cost(median),
                cost(beside)
            );
        }
    }
}

#[test]
fn aggregate_refuses_invalid_samples() {
    let no_samples = ShddError::Bad("aggregator: 0 samples, wanted at least 1".to_owned());
    assert_eq!(kernel_medoid(&[], &[]), Err(no_samples.clone()));
    assert_eq!(mean_vector(&[]), Err(no_samples.clone()));
    assert_eq!(geometric_median(&[]), Err(no_samples.clone()));
    let decoder = decoder(&[]);
    let right = codes(&decoder, &[place(1.0, 2.0)]);
    for how in ALL {
        let error =
            aggregate_samples(how, &right.squeeze(), &decoder).expect_err("the shape has no dimension of samples");
        assert!(error.to_string().contains("wanted [images, samples, 576]"), "wrong error text: {error}");
        assert_eq!(aggregate_samples(how, &right.narrow(1, 0, 0), &decoder), Err(no_samples.clone()));
    }
    let error = mixture(&right, &decoder, 0.0).expect_err("a tempering of 0 is invalid");
    assert_eq!(error.to_string(), "aggregator: tempering is 0, wanted a finite number above 0");
}

#[test]
fn aggregate_of_many_images_equals_that_of_each() {
    let decoder = decoder(&[]);
    let points = uniform_points(10, 0, 0, 12).expect("the draw is in range");
    let codes_ikc =
        decoder.anchors().basis().tensor(&points, Device::Cpu).expect("the codes fit into memory").view([3, 4, 576]);
    for how in ALL {
        let of_all = aggregate_samples(how, &codes_ikc, &decoder).expect("there are samples");
        for image in 0..3 {
            let alone = aggregate_samples(how, &codes_ikc.narrow(0, image, 1), &decoder).expect("there are samples");
            assert_eq!(alone[0], of_all[image as usize], "{how:?}: image {image} alone gives another place");
        }
    }
}
