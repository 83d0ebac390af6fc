//! Tests of decoding, aggregation and densities with a prior.

use std::sync::Arc;

use locdiff::shdd::Basis;
use locdiff::shdd::aggregate::{kernel_medoid, posterior_medoid};
use locdiff::shdd::decode::{Anchors, Budget, Coarse, Decoder, DecoderPrior};
use locdiff::shdd::density::{CellPrior, CellScores, peak};
use locdiff_core::geo::{Degrees, Healpix, Km, Place, PlacePrior, Polygon, PriorFeature, UnitVector, fibonacci_grid};
use tch::{Device, Kind, Tensor};

const DEGREE: u32 = 12;
const TEMPERATURE: f64 = 0.1;

fn basis() -> Basis {
    Basis::new(DEGREE).expect("the degree is valid")
}

fn vector(latitude: f64, longitude: f64) -> UnitVector {
    Place::new(Degrees(latitude), Degrees(longitude)).expect("the coordinates are valid").into()
}

/// A box with a weight, and a town with a width.
fn prior() -> Arc<PlacePrior> {
    let ring = vec![[0.0, 0.0], [90.0, 0.0], [90.0, 60.0], [0.0, 60.0], [0.0, 0.0]];
    let region = Polygon::new(&[ring]).expect("the ring is valid");
    let region = PriorFeature::new(0.3, 10.0, vec![region], &[]).expect("the feature is valid");
    let town = PriorFeature::new(1.0, 400.0, Vec::new(), &[vec![vector(50.0, 50.0)]]).expect("the feature is valid");
    Arc::new(PlacePrior::new(vec![region, town]))
}

/// The codes of single places and of pairs of places, one in the prior and one outside.
fn codes(count: usize) -> (Vec<f64>, Tensor) {
    let (basis, points) = (basis(), fibonacci_grid(2 * count));
    let dims = basis.dims();
    let clean = basis.encode_f64(&points);
    let code = |at: usize| (0..dims).map(move |c| (at, c));
    let value = |(at, c): (usize, usize)| {
        let other = if at % 2 == 0 { 0.0 } else { 0.7 * clean[(2 * count - 1 - at) * dims + c] };
        clean[at * dims + c] + other
    };
    let codes: Vec<f64> = (0..count).flat_map(code).map(value).collect();
    let tensor = Tensor::from_slice(&codes).view([count as i64, -1]).to_kind(Kind::Float);
    (codes, tensor)
}

fn score(code: &[f64], point: UnitVector) -> f64 {
    basis().encode_f64(&[point]).iter().zip(code).map(|(one, other)| one * other).sum()
}

/// A decoder among the points of an even grid where the prior is above 0.
fn decoder(prior: &Arc<PlacePrior>, points: usize, coarse: Coarse, budget: Budget, refines: bool) -> Decoder {
    let points = fibonacci_grid(points).into_iter().filter(|point| prior.at(*point).is_some()).collect();
    let anchors = Anchors::new(basis(), points, Device::Cpu, coarse, budget).expect("there are anchors");
    let decoder = Decoder::new(anchors, 0.0, refines).expect("the settings are valid");
    let score_per_nat = peak(basis().dims()) * TEMPERATURE;
    decoder.with_prior(DecoderPrior::new(prior.clone(), score_per_nat)).expect("the anchors fit into memory")
}

#[test]
fn decoded_anchor_has_the_largest_product_of_density_and_prior() {
    let (prior, (codes, codes_bc)) = (prior(), codes(60));
    let score_per_nat = peak(basis().dims()) * TEMPERATURE;
    let small = Budget { kept_bytes_max: 0, tile_bytes: 128 * 4 * basis().dims(), scores_bytes: 4 << 20 };
    // With 16 bits, scores are divided by the largest number of their code, and the best ones are computed again.
    for (coarse, budget) in [(Coarse::F32, Budget::default()), (Coarse::F32, small), (Coarse::F16, small)] {
        let decoder = decoder(&prior, 3000, coarse, budget, false);
        let anchors = decoder.anchors().points();
        let (harmonics, found) =
            (basis().encode_f64(anchors), decoder.decode(&codes_bc).expect("the codes are finite"));
        let mut moved = 0;
        for (code, found) in codes.chunks_exact(basis().dims()).zip(&found) {
            let scores: Vec<f64> = harmonics
                .chunks_exact(code.len())
                .map(|of_anchor| of_anchor.iter().zip(code).map(|(one, other)| one * other).sum())
                .collect();
            let products: Vec<f64> =
                scores.iter().zip(anchors).map(|(score, point)| score + score_per_nat * prior.log_at(*point)).collect();
            let largest = |values: &[f64]| values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            assert!(products[found.anchor] >= largest(&products) - 1e-4, "{coarse:?}: {}", products[found.anchor]);
            moved += usize::from(scores[found.anchor] < largest(&scores) - 1e-3);
        }
        assert!(moved > 5, "{coarse:?}: the weights changed only {moved} answers");
    }
}

#[test]
fn refined_places_stay_in_the_prior_and_are_at_least_as_good_as_their_anchors() {
    let (prior, (codes, codes_bc)) = (prior(), codes(60));
    let score_per_nat = peak(basis().dims()) * TEMPERATURE;
    let [coarse, refined] = [false, true].map(|refines| {
        let decoder = decoder(&prior, 3000, Coarse::F32, Budget::default(), refines);
        decoder.decode(&codes_bc).expect("the codes are finite")
    });
    let mut moved = 0;
    for (code, (anchor, found)) in codes.chunks_exact(basis().dims()).zip(coarse.iter().zip(&refined)) {
        let product = |point: UnitVector| score(code, point) + score_per_nat * prior.log_at(point);
        assert!(product(found.point) >= product(anchor.point) - 1e-9, "{anchor:?} became {found:?}");
        moved += usize::from(anchor.point.distance(found.point) > Km(1.0));
    }
    assert!(moved > 25, "only {moved} places were refined");
    // A peak in the region is found exactly, as without a prior.
    let inside = basis().tensor(&[vector(20.0, 20.0)], Device::Cpu).expect("the codes fit into memory");
    let found = decoder(&prior, 3000, Coarse::F32, Budget::default(), true).decode(&inside).expect("finite");
    assert!(found[0].point.distance(vector(20.0, 20.0)) < Km(0.001), "{found:?}");
}

#[test]
fn shares_and_posteriors_follow_their_definitions() {
    let cells = CellScores::new(basis(), None, Device::Cpu).expect("the degree is valid");
    let count = cells.grid().cells() as usize;
    let means: Vec<f64> = (0..count).map(|cell| if cell % 7 == 0 { (cell % 5) as f64 / 4.0 } else { 0.0 }).collect();
    let (some, all) = (CellPrior::new(&means, Device::Cpu), CellPrior::new(&vec![1.0; count], Device::Cpu));
    let (some, all) = (some.expect("a cell is above 0"), all.expect("a cell is above 0"));
    let image = cells.of_image(&codes(4).1).expect("the codes are finite");
    assert_eq!(image.log_shares(TEMPERATURE, &all).expect("finite"), [0.0; 4]);
    for (at, share) in image.log_shares(TEMPERATURE, &some).expect("finite").into_iter().enumerate() {
        let own = cells.of_image(&codes(4).1.narrow(0, at as i64, 1)).expect("the codes are finite");
        let density = own.probabilities(TEMPERATURE).expect("finite");
        let wanted: f64 = density.iter().zip(&means).map(|(density, mean)| density * mean).sum();
        assert!((share - wanted.ln()).abs() < 1e-3, "sample {at}: {share}, wanted {}", wanted.ln());
    }
    for temperature in [2.0, TEMPERATURE, 1.0 / 128.0] {
        let density = image.probabilities(temperature).expect("finite");
        let product: Vec<f64> = density.iter().zip(&means).map(|(density, mean)| density * mean).collect();
        let total: f64 = product.iter().sum();
        let found = image.posterior(temperature, &some).expect("finite");
        assert!((found.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        for (found, product) in found.iter().zip(&product) {
            // If the whole density is negligible in the prior, f32 has too few digits for the reference.
            assert!(total < 1e-30 || (found - product / total).abs() < 1e-4, "{found}, wanted {}", product / total);
        }
        let unchanged = image.posterior(temperature, &all).expect("finite");
        assert!(unchanged.iter().zip(&density).all(|(one, other)| (one - other).abs() < 1e-6));
    }
    // The prior is far from everything that a sharp density contains.
    let mut far = vec![0.0; count];
    far[Healpix::cell_of(cells.grid(), fibonacci_grid(8)[0].antipode()) as usize] = 1e-9;
    let far = CellPrior::new(&far, Device::Cpu).expect("a cell is above 0");
    let sharp =
        cells.of_image(&basis().tensor(&fibonacci_grid(8)[..1], Device::Cpu).expect("it fits")).expect("finite");
    let found = sharp.posterior(1.0 / 128.0, &far).expect("finite");
    assert!((found.iter().copied().fold(0.0, f64::max) - 1.0).abs() < 1e-9);
    assert!(sharp.log_shares(1.0 / 128.0, &far).expect("finite")[0] < -80.0);
    assert!(CellPrior::new(&vec![0.0; count], Device::Cpu).is_err());
}

#[test]
fn light_samples_decide_nothing() {
    let (town, other) = (vector(10.0, 10.0), vector(-40.0, 100.0));
    let near = |place: UnitVector, step: f64| place.displace(Degrees(90.0), Km(step)).expect("the distance is finite");
    let points = [near(town, 0.0), near(town, 1.0), near(town, 2.0), near(other, 0.0), near(other, 1.0)];
    let (even, weights) = ([1.0; 5], [1e-4, 1e-4, 1e-4, 1.0, 0.9]);
    assert!(kernel_medoid(&points, &[]).expect("there are samples") < 3);
    assert_eq!(kernel_medoid(&points, &even), kernel_medoid(&points, &[]));
    assert!(kernel_medoid(&points, &weights).expect("there are samples") >= 3);
    assert!(posterior_medoid(&points, &even, &[]).expect("there are samples") < 3);
    assert!(posterior_medoid(&points, &even, &weights).expect("there are samples") >= 3);
}
