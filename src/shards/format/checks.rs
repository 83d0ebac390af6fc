//! Checks of single values: latitudes, longitudes and finite float16 numbers.

use half::f16;

/// Exponent bits of a float16. If all these bits are 1, the number is infinite or NaN.
const EXPONENT: u16 = 0x7c00;

/// Index of the first value that is not between -`limit` and `limit`, with an error text. `what` names the coordinate.
/// Values that are missing according to `is_missing` are not checked.
pub(super) fn first_outside(
    degrees: &[f64],
    (limit, what): (f64, &str),
    is_missing: impl Fn(usize) -> bool,
) -> Option<(usize, String)> {
    let index = (0..degrees.len()).find(|index| !is_within(degrees[*index], limit) && !is_missing(*index))?;
    Some((index, outside(degrees[index], limit, what)))
}

/// Whether a coordinate is between -`limit` and `limit`, inclusive. False for NaN.
pub(crate) fn is_within(degrees: f64, limit: f64) -> bool {
    degrees.abs() <= limit
}

/// The error text for a coordinate that is not between -`limit` and `limit`.
pub(crate) fn outside(degrees: f64, limit: f64, what: &str) -> String {
    format!("{what} {degrees}, wanted -{limit} to {limit}")
}

/// Whether all values are finite. The loop has no branch per number, so that it runs at the speed of memory.
fn all_finite(values: &[f16]) -> bool {
    let worst =
        |values: &[f16]| values.iter().fold(0_i16, |worst, value| worst.max((value.to_bits() & EXPONENT) as i16));
    values.chunks(4096).all(|part| worst(part) != EXPONENT as i16)
}

/// Index of the first number that is not finite, with an error text.
pub(crate) fn first_not_finite(values: &[f16]) -> Option<(usize, String)> {
    if all_finite(values) {
        return None;
    }
    let index = values.iter().position(|value| !value.is_finite())?;
    Some((index, format!("{}, wanted a finite number", values[index])))
}
