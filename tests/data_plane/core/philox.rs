//! Statistics of the counter-based random numbers: moments, tails, correlations and the balance of bits. An ignored
//! test measures the time per number. The seeds are fixed, so a test never fails by chance.

use locdiff_core::random::{Draw, Philox, Stream};

/// Number of samples in a draw.
const ROWS: usize = 500;
/// Numbers per sample. The count is not a multiple of 4, the number of values in a Philox block.
const ELEMENTS: usize = 2011;
const N: f64 = (ROWS * ELEMENTS) as f64;

fn draw(stream: Stream, step: u64) -> Draw {
    Draw { stream, step, first_sample: 10, elements: ELEMENTS }
}

fn mean(values: &[f32], power: i32) -> f64 {
    values.iter().map(|value| f64::from(*value).powi(power)).sum::<f64>() / values.len() as f64
}

/// The distance between `got` and `want` in standard errors. `got` is a mean of [`N`] independent draws, each with this
/// `variance`.
fn deviations(got: f64, want: f64, variance: f64) -> f64 {
    (got - want).abs() / (variance / N).sqrt()
}

#[test]
fn uniforms_have_the_moments_of_the_uniform_distribution() {
    let mut values = vec![0.0; ROWS * ELEMENTS];
    for step in 0..4 {
        Philox::new(11).fill_uniform(draw(Stream::Test(0), step), &mut values).expect("the draw is in range");
        assert!(values.iter().all(|value| (0.0..1.0).contains(value)));
        assert!(deviations(mean(&values, 1), 0.5, 1.0 / 12.0) < 4.0);
        assert!(deviations(mean(&values, 2), 1.0 / 3.0, 4.0 / 45.0) < 4.0);
    }
}

#[test]
fn normals_have_the_moments_of_the_normal_distribution() {
    let mut values = vec![0.0; ROWS * ELEMENTS];
    for step in 0..4 {
        Philox::new(12).fill_normal(draw(Stream::Noise, step), &mut values).expect("the draw is in range");
        // The variance of xᵏ is E[x²ᵏ] − E[xᵏ]². A normal x has E[x²] = 1, E[x⁴] = 3, E[x⁶] = 15 and E[x⁸] = 105.
        assert!(deviations(mean(&values, 1), 0.0, 1.0) < 4.0);
        assert!(deviations(mean(&values, 2), 1.0, 2.0) < 4.0);
        assert!(deviations(mean(&values, 3), 0.0, 15.0) < 4.0);
        assert!(deviations(mean(&values, 4), 3.0, 96.0) < 4.0);
        let beyond_3 = values.iter().filter(|value| value.abs() > 3.0).count() as f64 / N;
        assert!(deviations(beyond_3, 0.002_699_796, 0.0027) < 4.0);
    }
}

#[test]
fn neighbours_are_not_correlated() {
    let mut values = vec![0.0; ROWS * ELEMENTS];
    Philox::new(13).fill_normal(draw(Stream::Noise, 0), &mut values).expect("the draw is in range");
    for lag in [1, 2, 3, 4, 64, ELEMENTS] {
        let products = values.iter().zip(&values[lag..]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() / N;
        assert!(deviations(products, 0.0, 1.0) < 4.0, "the correlation at lag {lag} is {products}, wanted nearly 0");
    }
}

#[test]
fn bits_pass_chi_square() {
    let mut words = vec![0; ROWS * ELEMENTS];
    Philox::new(14).fill_bits(draw(Stream::Test(1), 3), &mut words).expect("the draw is in range");
    for shift in [0, 8, 16, 24] {
        let mut counts = [0_u64; 256];
        words.iter().for_each(|word| counts[(word >> shift & 0xff) as usize] += 1);
        let expected = N / 256.0;
        let chi_square: f64 = counts.iter().map(|count| (*count as f64 - expected).powi(2) / expected).sum();
        // With 255 degrees of freedom, chi-square has mean 255 and standard deviation 22.6. The range extends four
        // standard deviations on either side of the mean.
        assert!(
            (165.0..345.0).contains(&chi_square),
            "chi-square of the byte at bit {shift} is {chi_square}, wanted 165 to 345"
        );
    }
}

#[test]
fn bounded_integers_and_masks_have_the_right_frequencies() {
    let mut integers = vec![0; ROWS * ELEMENTS];
    Philox::new(15).fill_int(draw(Stream::Timestep, 0), 7, &mut integers).expect("the draw is in range");
    for value in 0..7 {
        let share = integers.iter().filter(|got| **got == value).count() as f64 / N;
        assert!(deviations(share, 1.0 / 7.0, 6.0 / 49.0) < 4.0, "the share of {value} is {share}, wanted nearly 1/7");
    }
    let mut mask = vec![false; ROWS * ELEMENTS];
    Philox::new(15).fill_mask(draw(Stream::Dropout(3), 0), 0.9, &mut mask).expect("the draw is in range");
    let kept = mask.iter().filter(|keep| **keep).count() as f64 / N;
    assert!(deviations(kept, 0.9, 0.09) < 4.0, "the share of kept elements is {kept}, wanted nearly 0.9");
}

/// To run this measurement: `cargo test --test data_plane -- --ignored --nocapture nanoseconds`.
#[test]
#[ignore = "prints a measurement"]
fn nanoseconds_per_number() {
    let mut normals = vec![0.0; 512 * 2304];
    let mut words = vec![0; 512 * 2304];
    let draw = Draw { stream: Stream::Noise, step: 0, first_sample: 0, elements: 2304 };
    let cost = |mut fill: Box<dyn FnMut(u64) + '_>| {
        let start = std::time::Instant::now();
        (0..20).for_each(&mut fill);
        start.elapsed().as_nanos() as f64 / (20.0 * 512.0 * 2304.0)
    };
    let normal = cost(Box::new(|step| {
        Philox::new(1).fill_normal(Draw { step, ..draw }, &mut normals).expect("the draw is in range")
    }));
    let bits = cost(Box::new(|step| {
        Philox::new(1).fill_bits(Draw { step, ..draw }, &mut words).expect("the draw is in range")
    }));
    println!("{normal:.2} ns per normal, {bits:.2} ns per 32-bit integer, one thread");
}
