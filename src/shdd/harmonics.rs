//! Orthonormal real spherical harmonics: Y_lm(p) for l = 0..=L and m = -l..=l, at index l² + l + m.
//!
//! Y_lm is p_lm(z) · Re (x + iy)^m for m ≥ 0, and p_l|m|(z) · Im (x + iy)^|m| for m < 0. Here p_lm is the fully
//! normalised associated Legendre function without its factor (1 − z²)^(m/2), multiplied by √2 if m ≠ 0. The powers of
//! x + iy contain that factor, so the poles need no special case. p_lm is computed by a recursion over l at fixed m
//! (Holmes, Featherstone, J. Geodesy 76, 2002, eq. 11):
//!
//!   p_mm = √((2m+1)/(2m)) p_(m-1)(m-1),   p_lm = a_lm z p_(l-1)m − b_lm p_(l-2)m
//!
//! Unlike the closed form with factorials, this recursion loses no digits to cancellation. There is no Condon-Shortley
//! phase.
//!
//! Invariant: the fast implementation performs the same operations in the same order as [`Basis::encode_scalar`],
//! without fused multiply-add, so both give the same bits on every processor.
//!
//! No value overflows up to degree 511. p_lm reaches about 1e98 near the poles, but there the power of x + iy is so
//! small that the product stays below [`Basis::value_max`]. If the power underflows, the exact product is below 1e-200.

use std::f64::consts::{PI, SQRT_2};

use locdiff_core::geo::UnitVector;
use tch::{Device, Tensor};

use super::ShddError;
use crate::native::harmonics;

/// The largest supported degree.
pub const DEGREE_MAX: u32 = 511;

/// The harmonics up to a degree L, with the coefficients of their recursion.
#[derive(Debug, Clone)]
pub struct Basis {
    degree: usize,
    /// At index m: the constant p_mm, including the factor √2 if m ≥ 1.
    pub(super) sectoral: Vec<f64>,
    /// `[a_lm, b_lm]` at index `triangle(l, m)`. For m = l, both are 0 and unused.
    pub(super) recursion: Vec<[f64; 2]>,
}

/// Index of the entry for (l, m), 0 ≤ m ≤ l, in a triangular table.
pub(super) fn triangle(l: usize, m: usize) -> usize {
    l * (l + 1) / 2 + m
}

impl Basis {
    /// The harmonics up to `degree`, which may be at most [`DEGREE_MAX`].
    pub fn new(degree: u32) -> Result<Self, ShddError> {
        if degree > DEGREE_MAX {
            return Err(ShddError::Bad(format!("harmonics: degree is {degree}, wanted 0 to {DEGREE_MAX}")));
        }
        let degree = degree as usize;
        let mut sectoral = vec![(1.0 / (4.0 * PI)).sqrt()];
        for m in 1..=degree {
            let ratio = ((2 * m + 1) as f64 / (2 * m) as f64).sqrt();
            sectoral.push(sectoral[m - 1] * ratio * if m == 1 { SQRT_2 } else { 1.0 });
        }
        let mut recursion = Vec::with_capacity(triangle(degree + 1, 0));
        for l in 0..=degree {
            recursion.extend((0..=l).map(|m| coefficients(l, m)));
        }
        Ok(Self { degree, sectoral, recursion })
    }

    /// The largest degree L.
    pub fn degree(&self) -> u32 {
        self.degree as u32
    }

    /// Number of dimensions of a code: (L + 1)².
    pub fn dims(&self) -> usize {
        (self.degree + 1).pow(2)
    }

    /// An upper bound of all harmonics at all points: √((2L+1)/4π), which is the value of the zonal harmonic of degree
    /// L at the pole.
    pub fn value_max(&self) -> f64 {
        ((2 * self.degree + 1) as f64 / (4.0 * PI)).sqrt()
    }

    fn tables(&self) -> harmonics::Tables<'_> {
        harmonics::Tables { sectoral: &self.sectoral, recursion: &self.recursion }
    }

    /// Encodes one point directly by the formula. The faster implementations are tested against this function.
    pub fn encode_scalar(&self, point: UnitVector, out: &mut [f64]) -> Result<(), ShddError> {
        expect_length("code of one point", out.len(), self.dims())?;
        let [x, y, z] = point.xyz();
        let (mut cosine, mut sine) = (1.0, 0.0);
        for m in 0..=self.degree {
            if m > 0 {
                (cosine, sine) = (cosine * x - sine * y, sine * x + cosine * y);
            }
            let (mut older, mut old) = (0.0, self.sectoral[m]);
            for l in m..=self.degree {
                if l > m {
                    let [a, b] = self.recursion[triangle(l, m)];
                    (older, old) = (old, a * z * old - b * older);
                }
                let center = l * l + l;
                out[center - m] = old * sine;
                out[center + m] = old * cosine;
            }
        }
        Ok(())
    }

    /// Encodes points as f64 codes, `[points, dims]` in row-major order.
    pub fn encode_f64(&self, points: &[UnitVector]) -> Vec<f64> {
        let mut out = vec![0.0; points.len() * self.dims()];
        harmonics::encode(self.tables(), |index| points[index].xyz(), &mut out);
        out
    }

    /// Encodes points on the calling thread. Writes the f32 codes to `out`, `[points, dims]` in row-major order.
    pub fn encode_into(&self, points: &[UnitVector], out: &mut [f32]) -> Result<(), ShddError> {
        expect_length("codes", out.len(), points.len() * self.dims())?;
        harmonics::encode(self.tables(), |index| points[index].xyz(), out);
        Ok(())
    }

    /// Encodes points on `threads` threads. Returns the f32 codes, `[points, dims]` in row-major order.
    pub fn encode_f32(&self, points: &[UnitVector], threads: usize) -> Vec<f32> {
        let mut out = vec![0.0; points.len() * self.dims()];
        let share = points.len().div_ceil(threads.max(1)).max(1);
        std::thread::scope(|scope| {
            for (points, out) in points.chunks(share).zip(out.chunks_mut(share * self.dims())) {
                scope.spawn(|| self.encode_into(points, out).expect("points and codes have the same number of rows"));
            }
        });
        out
    }

    /// Encodes points as an f32 tensor `[points, dims]`.
    pub fn tensor(&self, points: &[UnitVector], device: Device) -> Result<Tensor, ShddError> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let codes = self.encode_f32(points, threads.min(points.len().div_ceil(64)));
        let shape = [points.len() as i64, self.dims() as i64];
        Ok(Tensor::f_from_slice(&codes)?.f_view(shape)?.f_to_device(device)?)
    }
}

/// The coefficients `[a_lm, b_lm]` of the recursion for p_lm. Both are 0 if l = m, because the recursion starts there.
fn coefficients(l: usize, m: usize) -> [f64; 2] {
    if l == m {
        return [0.0, 0.0];
    }
    let square = |value: usize| (value * value) as f64;
    let (below, order) = (square(l - 1), square(m));
    let a = ((4.0 * square(l) - 1.0) / (square(l) - order)).sqrt();
    let b = if l == m + 1 { 0.0 } else { a * ((below - order) / (4.0 * below - 1.0)).sqrt() };
    [a, b]
}

pub(super) fn expect_length(what: &str, got: usize, want: usize) -> Result<(), ShddError> {
    if got == want { Ok(()) } else { Err(ShddError::Bad(format!("{what}: length is {got}, wanted {want}"))) }
}
