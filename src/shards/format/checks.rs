//! What a value must be to be used: a latitude, a longitude, a finite float16.

use half::f16;

/// Exponent bits of a float16; all ones is infinity or NaN.
const EXPONENT: u16 = 0x7c00;

/// The first number beyond its limit, and why that is none.
pub(super) fn first_outside(degrees: &[f64], limit: f64, what: &str) -> Option<(usize, String)> {
    let index = degrees.iter().position(|value| !is_within(*value, limit))?;
    Some((index, outside(degrees[index], limit, what)))
}

/// NaN is nowhere.
pub(crate) fn is_within(degrees: f64, limit: f64) -> bool {
    degrees.abs() <= limit
}

/// Got and wanted.
pub(crate) fn outside(degrees: f64, limit: f64, what: &str) -> String {
    format!("{what} {degrees}, expected -{limit} to {limit}")
}

/// Are all of these finite? Without a branch per number, so that it runs at the speed of memory.
fn all_finite(values: &[f16]) -> bool {
    let worst =
        |values: &[f16]| values.iter().fold(0_i16, |worst, value| worst.max((value.to_bits() & EXPONENT) as i16));
    values.chunks(4096).all(|part| worst(part) != EXPONENT as i16)
}

/// The first number that is not finite, and why.
pub(crate) fn first_not_finite(values: &[f16]) -> Option<(usize, String)> {
    if all_finite(values) {
        return None;
    }
    let index = values.iter().position(|value| !value.is_finite())?;
    Some((index, format!("{}, expected a finite number", values[index])))
}
