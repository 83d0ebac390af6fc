//! Philox4x32-10, a counter-based generator: each number is a function of its position, not of the numbers drawn before
//! it.
//!
//! Every number is a function of (seed, stream, step, global sample, element). It therefore does not depend on the
//! number of workers, on how the batch is split, or on restarts. The 64-bit key is the seed. The 128-bit counter
//! contains the stream, the step, the global sample and the block of four elements. The packing is one-to-one, so
//! different blocks never share a counter:
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
//! Element `e` is word `e % 4` of block `e / 4`. A value that does not fit its field is an error; nothing wraps around.
//!
//! The kernels in `kernels/philox.cu` mirror this code line by line. Integers, uniforms and masks are equal to the bit
//! on CPU and GPU. On devices that follow IEEE 754, normals are equal to the bit too: CPU and GPU evaluate the same
//! polynomials in the same order, and `--fmad=false` keeps the CUDA compiler from fusing multiplications and additions.
//! Callers should nevertheless assume only that normals are equal up to rounding.
//!
//! The code is pure: it has no I/O, no FFI and no state. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers:
//! as easy as 1, 2, 3", SC 2011; known answers from Random123's `kat_vectors`.
#![allow(
    clippy::needless_range_loop,
    reason = "the compiler vectorises loops over lanes when they are written by index"
)]

use std::f32::consts::{FRAC_1_SQRT_2, FRAC_PI_2};

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Weyl increments of the key, from the golden ratio and √3 − 1.
const KEY_INCREMENTS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// Number of blocks computed together, so that the compiler emits vector instructions.
const LANES: usize = 32;
/// The four counter words, or the four result words, of `LANES` blocks.
type Words = [[u32; LANES]; 4];

/// Exclusive upper bound of the step.
pub const STEP_END: u64 = 1 << 40;
/// Exclusive upper bound of the index of a global sample.
const SAMPLE_END: u64 = 1 << 40;
/// Exclusive upper bound of the index of an element within a sample.
const ELEMENT_END: u64 = 1 << 34;
/// Exclusive upper bound of the index of a [`Stream`].
const STREAM_INDEX_END: u16 = 1 << 10;

/// 2⁻²⁴. The product of a 24-bit integer and this number is exact in f32 and lies in [0, 1).
const UNIT_24: f32 = 1.0 / (1 << 24) as f32;
/// 2⁻³².
const UNIT_32: f32 = UNIT_24 / 256.0;

/// The purpose of the numbers. Different streams have different counters, so their numbers are independent. A new
/// stream gets the next free kind in [`Stream::id`]. Existing kinds must stay the same, because a changed kind would
/// change the random numbers of every run.
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
    /// Which view of its image a training sample uses.
    Views,
    /// Initial weights. The sample number of a draw is the index of the parameter.
    Weights,
    /// The sampler's starting and intermediate noise.
    Sampler,
    /// Which conditions are dropped for classifier-free guidance.
    Guidance,
    /// Simulated data.
    Simulation,
    /// The order of training rows; the index distinguishes the shuffles of one epoch.
    Shuffle(u16),
    /// The places that a bootstrap draws. The sample number of a draw is the index of the resample.
    Bootstrap,
    /// The gallery points that serve as wrong answers in GeoCLIP's loss.
    Negatives,
    /// Tests and benchmarks.
    Test(u16),
}

impl Stream {
    /// The 16 bits that identify this stream in the counter.
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
            Self::Negatives => (11, 0),
            Self::Test(index) => (63, index),
        };
        check_below("stream index", u64::from(index), u64::from(STREAM_INDEX_END))?;
        Ok(kind << 10 | u32::from(index))
    }
}

/// Which numbers to draw: rows of `elements` numbers each, beginning with row `first_sample`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draw {
    /// The purpose of the numbers.
    pub stream: Stream,
    /// The training step, or another counter that distinguishes the draws of the stream.
    pub step: u64,
    /// The global index of the first row.
    pub first_sample: u64,
    /// Numbers per row.
    pub elements: usize,
}

/// A value that does not fit its field of the counter, or an invalid parameter of a distribution.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("random numbers: {0}")]
pub struct RangeError(String);

/// Returns an error that names `field` unless `got` is below `end`.
pub fn check_below(field: &str, got: u64, end: u64) -> Result<(), RangeError> {
    if got < end { Ok(()) } else { Err(RangeError(format!("{field} is {got}, wanted less than {end}"))) }
}

/// A source of random numbers. The seed is its whole state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Philox {
    /// The seed, which is the key of Philox.
    pub seed: u64,
}

impl Philox {
    /// Creates a generator with this seed.
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Fills `out` with uniform 32-bit integers.
    pub fn fill_bits(&self, draw: Draw, out: &mut [u32]) -> Result<(), RangeError> {
        self.fill(draw, out, |word| word)
    }

    /// Fills `out` with uniform numbers in [0, 1), all multiples of 2⁻²⁴. 1 is never drawn, and 0 has the probability
    /// 2⁻²⁴.
    pub fn fill_uniform(&self, draw: Draw, out: &mut [f32]) -> Result<(), RangeError> {
        self.fill(draw, out, |word| (word >> 8) as f32 * UNIT_24)
    }

    /// Fills `out` with standard normals by Box-Muller. All magnitudes are below 6.77.
    pub fn fill_normal(&self, draw: Draw, out: &mut [f32]) -> Result<(), RangeError> {
        self.fill_pairs(draw, out, box_muller)
    }

    /// Fills `out` with integers in `0..bound`, by multiply and shift. The probability of each integer is within 2⁻³²
    /// of 1 / bound.
    pub fn fill_int(&self, draw: Draw, bound: u32, out: &mut [i64]) -> Result<(), RangeError> {
        check_int_bound(bound)?;
        self.fill(draw, out, |word| ((u64::from(word) * u64::from(bound)) >> 32) as i64)
    }

    /// Fills `out` with Bernoulli draws: true with probability `keep`, rounded down to a multiple of 2⁻³². The
    /// probabilities 0 and 1 are exact.
    pub fn fill_mask(&self, draw: Draw, keep: f64, out: &mut [bool]) -> Result<(), RangeError> {
        let threshold = mask_threshold(keep)?;
        self.fill(draw, out, |word| u64::from(word) < threshold)
    }

    /// Checks that the step, the elements and the rows `first_sample..first_sample + samples` fit into the counter, and
    /// returns the stream's id.
    pub fn check(draw: Draw, samples: u64) -> Result<u32, RangeError> {
        check_below("step", draw.step, STEP_END)?;
        check_below("first sample", draw.first_sample, SAMPLE_END)?;
        check_below("last sample", draw.first_sample + samples.saturating_sub(1), SAMPLE_END)?;
        check_below("elements", draw.elements as u64, ELEMENT_END + 1)?;
        draw.stream.id()
    }

    fn fill<T: Copy + Default>(&self, draw: Draw, out: &mut [T], convert: impl Fn(u32) -> T) -> Result<(), RangeError> {
        self.fill_pairs(draw, out, |first, second| (convert(first), convert(second)))
    }

    /// Fills `out` block by block. `convert` turns words 0 and 1 of a block into elements 0 and 1, and words 2 and 3
    /// into elements 2 and 3.
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
            return Err(RangeError(format!("got {got} values, wanted whole rows of {elements} elements")));
        }
        let stream = Self::check(draw, (out.len() / draw.elements) as u64)?;
        let blocks = RowBlocks { draw, stream, sample: draw.first_sample, block: 0 };
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: `is_x86_feature_detected!` has found that the processor supports AVX2.
            unsafe { fill_blocks_avx2(self.seed, blocks, out, convert) };
            return Ok(());
        }
        fill_blocks(self.seed, blocks, out, convert);
        Ok(())
    }
}

/// The same code as [`fill_blocks`], compiled for wider vectors. No operations are fused, so both functions give the
/// same bits.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn fill_blocks_avx2<T: Copy + Default>(
    seed: u64,
    blocks: RowBlocks,
    out: &mut [T],
    convert: impl Fn(u32, u32) -> (T, T),
) {
    fill_blocks(seed, blocks, out, convert);
}

#[inline(always)]
fn fill_blocks<T: Copy + Default>(
    seed: u64,
    mut blocks: RowBlocks,
    out: &mut [T],
    convert: impl Fn(u32, u32) -> (T, T),
) {
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

/// Returns an error if `0..bound` is empty.
pub fn check_int_bound(bound: u32) -> Result<(), RangeError> {
    if bound > 0 { Ok(()) } else { Err(RangeError("upper bound is 0, wanted at least 1".to_owned())) }
}

/// The threshold of a mask: an element is kept if its 32-bit integer is below the threshold.
pub fn mask_threshold(keep: f64) -> Result<u64, RangeError> {
    if !(0.0..=1.0).contains(&keep) {
        return Err(RangeError(format!("probability of keeping is {keep}, wanted 0 to 1")));
    }
    Ok((keep * 4_294_967_296.0) as u64)
}

/// Iterates over the blocks of four elements, row by row. A row holds the elements of one sample.
struct RowBlocks {
    draw: Draw,
    stream: u32,
    sample: u64,
    block: usize,
}

impl RowBlocks {
    /// The counters of the next `LANES` blocks. Blocks past the last row are computed but not used.
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

/// Writes the blocks of all lanes, one lane after another. A block that reaches beyond the end of its row is truncated.
/// Returns the number of values written.
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

/// The Philox function, on `LANES` counters at once.
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
    // A number in (0, 1]. It uses all 32 bits, because the values nearest to 0 produce the tail of the normal
    // distribution.
    let uniform = radius_bits as f32 * UNIT_32 + UNIT_32 * 0.5;
    let radius = (-2.0 * ln_unit(uniform)).sqrt();
    let (sine, cosine) = sin_cos_turns(angle_bits >> 8);
    (radius * cosine, radius * sine)
}

/// Natural logarithm of a normal floating-point number in (0, 1]. The error is at most 2 units in the last place
/// (Cephes `logf`).
#[inline(always)]
fn ln_unit(x: f32) -> f32 {
    let bits = x.to_bits();
    // The mantissa lies in [0.5, 1). A mantissa less than √½ is doubled, so that the result lies in [√½, √2).
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
    // ln 2 is split into two parts, so that the product of the larger part and any exponent is exact.
    y += exponent * -2.121_944_4e-4;
    y += square * -0.5;
    x + y + exponent * 0.693_359_4
}

/// Sine and cosine of an angle of `turn` / 2²⁴ full turns (Cephes `sinf`, `cosf`).
#[inline(always)]
fn sin_cos_turns(turn: u32) -> (f32, f32) {
    // Subtract the nearest multiple of a quarter turn. Integer arithmetic makes this exact.
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
