//! Uniform random points on the sphere, used as the anchors of the loss.
//!
//! A point depends only on (stream, seed, step, index), so it does not depend on how the anchors are split over ranks.
//! Each point uses four random words of 32 bits from Philox: two give 53 bits of the height, and two give 53 bits of
//! the angle.

use std::f64::consts::TAU;

use locdiff_core::geo::UnitVector;
use locdiff_core::random::{Draw, Philox, RangeError, Stream};

/// 2⁻⁵³.
const UNIT_53: f64 = 1.0 / (1_u64 << 53) as f64;

/// The points with the indices `first..first + count` of one step, drawn from [`Stream::Anchors`].
pub fn uniform_points(seed: u64, step: u64, first: u64, count: usize) -> Result<Vec<UnitVector>, RangeError> {
    uniform_points_of(Stream::Anchors, seed, step, first, count)
}

/// Like [`uniform_points`], but drawn from any stream.
pub fn uniform_points_of(
    stream: Stream,
    seed: u64,
    step: u64,
    first: u64,
    count: usize,
) -> Result<Vec<UnitVector>, RangeError> {
    let mut words = vec![0; 4 * count];
    Philox::new(seed).fill_bits(Draw { stream, step, first_sample: first, elements: 4 }, &mut words)?;
    let unit = |high: u32, low: u32| ((u64::from(high) << 32 | u64::from(low)) >> 11) as f64 * UNIT_53;
    let point = |word: &[u32]| {
        let (height, angle) = (2.0 * unit(word[0], word[1]) - 1.0, TAU * unit(word[2], word[3]));
        UnitVector::from_height(height, angle).expect("a uniform number in [0, 1) gives a height in [-1, 1)")
    };
    Ok(words.chunks_exact(4).map(point).collect())
}
