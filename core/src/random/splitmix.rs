//! SplitMix64: a hash of 64-bit numbers. Equal inputs give equal outputs on every machine.
//!
//! Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; the constants are those
//! of Vigna's public-domain implementation.

/// The increment of SplitMix64: 2⁶⁴ divided by the golden ratio, as an odd number.
pub const SPLITMIX_INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finaliser of SplitMix64. It maps the 64-bit numbers one to one, and similar inputs to dissimilar outputs.
pub fn splitmix(mut number: u64) -> u64 {
    number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix_gives_the_published_numbers() {
        // The first outputs of the generator with seed 1234567, which many implementations use as a test.
        let outputs = [1, 2, 3].map(|step| splitmix(1_234_567_u64.wrapping_add(SPLITMIX_INCREMENT.wrapping_mul(step))));
        assert_eq!(outputs, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }
}
