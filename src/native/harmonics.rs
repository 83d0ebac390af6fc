//! The inner loops that compute spherical harmonics, for eight points at a time.
//!
//! `shdd::harmonics` explains the formulas. The outer loop runs over the degree l, the inner loop over the order m. The
//! recursions of all orders advance together, and their state stays in the L1 cache. Each degree l gives 2l + 1
//! adjacent coefficients, which are written to a tile of coefficients × points. When the tile is full, it is transposed
//! into the rows of the output, one row per point.
//!
//! Invariant: on every processor, each point is computed by the operations of `Basis::encode_scalar`, in the same order
//! and without fused multiply-add. The same code is compiled for several vector lengths. Only the transposition of f32
//! is written by hand for AVX, because the compiler would move the elements one by one on some processors.
#![allow(clippy::needless_range_loop, reason = "the compiler turns loops over lane indices into vector instructions")]

/// Number of points that are computed together. Their f64 values fill one register of AVX-512, or two of AVX2.
const LANES: usize = 8;
/// A tile is transposed when it holds at least this many coefficients of each point. In f32, this many coefficients of
/// [`LANES`] points take 16 KiB, a third of an L1 cache of 48 KiB.
const TILE: usize = 512;

/// The coefficients of the recursion.
#[derive(Debug, Clone, Copy)]
pub struct Tables<'a> {
    /// At index m, for m = 0..=L: the constant p_mm, from which the recursion of order m starts.
    pub sectoral: &'a [f64],
    /// The factors `[a_lm, b_lm]` of the recursion, at index l (l + 1) / 2 + m.
    pub recursion: &'a [[f64; 2]],
}

/// Number type of the codes.
pub trait Element: Copy + Default + Send + Sync {
    /// Rounds an f64 to this type.
    fn narrow(value: f64) -> Self;

    /// Transposes a square matrix. Uses AVX instructions if they are faster for this type.
    ///
    /// # Safety
    /// The processor must have AVX.
    #[cfg(target_arch = "x86_64")]
    unsafe fn transpose_avx(tile: &[[Self; LANES]; LANES]) -> [[Self; LANES]; LANES];
}

impl Element for f64 {
    #[inline(always)]
    fn narrow(value: f64) -> Self {
        value
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn transpose_avx(tile: &[[Self; LANES]; LANES]) -> [[Self; LANES]; LANES] {
        transpose(tile)
    }
}

impl Element for f32 {
    #[inline(always)]
    fn narrow(value: f64) -> Self {
        value as Self
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn transpose_avx(tile: &[[Self; LANES]; LANES]) -> [[Self; LANES]; LANES] {
        // SAFETY: the caller guarantees AVX.
        unsafe { transpose_f32_avx(tile) }
    }
}

/// Encodes points. Row i of `out` receives the (L + 1)² coefficients of `point(i)`.
pub fn encode<T: Element>(tables: Tables<'_>, point: impl Fn(usize) -> [f64; 3], out: &mut [T]) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
            // SAFETY: the processor has AVX-512F and AVX-512DQ, as checked on the line above.
            return unsafe { encode_avx512(tables, point, out) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2, as checked on the line above.
            return unsafe { encode_avx2(tables, point, out) };
        }
    }
    encode_lanes(tables, point, transpose, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq")]
fn encode_avx512<T: Element>(tables: Tables<'_>, point: impl Fn(usize) -> [f64; 3], out: &mut [T]) {
    // SAFETY: AVX-512 includes AVX.
    encode_lanes(tables, point, |tile| unsafe { T::transpose_avx(tile) }, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn encode_avx2<T: Element>(tables: Tables<'_>, point: impl Fn(usize) -> [f64; 3], out: &mut [T]) {
    // SAFETY: AVX2 includes AVX.
    encode_lanes(tables, point, |tile| unsafe { T::transpose_avx(tile) }, out);
}

/// One f64 per point. The alignment ensures that no load or store crosses a cache line.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Wide([f64; LANES]);

/// One coefficient per point, as stored in a tile. With f32 numbers, the size is 32 bytes, which equals the alignment.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(32))]
struct Narrow<T>([T; LANES]);

/// State of the recursion of one order m.
#[derive(Debug, Clone, Copy)]
struct OrderState {
    /// Re (x + iy)^m.
    cosine: Wide,
    /// Im (x + iy)^m.
    sine: Wide,
    /// p_(l-1)m before the step to degree l, and p_lm after it.
    old: Wide,
    /// p_(l-2)m before the step to degree l, and p_(l-1)m after it.
    older: Wide,
}

#[inline(always)]
fn encode_lanes<T: Element>(
    tables: Tables<'_>,
    point: impl Fn(usize) -> [f64; 3],
    transpose: impl Fn(&[[T; LANES]; LANES]) -> [[T; LANES]; LANES],
    out: &mut [T],
) {
    let width = tables.sectoral.len();
    let dims = width * width;
    let zero = Wide([0.0; LANES]);
    let mut orders = vec![OrderState { cosine: zero, sine: zero, old: zero, older: zero }; width];
    let mut tile = vec![Narrow([T::default(); LANES]); TILE + 2 * width];
    for (block, rows) in out.chunks_mut(LANES * dims).enumerate() {
        let mut axes = [zero; 3];
        for lane in 0..rows.len() / dims {
            let xyz = point(block * LANES + lane);
            (0..3).for_each(|axis| axes[axis].0[lane] = xyz[axis]);
        }
        start_orders(&mut orders, tables.sectoral, &axes[0], &axes[1]);
        let (mut first, mut filled) = (0, 0);
        for l in 0..width {
            let next = filled + 2 * l + 1;
            let recursion = &tables.recursion[l * (l + 1) / 2..][..l];
            degree(recursion, &mut orders[..=l], &axes[2], &mut tile[filled..next]);
            filled = next;
            if filled >= TILE || l + 1 == width {
                write_rows(&tile[..filled], &transpose, rows, dims, first);
                first += filled;
                filled = 0;
            }
        }
    }
}

/// For every order m, computes (x + iy)^m and stores p_mm, from which the recursion of this order starts.
#[inline(always)]
fn start_orders(orders: &mut [OrderState], sectoral: &[f64], x: &Wide, y: &Wide) {
    let (mut cosine, mut sine) = (Wide([1.0; LANES]), Wide([0.0; LANES]));
    for (order, start) in orders.iter_mut().zip(sectoral) {
        *order = OrderState { cosine, sine, old: Wide([*start; LANES]), older: Wide([0.0; LANES]) };
        let (c, s) = (cosine.0, sine.0);
        for lane in 0..LANES {
            cosine.0[lane] = c[lane] * x.0[lane] - s[lane] * y.0[lane];
            sine.0[lane] = s[lane] * x.0[lane] + c[lane] * y.0[lane];
        }
    }
}

/// Computes one degree l: advances the recursions of the orders m < l, takes the start value p_ll for m = l, and writes
/// 2l + 1 coefficients into `tile`.
#[inline(always)]
fn degree<T: Element>(recursion: &[[f64; 2]], orders: &mut [OrderState], z: &Wide, tile: &mut [Narrow<T>]) {
    let l = recursion.len();
    let (negative, positive) = tile.split_at_mut(l);
    let (last, orders) = orders.split_last_mut().expect("degree l has l + 1 orders");
    if let Some(sine) = negative.first_mut() {
        *sine = product(&last.old, &last.sine);
    }
    positive[l] = product(&last.old, &last.cosine);
    let Some((zonal, orders)) = orders.split_first_mut() else { return };
    advance(recursion[0], zonal, z);
    positive[0] = product(&zonal.old, &zonal.cosine);
    let outputs = positive[1..].iter_mut().zip(negative[1..].iter_mut().rev());
    for ((order, coefficients), (cosine, sine)) in orders.iter_mut().zip(&recursion[1..]).zip(outputs) {
        advance(*coefficients, order, z);
        *cosine = product(&order.old, &order.cosine);
        *sine = product(&order.old, &order.sine);
    }
}

#[inline(always)]
fn advance([a, b]: [f64; 2], order: &mut OrderState, z: &Wide) {
    let (old, older) = (order.old.0, order.older.0);
    let mut new = [0.0; LANES];
    for lane in 0..LANES {
        new[lane] = a * z.0[lane] * old[lane] - b * older[lane];
    }
    (order.older, order.old) = (Wide(old), Wide(new));
}

#[inline(always)]
fn product<T: Element>(legendre: &Wide, power: &Wide) -> Narrow<T> {
    let mut out = [T::default(); LANES];
    for lane in 0..LANES {
        out[lane] = T::narrow(legendre.0[lane] * power.0[lane]);
    }
    Narrow(out)
}

/// Transposes a tile into the rows of the output. The tile begins with coefficient `first`.
#[inline(always)]
fn write_rows<T: Element>(
    tile: &[Narrow<T>],
    transpose: &impl Fn(&[[T; LANES]; LANES]) -> [[T; LANES]; LANES],
    rows: &mut [T],
    dims: usize,
    first: usize,
) {
    let whole = if rows.len() == LANES * dims { tile.len() / LANES * LANES } else { 0 };
    for (index, square) in tile[..whole].chunks_exact(LANES).enumerate() {
        let transposed = transpose(&std::array::from_fn(|row| square[row].0));
        for (lane, values) in transposed.iter().enumerate() {
            let at = lane * dims + first + index * LANES;
            rows[at..at + LANES].copy_from_slice(values);
        }
    }
    for (lane, row) in rows.chunks_exact_mut(dims).enumerate() {
        let rest = &mut row[first + whole..first + tile.len()];
        rest.iter_mut().zip(&tile[whole..]).for_each(|(out, values)| *out = values.0[lane]);
    }
}

#[inline(always)]
fn transpose<T: Element>(tile: &[[T; LANES]; LANES]) -> [[T; LANES]; LANES] {
    std::array::from_fn(|row| std::array::from_fn(|column| tile[column][row]))
}

/// Each register first receives four elements of row i in its lower half and four of row i + 4 in its upper half. Two
/// rounds of shuffles within the halves then complete the transposition.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx")]
fn transpose_f32_avx(tile: &[[f32; LANES]; LANES]) -> [[f32; LANES]; LANES] {
    use std::arch::x86_64::{
        __m128, _mm256_set_m128, _mm256_setzero_ps, _mm256_shuffle_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps,
    };
    // SAFETY: both types have the same size, and every bit pattern is valid for both.
    let halves: [[__m128; 2]; LANES] = unsafe { std::mem::transmute(*tile) };
    let mut out = [_mm256_setzero_ps(); LANES];
    for half in 0..2 {
        let pair = |row: usize| _mm256_set_m128(halves[row + 4][half], halves[row][half]);
        let (a, b, c, d) = (pair(0), pair(1), pair(2), pair(3));
        let (low, high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let (low_next, high_next) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        out[4 * half] = _mm256_shuffle_ps::<0x44>(low, low_next);
        out[4 * half + 1] = _mm256_shuffle_ps::<0xee>(low, low_next);
        out[4 * half + 2] = _mm256_shuffle_ps::<0x44>(high, high_next);
        out[4 * half + 3] = _mm256_shuffle_ps::<0xee>(high, high_next);
    }
    // SAFETY: both types have the same size, and every bit pattern is valid for both.
    unsafe { std::mem::transmute(out) }
}
