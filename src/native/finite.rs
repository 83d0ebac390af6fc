//! Checks that float16 numbers are finite.
//!
//! Every embedding that is read from a shard is checked, so the check must be fast. It uses AVX2 instructions if the
//! processor has them.

/// The exponent bits of a float16. If all of them are 1, the number is infinite or NaN.
const EXPONENT: u16 = 0x7c00;
/// The lowest exponent bit.
const EXPONENT_ONE: u16 = 0x0400;

/// Whether all numbers in `bytes` are finite. `bytes` holds little-endian float16 numbers. If its length is odd, the
/// last byte is ignored.
pub fn all_finite_halves(bytes: &[u8]) -> bool {
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, as checked on the line above.
        return unsafe { all_finite_avx2(bytes) };
    }
    all_finite(bytes)
}

/// [`all_finite`] compiled for AVX2.
#[target_feature(enable = "avx2")]
fn all_finite_avx2(bytes: &[u8]) -> bool {
    all_finite(bytes)
}

/// Needs no branch per number: adding `EXPONENT_ONE` to the exponent bits sets the sign bit only if all exponent bits
/// are 1.
#[inline(always)]
fn all_finite(bytes: &[u8]) -> bool {
    let exponent = |value: &[u8; 2]| (u16::from_le_bytes(*value) & EXPONENT).wrapping_add(EXPONENT_ONE);
    let carried = |part: &[[u8; 2]]| part.iter().fold(0, |seen, value| seen | exponent(value));
    bytes.as_chunks::<2>().0.chunks(4096).all(|part| carried(part) >> 15 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_non_finite_float16_is_found_at_any_position() {
        for bits in 0..=u16::MAX {
            let finite = half::f16::from_bits(bits).is_finite();
            assert_eq!(
                all_finite_halves(&bits.to_le_bytes()),
                finite,
                "wrong answer for the float16 with bits {bits:04x}"
            );
            assert_eq!(all_finite(&bits.to_le_bytes()), finite, "wrong answer for the float16 with bits {bits:04x}");
        }
        let good: Vec<u8> = (0..30_000_u16).flat_map(|at| (at & 0xbbff).to_le_bytes()).collect();
        assert!(all_finite_halves(&good) && all_finite(&good) && all_finite_halves(&[]));
        for at in (0..30_000).step_by(997).chain([0, 1, 15, 16, 31, 4095, 4096, 29_999]) {
            let mut bad = good.clone();
            bad[2 * at..2 * at + 2].copy_from_slice(&0xfc00_u16.to_le_bytes());
            assert!(!all_finite_halves(&bad) && !all_finite(&bad), "the infinity at index {at} was not found");
        }
    }
}
