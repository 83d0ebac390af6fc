//! Densities over HEALPix cells.

use std::f64::consts::PI;

use locdiff::shdd::density::CellScores;
use locdiff::shdd::{Basis, Filter};
use locdiff_core::geo::{EARTH_RADIUS_KM, Healpix, UnitVector, fibonacci_grid, order_and_cell};
use locdiff_core::random::{Draw, Philox, Stream};
use tch::{Device, Tensor};

const DEGREE: u32 = 8;
const TEMPERATURES: [f64; 4] = [2.0, 0.3, 0.1, 1.0 / 128.0];

fn basis() -> Basis {
    Basis::new(DEGREE).expect("the degree is valid")
}

/// Codes of three samples: clean ones, sums of several places, and noise.
fn codes(kind: usize) -> Vec<f64> {
    let (basis, points) = (basis(), fibonacci_grid(40));
    let clean = |at: usize| basis.encode_f64(&points[at..at + 1]);
    let mut noise = vec![0.0_f32; basis.dims()];
    let draw = Draw { stream: Stream::Test(1), step: 0, first_sample: 0, elements: basis.dims() };
    Philox::new(3).fill_normal(draw, &mut noise).expect("the draw is in range");
    let sample = |at: usize| match kind {
        0 => clean(7 * at),
        1 => clean(at).iter().zip(clean(30 - at)).map(|(one, other)| 0.5 * (one + other)).collect(),
        _ => clean(3 * at).iter().zip(&noise).map(|(value, noise)| value + 0.3 * f64::from(*noise)).collect(),
    };
    (0..3).flat_map(sample).collect()
}

fn tensor(codes: &[f64]) -> Tensor {
    Tensor::from_slice(codes).view([3, -1]).to_kind(tch::Kind::Float)
}

fn scores() -> CellScores {
    CellScores::new(basis(), None, Device::Cpu).expect("the degree is valid")
}

/// The definition in f64: the mean over the samples of the softmax over the cells.
fn reference(codes: &[f64], grid: Healpix, temperature: f64) -> Vec<f64> {
    let (basis, cells) = (basis(), grid.cells() as usize);
    let centres: Vec<UnitVector> = (0..grid.cells()).map(|cell| grid.centre(cell)).collect();
    let harmonics = basis.encode_f64(&centres);
    let peak = basis.dims() as f64 / (4.0 * PI);
    let mut mean = vec![0.0; cells];
    for code in codes.chunks_exact(basis.dims()) {
        let score = |of_cell: &[f64]| of_cell.iter().zip(code).map(|(one, other)| one * other).sum::<f64>();
        let densities: Vec<f64> =
            harmonics.chunks_exact(basis.dims()).map(|of_cell| (score(of_cell) / (peak * temperature)).exp()).collect();
        let total: f64 = densities.iter().sum();
        mean.iter_mut().zip(densities).for_each(|(mean, density)| *mean += density / total / 3.0);
    }
    mean
}

#[test]
fn density_integrates_to_one_and_follows_its_definition() {
    let scores = scores();
    // The points of a much finer grid, in the cells of the density.
    let (grid, finer) = (scores.grid(), Healpix::new(7));
    let cells: Vec<usize> = (0..finer.cells()).map(|cell| grid.cell_of(finer.centre(cell)) as usize).collect();
    for kind in 0..3 {
        let image = scores.of_image(&tensor(&codes(kind))).expect("the codes are finite");
        let of_cell: Vec<Vec<f64>> =
            (0..grid.cells()).map(|cell| image.log_density_in(cell, &TEMPERATURES).expect("cells exist")).collect();
        for (at, temperature) in TEMPERATURES.into_iter().enumerate() {
            let mean = cells.iter().map(|cell| of_cell[*cell][at].exp()).sum::<f64>() / cells.len() as f64;
            let total = mean * 4.0 * PI * EARTH_RADIUS_KM * EARTH_RADIUS_KM;
            assert!((total - 1.0).abs() < 1e-3, "codes {kind}, temperature {temperature}: {total}");
            let wanted = reference(&codes(kind), grid, temperature);
            let found = image.probabilities(temperature).expect("the codes are finite");
            for (cell, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
                // Scores are f32: their error is about 1e-6 of the peak, divided by the temperature.
                assert!((found - wanted).abs() < 1e-5 + 1e-3 * wanted, "cell {cell}: {found}, wanted {wanted}");
                let log = (wanted / grid.cell_km2()).ln();
                assert!((of_cell[cell][at] - log).abs() < 2e-3, "cell {cell}: {}, wanted {log}", of_cell[cell][at]);
            }
        }
    }
}

#[test]
fn density_of_an_image_does_not_depend_on_the_other_images() {
    // As a worker does: otherwise, the first sine may be rounded differently.
    locdiff::native::call_vector_functions_once().expect("libtorch works");
    let (scores, all) = (scores(), Tensor::cat(&[tensor(&codes(0)), tensor(&codes(1)), tensor(&codes(2))], 0));
    for kind in 0..3_usize {
        let [alone, among] = [tensor(&codes(kind)), all.narrow(0, 3 * kind as i64, 3)]
            .map(|codes| scores.of_image(&codes).expect("the codes are finite").probabilities(0.1));
        assert_eq!(alone.expect("the codes are finite"), among.expect("the codes are finite"));
    }
}

#[test]
fn density_cells_cover_the_sphere_once_and_keep_every_probability() {
    let scores = scores();
    for (kind, temperature) in [(0, 0.1), (1, 0.03), (2, 2.0)] {
        let image = scores.of_image(&tensor(&codes(kind))).expect("the codes are finite");
        let fine = image.probabilities(temperature).expect("the codes are finite");
        let cells = image.cells(temperature, 0.001, None).expect("the codes are finite");
        let finest = scores.grid().order();
        let mut next = 0;
        for (unique, probability) in &cells {
            let (order, cell) = order_and_cell(*unique);
            let shift = 2 * (finest - order);
            let (first, after) = ((cell << shift) as usize, ((cell + 1) << shift) as usize);
            assert_eq!(first, next, "cells overlap or leave a gap");
            let wanted: f64 = fine[first..after].iter().sum();
            assert!((f64::from(*probability) - wanted).abs() < 1e-6 + 1e-6 * wanted);
            assert!(order == finest || *probability <= 0.001, "cell {cell} of order {order} has {probability}");
            next = after;
        }
        assert_eq!(next, fine.len());
        assert!(kind != 0 || cells.len() < fine.len(), "no cells were merged");
    }
}

#[test]
fn filtered_codes_have_the_density_of_codes_with_zeros_and_bad_codes_are_refused() {
    let dims = basis().dims();
    let kept: Vec<u32> = (0..dims as u32).filter(|at| at % 3 != 0).collect();
    let filter = Filter::from_indices(&kept, dims).expect("the filter is valid");
    let filtered = CellScores::new(basis(), Some(filter.clone()), Device::Cpu).expect("the degree is valid");
    let whole = tensor(&codes(0));
    let selection = filter.to_device(Device::Cpu).expect("the CPU has memory");
    let short = selection.apply(&whole).expect("the shapes match");
    let zeros = filter.scatter(&short).expect("the shapes match");
    // The peak of a filtered code is lower, which is the same as a lower temperature.
    let temperature = 0.1 * filter.kept() as f64 / dims as f64;
    let one = filtered.of_image(&short).and_then(|image| image.probabilities(0.1)).expect("the codes are finite");
    let other = scores().of_image(&zeros).and_then(|image| image.probabilities(temperature)).expect("finite");
    assert!(one.iter().zip(&other).all(|(one, other)| (one - other).abs() < 1e-6));
    let error = scores().of_image(&(whole * f64::NAN)).expect_err("NaN is not a code").to_string();
    assert!(error.contains("finite"), "{error}");
}
