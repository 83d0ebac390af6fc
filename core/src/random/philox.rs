//! Philox4x32-10: random numbers that are a function of where they are used, not of when they are drawn.
//!
//! Every number is named by (seed, stream, step, global sample, element), so that no number of workers, no split of
//! the batch and no restart changes it. The 64-bit key is the seed; the 128-bit counter packs the rest, and because
//! the packing is one-to-one, two different names never share a number:
//!
//! | counter word | bits  | holds                                    |
//! |--------------|-------|------------------------------------------|
//! | 0            | 0-31  | block = element / 4                      |
//! | 1            | 0-31  | global sample, bits 0-31                 |
//! | 2            | 0-31  | step, bits 0-31                          |
//! | 3            | 0-7   | step, bits 32-39                         |
//! | 3            | 8-15  | global sample, bits 32-39                |
//! | 3            | 16-31 | stream: kind in 6 bits, index in 10 bits |
//!
//! Element `e` is word `e % 4` of block `e / 4`. What does not fit is an error, never a wrap-around.
//!
//! The kernels in `kernels/philox.cu` do the same, line by line. Integers, uniforms and masks are equal to the bit on
//! CPU and GPU. Normals are too wherever the device follows IEEE 754 without contraction (the kernels are compiled
//! with `--fmad=false`): both sides evaluate the same polynomials in the same order. Callers should rely on equality
//! of normals to rounding only.
//!
//! Pure: no I/O, no FFI, no state. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
//! SC 2011; known answers from Random123's `kat_vectors`.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over lanes by index are the ones that become vector instructions"
)]

use std::f32::consts::{FRAC_1_SQRT_2, FRAC_PI_2};

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Weyl increments of the key: the golden ratio and √3 − 1.
const KEY_INCREMENTS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// Blocks computed together, so that the compiler uses vector instructions.
const LANES: usize = 32;
/// Four counter or result words of `LANES` blocks.
type Words = [[u32; LANES]; 4];

/// Steps lie below this.
pub const STEP_END: u64 = 1 << 40;
/// Global samples lie below this.
const SAMPLE_END: u64 = 1 << 40;
/// Elements of one sample lie below this.
const ELEMENT_END: u64 = 1 << 34;
/// Indices of a [`Stream`] lie below this.
const STREAM_INDEX_END: u16 = 1 << 10;

/// 2⁻²⁴: a 24-bit integer times this is exact in f32 and lies in [0, 1).
const UNIT_24: f32 = 1.0 / (1 << 24) as f32;
/// 2⁻³².
const UNIT_32: f32 = UNIT_24 / 256.0;

/// What the numbers are for. Streams never share a number. A new stream goes at the end: the order is part of the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stream {
    /// The Gaussian noise of the forward process.
    Noise,
    /// The diffusion timestep of a training sample.
    Timestep,
    /// Dropout masks of one layer.
    Dropout(u16),
    /// Anchor points of the loss.
    Anchors,
    /// Which view of an image a training sample shows.
    Views,
    /// Initial weights; the sample is the index of the parameter.
    Weights,
    /// The sampler's starting and intermediate noise.
    Sampler,
    /// Conditions dropped for classifier-free guidance.
    Guidance,
    /// Simulated data.
    Simulation,
    /// The order of training rows; the index tells shuffles of one epoch apart.
    Shuffle(u16),
    /// Rows of a bootstrap; the sample is the resample.
    Bootstrap,
    /// Tests and benchmarks.
    Test(u16),
}

impl Stream {
    /// The 16 bits that stand for this stream in the counter.
    pub fn id(self) -> Result<u32, RangeError> {
        let (kind, index) = match self {
            Self::Noise => (0, 0),
            Self::Timestep => (1, 0),
            Self::Dropout(layer) => (2, layer),
            Self::Anchors => (3, 0),
            Self::Views => (4, 0),
            Self::Weights => (5, 0),
            Self::Sampler => (6, 0),
            Self::Guidance => (7, 0),
            Self::Simulation => (8, 0),
            Self::Shuffle(index) => (9, index),
            Self::Bootstrap => (10, 0),
            Self::Test(index) => (63, index),
        };
        within("stream index", u64::from(index), u64::from(STREAM_INDEX_END))?;
        Ok(kind << 10 | u32::from(index))
    }
}

/// Which numbers to draw: rows `first_sample..` of `elements` numbers each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draw {
    /// What they are for.
    pub stream: Stream,
    /// The training step, or whatever counts the draws of the stream.
    pub step: u64,
    /// The global index of the first row.
    pub first_sample: u64,
    /// Numbers per row.
    pub elements: usize,
}

/// A part of a number's name that does not fit the counter, or numbers that cannot be drawn.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("random numbers: {0}")]
pub struct RangeError(String);

/// Whether `got` lies below `end`.
pub fn within(field: &str, got: u64, end: u64) -> Result<(), RangeError> {
    if got < end { Ok(()) } else { Err(RangeError(format!("{field} is {got}, wanted below {end}"))) }
}

/// A source of random numbers: the seed is its whole state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Philox {
    /// The key.
    pub seed: u64,
}

impl Philox {
    /// Random numbers of this seed.
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Uniform 32-bit integers.
    pub fn fill_bits(&self, draw: Draw, out: &mut [u32]) -> Result<(), RangeError> {
        self.fill(draw, out, |word| word)
    }

    /// Uniform in [0, 1): multiples of 2⁻²⁴, so that 1 is never drawn and 0 is drawn once in 2²⁴ times.
    pub fn fill_uniform(&self, draw: Draw, out: &mut [f32]) -> Result<(), RangeError> {
        self.fill(draw, out, |word| (word >> 8) as f32 * UNIT_24)
    }

    /// Standard normals by Box-Muller; the largest magnitude is 6.77.
    pub fn fill_normal(&self, draw: Draw, out: &mut [f32]) -> Result<(), RangeError> {
        self.fill_pairs(draw, out, box_muller)
    }

    /// Integers in `0..bound`, by multiply and shift: each is drawn with a probability within 2⁻³² of 1 / bound.
    pub fn fill_int(&self, draw: Draw, bound: u32, out: &mut [i64]) -> Result<(), RangeError> {
        some_integers(bound)?;
        self.fill(draw, out, |word| ((u64::from(word) * u64::from(bound)) >> 32) as i64)
    }

    /// Bernoulli: true with probability `keep`, rounded down to a multiple of 2⁻³²; 0 never and 1 always.
    pub fn fill_mask(&self, draw: Draw, keep: f64, out: &mut [bool]) -> Result<(), RangeError> {
        let threshold = mask_threshold(keep)?;
        self.fill(draw, out, |word| u64::from(word) < threshold)
    }

    /// Checks that rows `first_sample..first_sample + samples` have names, and returns the stream's id.
    pub fn check(draw: Draw, samples: u64) -> Result<u32, RangeError> {
        within("step", draw.step, STEP_END)?;
        within("first sample", draw.first_sample, SAMPLE_END)?;
        within("last sample", draw.first_sample + samples.saturating_sub(1), SAMPLE_END)?;
        within("elements", draw.elements as u64, ELEMENT_END + 1)?;
        draw.stream.id()
    }

    fn fill<T: Copy + Default>(&self, draw: Draw, out: &mut [T], convert: impl Fn(u32) -> T) -> Result<(), RangeError> {
        self.fill_pairs(draw, out, |first, second| (convert(first), convert(second)))
    }

    /// `convert` turns words 0 and 1 into elements 0 and 1, and words 2 and 3 into elements 2 and 3.
    fn fill_pairs<T: Copy + Default>(
        &self,
        draw: Draw,
        out: &mut [T],
        convert: impl Fn(u32, u32) -> (T, T),
    ) -> Result<(), RangeError> {
        if out.is_empty() {
            return Self::check(draw, 0).map(drop);
        }
        if draw.elements == 0 || !out.len().is_multiple_of(draw.elements) {
            let (got, elements) = (out.len(), draw.elements);
            return Err(RangeError(format!("{got} values are not whole rows of {elements} elements")));
        }
        let stream = Self::check(draw, (out.len() / draw.elements) as u64)?;
        let blocks = Blocks { draw, stream, sample: draw.first_sample, block: 0 };
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2, as was just asked.
            unsafe { fill_blocks_avx2(self.seed, blocks, out, convert) };
            return Ok(());
        }
        fill_blocks(self.seed, blocks, out, convert);
        Ok(())
    }
}

/// The same code as [`fill_blocks`], compiled for wider vectors: no operation is fused, so that every bit is the same.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn fill_blocks_avx2<T: Copy + Default>(seed: u64, blocks: Blocks, out: &mut [T], convert: impl Fn(u32, u32) -> (T, T)) {
    fill_blocks(seed, blocks, out, convert);
}

#[inline(always)]
fn fill_blocks<T: Copy + Default>(seed: u64, mut blocks: Blocks, out: &mut [T], convert: impl Fn(u32, u32) -> (T, T)) {
    let mut rest = out;
    let mut values = [[T::default(); LANES]; 4];
    while !rest.is_empty() {
        let first_block = blocks.block;
        let words = philox(blocks.counters(), seed);
        for pair in [0, 2] {
            for lane in 0..LANES {
                (values[pair][lane], values[pair + 1][lane]) = convert(words[pair][lane], words[pair + 1][lane]);
            }
        }
        let written = write(&values, blocks.draw.elements, first_block, rest);
        rest = &mut rest[written..];
    }
}

/// Whether there are integers in `0..bound`.
pub fn some_integers(bound: u32) -> Result<(), RangeError> {
    if bound > 0 { Ok(()) } else { Err(RangeError("integers below 0 were asked for".to_owned())) }
}

/// The threshold below which a 32-bit integer keeps its element.
pub fn mask_threshold(keep: f64) -> Result<u64, RangeError> {
    if !(0.0..=1.0).contains(&keep) {
        return Err(RangeError(format!("probability {keep} is not within 0 and 1")));
    }
    Ok((keep * 4_294_967_296.0) as u64)
}

/// Walks over the blocks of consecutive rows.
struct Blocks {
    draw: Draw,
    stream: u32,
    sample: u64,
    block: usize,
}

impl Blocks {
    /// The counters of the next `LANES` blocks; those past the last row are drawn and not used.
    #[inline(always)]
    fn counters(&mut self) -> Words {
        let blocks = self.draw.elements.div_ceil(4);
        let mut counters = [[0; LANES], [0; LANES], [self.draw.step as u32; LANES], [0; LANES]];
        let high_step = (self.draw.step >> 32) as u32;
        for lane in 0..LANES {
            counters[0][lane] = self.block as u32;
            counters[1][lane] = self.sample as u32;
            counters[3][lane] = self.stream << 16 | ((self.sample >> 32) as u32 & 0xff) << 8 | high_step;
            self.block += 1;
            if self.block == blocks {
                self.block = 0;
                self.sample += 1;
            }
        }
        counters
    }
}

/// Writes lane after lane, each block cut at the end of its row; returns how many values fitted.
#[inline(always)]
fn write<T: Copy>(values: &[[T; LANES]; 4], elements: usize, first_block: usize, out: &mut [T]) -> usize {
    if elements.is_multiple_of(4) && out.len() >= 4 * LANES {
        for (lane, four) in out[..4 * LANES].chunks_exact_mut(4).enumerate() {
            four.copy_from_slice(&[values[0][lane], values[1][lane], values[2][lane], values[3][lane]]);
        }
        return 4 * LANES;
    }
    let blocks = elements.div_ceil(4);
    let (mut block, mut position) = (first_block, 0);
    for lane in 0..LANES {
        let count = (elements - 4 * block).min(4).min(out.len() - position);
        for word in 0..count {
            out[position + word] = values[word][lane];
        }
        position += count;
        block = if block + 1 == blocks { 0 } else { block + 1 };
    }
    position
}

/// The function itself, on `LANES` counters at once.
#[inline(always)]
fn philox(mut counter: Words, seed: u64) -> Words {
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..ROUNDS {
        for lane in 0..LANES {
            let first = u64::from(MULTIPLIERS[0]) * u64::from(counter[0][lane]);
            let second = u64::from(MULTIPLIERS[1]) * u64::from(counter[2][lane]);
            counter[0][lane] = (second >> 32) as u32 ^ counter[1][lane] ^ key[0];
            counter[1][lane] = second as u32;
            counter[2][lane] = (first >> 32) as u32 ^ counter[3][lane] ^ key[1];
            counter[3][lane] = first as u32;
        }
        key = [key[0].wrapping_add(KEY_INCREMENTS[0]), key[1].wrapping_add(KEY_INCREMENTS[1])];
    }
    counter
}

/// Two independent standard normals.
#[inline(always)]
fn box_muller(radius_bits: u32, angle_bits: u32) -> (f32, f32) {
    // In (0, 1]: all 32 bits, because the tail of the normal comes from the values nearest to 0.
    let uniform = radius_bits as f32 * UNIT_32 + UNIT_32 * 0.5;
    let radius = (-2.0 * ln_unit(uniform)).sqrt();
    let (sine, cosine) = sin_cos_turns(angle_bits >> 8);
    (radius * cosine, radius * sine)
}

/// Natural logarithm of a normal number in (0, 1], to 2 units in the last place (Cephes `logf`).
#[inline(always)]
fn ln_unit(x: f32) -> f32 {
    let bits = x.to_bits();
    // Mantissa in [0.5, 1), then in [√½, √2).
    let mantissa = f32::from_bits(bits & 0x007f_ffff | 0x3f00_0000);
    let low = mantissa < FRAC_1_SQRT_2;
    let exponent = (bits >> 23) as i32 - 126 - i32::from(low);
    let exponent = exponent as f32;
    let x = if low { mantissa + mantissa } else { mantissa } - 1.0;
    let square = x * x;
    let mut y = 7.037_683_6e-2;
    y = y * x - 1.151_461e-1;
    y = y * x + 1.167_699_8e-1;
    y = y * x - 1.242_014_1e-1;
    y = y * x + 1.424_932_3e-1;
    y = y * x - 1.666_805_8e-1;
    y = y * x + 2.000_071_5e-1;
    y = y * x - 2.499_999_4e-1;
    y = y * x + 3.333_333e-1;
    y = y * x * square;
    // ln 2 in two parts: the large one times any exponent is exact.
    y += exponent * -2.121_944_4e-4;
    y += square * -0.5;
    x + y + exponent * 0.693_359_4
}

/// Sine and cosine of `turn` / 2²⁴ of a full turn (Cephes `sinf`, `cosf`).
#[inline(always)]
fn sin_cos_turns(turn: u32) -> (f32, f32) {
    // The nearest quarter turn is taken off in integers, which is exact.
    let quarter = (turn + (1 << 21)) >> 22;
    let rest = turn as i32 - (quarter << 22) as i32;
    let angle = rest as f32 * (FRAC_PI_2 / (1 << 22) as f32);
    let square = angle * angle;
    let sine = ((square * -1.951_529_6e-4 + 8.332_161e-3) * square - 1.666_665_5e-1) * square * angle + angle;
    let cosine =
        ((square * 2.443_315_7e-5 - 1.388_731_6e-3) * square + 4.166_664_6e-2) * square * square - square * 0.5 + 1.0;
    let (sine, cosine) = if quarter & 1 == 1 { (cosine, sine) } else { (sine, cosine) };
    let sine = if quarter & 2 == 2 { -sine } else { sine };
    let cosine = if (quarter + 1) & 2 == 2 { -cosine } else { cosine };
    (sine, cosine)
}

#[cfg(test)]
#[path = "philox_tests.rs"]
mod tests;
