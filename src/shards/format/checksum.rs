//! Checksums of stored data: 64-bit xxh3, written as sixteen hexadecimal digits.
//!
//! Checksums detect damage but not tampering: anyone who can change the data can also change the manifest.

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

/// A 64-bit xxh3 checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Checksum(pub u64);

impl Checksum {
    /// Computes the checksum of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(XxHash3_64::oneshot(bytes))
    }
}

impl std::fmt::Display for Checksum {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{:016x}", self.0)
    }
}

impl From<Checksum> for String {
    fn from(checksum: Checksum) -> Self {
        checksum.to_string()
    }
}

impl TryFrom<String> for Checksum {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        // Check every character, because `from_str_radix` also accepts a sign.
        let digits = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u64::from_str_radix(&text, 16).ok().filter(|_| digits);
        number.map(Self).ok_or_else(|| format!("checksum {text:?} is not sixteen hexadecimal digits"))
    }
}

#[cfg(test)]
mod tests {
    use std::hash::Hasher as _;

    use twox_hash::XxHash3_128;

    use super::*;

    /// The expected values come from the reference implementation, xxHash 0.8.4. Most of the lengths are limits of its
    /// code paths.
    #[test]
    fn checksums_match_the_reference_in_one_piece_or_many() {
        let bytes: Vec<u8> = (0..5000).map(|at| (at * 31 % 251) as u8).collect();
        for (length, expected) in [
            (0, 0x2d06_8005_38d3_94c2),
            (3, 0x3698_b801_91e6_25f9),
            (16, 0x8626_370b_70d8_ac70),
            (128, 0x040e_9775_6280_237a),
            (240, 0x8ace_cb90_be72_b9c3),
            (241, 0x82d3_ebf5_0a3e_9c42),
            (1024, 0xcbdf_f56b_050f_2c1c),
            (5000, 0xa092_d731_1629_1201),
        ] {
            assert_eq!(Checksum::of(&bytes[..length]), Checksum(expected), "wrong checksum of {length} bytes");
            for piece in [1, 64, 100, 1536] {
                let mut hasher = XxHash3_64::new();
                bytes[..length].chunks(piece).for_each(|part| hasher.write(part));
                assert_eq!(
                    Checksum(hasher.finish()),
                    Checksum(expected),
                    "wrong checksum of {length} bytes, hashed in pieces of {piece} bytes"
                );
            }
        }
        assert_eq!(XxHash3_64::oneshot_with_seed(7, &bytes[..300]), 0xca08_5b48_7d0e_d7ed);
        assert_eq!(XxHash3_128::oneshot(&bytes[..100]), 0x2701_f07d_2c26_abff_94b1_9615_20a1_1588);
    }
}
