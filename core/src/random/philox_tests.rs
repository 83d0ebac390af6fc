//! Tests of Philox: known answers, and properties that are quick to check under Miri. Statistical tests are in
//! `tests/data_plane/core/philox.rs`.

use super::*;

const DRAW: Draw = Draw { stream: Stream::Noise, step: 7, first_sample: 3, elements: 5 };

/// The four result words for one counter. Every lane gets this counter, and all lanes must give the same result.
fn one(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let words = philox(counter.map(|word| [word; LANES]), u64::from(key[1]) << 32 | u64::from(key[0]));
    assert!(words.iter().all(|lanes| lanes.iter().all(|word| *word == lanes[0])));
    words.map(|lanes| lanes[0])
}

#[test]
fn philox_matches_the_known_answers_of_random123() {
    assert_eq!(one([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    assert_eq!(one([!0; 4], [!0; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
    let answer = [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1];
    assert_eq!(one(pi, [0xa409_3822, 0x299f_31d0]), answer);
}

#[test]
fn counter_fields_are_laid_out_as_documented() {
    let draw =
        Draw { stream: Stream::Dropout(5), step: 0x12_3456_789a, first_sample: 0xab_cdef_0123, elements: 4 * LANES };
    let mut out = vec![0; draw.elements];
    Philox::new(0x0123_4567_89ab_cdef).fill_bits(draw, &mut out).expect("the draw is in range");
    let stream = 2 << 10 | 5;
    let counter = [9, 0xcdef_0123, 0x3456_789a, stream << 16 | 0xab << 8 | 0x12];
    assert_eq!(out[36..40], one(counter, [0x89ab_cdef, 0x0123_4567]));
}

#[test]
fn rows_do_not_depend_on_how_they_are_split() {
    let philox = Philox::new(42);
    for elements in [1, 3, 4, 5, 8, 63, 64, 65, 130] {
        let draw = |first_sample| Draw { first_sample, elements, ..DRAW };
        let mut whole = vec![0.0; 8 * elements];
        philox.fill_normal(draw(100), &mut whole).expect("the draw is in range");
        for cut in [0, 1, 4, 7] {
            let mut parts = vec![0.0; 8 * elements];
            let (left, right) = parts.split_at_mut(cut * elements);
            philox.fill_normal(draw(100), left).expect("the draw is in range");
            philox.fill_normal(draw(100 + cut as u64), right).expect("the draw is in range");
            assert_eq!(whole, parts, "{elements} elements per row: a cut at row {cut} changed the numbers");
        }
    }
}

#[test]
fn a_longer_row_starts_with_the_numbers_of_a_shorter_one() {
    let mut short = [0; 6];
    let mut long = [0; 9];
    Philox::new(1).fill_bits(Draw { elements: 6, ..DRAW }, &mut short).expect("the draw is in range");
    Philox::new(1).fill_bits(Draw { elements: 9, ..DRAW }, &mut long).expect("the draw is in range");
    assert_eq!(short, long[..6]);
}

#[test]
fn seed_stream_step_and_sample_each_change_the_numbers() {
    let draws = [
        (1, DRAW),
        (2, DRAW),
        (1 << 32, DRAW),
        (1, Draw { stream: Stream::Timestep, ..DRAW }),
        (1, Draw { stream: Stream::Dropout(0), ..DRAW }),
        (1, Draw { stream: Stream::Dropout(1), ..DRAW }),
        (1, Draw { stream: Stream::Simulation, ..DRAW }),
        (1, Draw { stream: Stream::Shuffle(0), ..DRAW }),
        (1, Draw { stream: Stream::Shuffle(1), ..DRAW }),
        (1, Draw { step: 8, ..DRAW }),
        (1, Draw { step: 7 | 1 << 32, ..DRAW }),
        (1, Draw { first_sample: 4, ..DRAW }),
        (1, Draw { first_sample: 3 | 1 << 32, ..DRAW }),
    ];
    let mut seen = std::collections::HashSet::new();
    for (seed, draw) in draws {
        let mut out = [0; 5];
        Philox::new(seed).fill_bits(draw, &mut out).expect("the draw is in range");
        assert!(seen.insert(out), "seed {seed}: {draw:?} repeats another draw");
    }
}

/// Changing a stream's id would change the random numbers of every existing run.
#[test]
fn stream_ids_never_change() {
    let streams =
        [Stream::Noise, Stream::Timestep, Stream::Dropout(0), Stream::Anchors, Stream::Views, Stream::Weights];
    let more_streams = [
        Stream::Sampler,
        Stream::Guidance,
        Stream::Simulation,
        Stream::Shuffle(0),
        Stream::Bootstrap,
        Stream::Negatives,
    ];
    for (kind, stream) in streams.into_iter().chain(more_streams).enumerate() {
        assert_eq!(stream.id(), Ok((kind as u32) << 10), "{stream:?}");
    }
    assert_eq!(Stream::Shuffle(1).id(), Ok(9 << 10 | 1));
    assert_eq!(Stream::Test(5).id(), Ok(63 << 10 | 5));
}

#[test]
fn values_that_do_not_fit_the_counter_are_an_error() {
    let mut out = [0; 5];
    let mut refused = |draw| Philox::new(0).fill_bits(draw, &mut out).expect_err("the draw is invalid").to_string();
    assert!(refused(Draw { step: STEP_END, ..DRAW }).contains("step is 1099511627776"));
    assert!(refused(Draw { first_sample: SAMPLE_END, ..DRAW }).contains("first sample"));
    assert!(refused(Draw { stream: Stream::Dropout(1024), ..DRAW }).contains("stream index is 1024"));
    assert!(refused(Draw { elements: 3, ..DRAW }).contains("got 5 values, wanted whole rows of 3"));
    assert!(refused(Draw { first_sample: SAMPLE_END - 4, elements: 1, ..DRAW }).contains("last sample"));
    let philox = Philox::new(0);
    let error = philox.fill_int(DRAW, 0, &mut [0; 5]).expect_err("the range is empty");
    assert_eq!(error.to_string(), "random numbers: upper bound is 0, wanted at least 1");
    assert!(philox.fill_mask(DRAW, f64::NAN, &mut [false; 5]).is_err());
    assert_eq!(philox.fill_bits(Draw { elements: 0, ..DRAW }, &mut []), Ok(()));
}

#[test]
fn uniforms_integers_and_masks_are_derived_from_the_bits() {
    let philox = Philox::new(9);
    let (mut bits, mut uniform, mut int, mut mask) = ([0; 5], [0.0; 5], [0; 5], [false; 5]);
    philox.fill_bits(DRAW, &mut bits).expect("the draw is in range");
    philox.fill_uniform(DRAW, &mut uniform).expect("the draw is in range");
    philox.fill_int(DRAW, 1000, &mut int).expect("the draw is in range");
    philox.fill_mask(DRAW, 0.5, &mut mask).expect("the draw is in range");
    for i in 0..5 {
        assert_eq!(uniform[i], (bits[i] >> 8) as f32 / 16_777_216.0);
        assert_eq!(int[i], (f64::from(bits[i]) / 4_294_967_296.0 * 1000.0) as i64);
        assert_eq!(mask[i], bits[i] < 1 << 31);
    }
    philox.fill_mask(DRAW, 1.0, &mut mask).expect("the draw is in range");
    assert_eq!(mask, [true; 5]);
    philox.fill_mask(DRAW, 0.0, &mut mask).expect("the draw is in range");
    assert_eq!(mask, [false; 5]);
}

#[test]
fn box_muller_agrees_with_f64() {
    let cases = [0, 1, 0x7fff_ffff, 0x8000_0000, 0xffff_ff00, !0, 0x2000_0000, 0x1234_5678, 0xdead_beef];
    for radius_bits in cases {
        for angle_bits in cases {
            let (first, second) = box_muller(radius_bits, angle_bits);
            let uniform = f64::from(radius_bits as f32 * UNIT_32 + UNIT_32 * 0.5);
            let radius = (-2.0 * uniform.ln()).sqrt();
            let angle = f64::from(angle_bits >> 8) / 16_777_216.0 * std::f64::consts::TAU;
            // The tolerance is five units in the last place of the radius: two for the logarithm, two for the sine, and
            // one for the product.
            let tolerance = radius * 6e-7 + 1e-12;
            assert!(
                (f64::from(first) - radius * angle.cos()).abs() < tolerance,
                "the first normal of bits {radius_bits:x} and {angle_bits:x} is {first}, which is inaccurate"
            );
            assert!(
                (f64::from(second) - radius * angle.sin()).abs() < tolerance,
                "the second normal of bits {radius_bits:x} and {angle_bits:x} is {second}, which is inaccurate"
            );
        }
    }
}
