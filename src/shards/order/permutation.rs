//! Keyed permutations: random orders that depend only on a key, not on earlier random numbers. The key is (seed, epoch)
//! for [`shuffled`] and (seed, epoch, place) for [`Permutation`], where the place is the number of a window.
//!
//! [`shuffled`] returns a whole order as a list (Fisher-Yates). [`Permutation`] maps one position at a time without a
//! table. It is a Feistel network that permutes `0..n`, where n is the smallest power of two that is at least 64 and at
//! least the number of positions. The network is applied repeatedly until the result is a valid position (cycle
//! walking). With more than 32 positions, this takes fewer than two passes on average.
//!
//! ```text
//! (left, right) -> (right, left ^ round(right, key))      invertible for any `round`
//! ```
//!
//! [`shuffled`] and [`Permutation`] take their random numbers from [`random`](locdiff_core::random), stream `Shuffle`.
//! This module has neither I/O nor state.
//!
//! Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002. Eight rounds are enough, because
//! shuffling does not need cryptographic strength: the orders must only look random.

use locdiff_core::random::{Draw, Philox, RangeError, Stream};

/// Number of rounds of the network. Each round swaps the two halves, so the number must be even for the halves to end
/// in their original places.
const ROUNDS: usize = 8;
/// Minimum number of bits that the network permutes. With fewer bits, the network could produce too few different
/// orders. The minimum makes cycle walking slower if there are few positions: most of the 2^6 possible results are out
/// of range, so more passes are needed.
const BITS_MIN: u32 = 6;

/// Index of the random numbers for [`shuffled`] within the stream `Shuffle`.
const LISTED: u16 = 0;
/// Index of the random numbers for the keys of [`Permutation`] within the stream `Shuffle`.
const KEYED: u16 = 1;

/// The numbers `0..count` in random order. The order depends only on the seed and the epoch.
pub(super) fn shuffled(seed: u64, epoch: u64, count: u32) -> Result<Vec<u32>, RangeError> {
    let mut order: Vec<u32> = (0..count).collect();
    let mut bits = vec![0; order.len()];
    let draw = Draw { stream: Stream::Shuffle(LISTED), step: epoch, first_sample: 0, elements: bits.len().max(1) };
    Philox::new(seed).fill_bits(draw, &mut bits)?;
    for last in (1..order.len()).rev() {
        // Multiply and shift: each number from 0 to `last` is chosen with a probability within 2⁻³² of 1 / (last + 1).
        let other = (u64::from(bits[last]) * (last as u64 + 1)) >> 32;
        order.swap(last, other as usize);
    }
    Ok(order)
}

/// A permutation of `0..count`.
#[derive(Debug, Clone)]
pub(super) struct Permutation {
    count: u64,
    left_bits: u32,
    right_bits: u32,
    keys: [[u32; 2]; ROUNDS],
}

impl Permutation {
    /// The permutation of `0..count` for the given seed, epoch and place (the number of a window).
    pub(super) fn new(seed: u64, epoch: u64, place: u64, count: u64) -> Result<Self, RangeError> {
        let mut words = [0; 2 * ROUNDS];
        let draw = Draw { stream: Stream::Shuffle(KEYED), step: epoch, first_sample: place, elements: words.len() };
        Philox::new(seed).fill_bits(draw, &mut words)?;
        let bits = (u64::BITS - count.saturating_sub(1).leading_zeros()).max(BITS_MIN);
        let keys = std::array::from_fn(|round| [words[2 * round], words[2 * round + 1]]);
        Ok(Self { count, left_bits: bits / 2, right_bits: bits - bits / 2, keys })
    }

    /// Returns the number to which the permutation maps `position`, which must be below `count`.
    pub(super) fn apply(&self, position: u64) -> u64 {
        assert!(position < self.count, "the position is {position}, wanted a number below {}", self.count);
        let mut value = self.network(position);
        while value >= self.count {
            value = self.network(value);
        }
        value
    }

    /// One pass of the Feistel network, which is a permutation of `2^(left_bits + right_bits)` values.
    fn network(&self, value: u64) -> u64 {
        let (mut left, mut right) = ((value >> self.right_bits) as u32, (value & mask(self.right_bits)) as u32);
        let (mut left_bits, mut right_bits) = (self.left_bits, self.right_bits);
        for key in self.keys {
            (left, right) = (right, left ^ (scramble(right, key) & mask(left_bits) as u32));
            (left_bits, right_bits) = (right_bits, left_bits);
        }
        u64::from(left) << right_bits | u64::from(right)
    }
}

const fn mask(bits: u32) -> u64 {
    (1 << bits) - 1
}

/// The round function of the Feistel network. Mixes every bit of `value` into the low bits, with the multipliers of
/// MurmurHash3's finaliser.
fn scramble(value: u32, [first, second]: [u32; 2]) -> u32 {
    let mut hash = (value ^ first).wrapping_mul(0x85eb_ca6b);
    hash = (hash ^ hash >> 13).wrapping_add(second).wrapping_mul(0xc2b2_ae35);
    hash ^= hash >> 16;
    hash = hash.wrapping_mul(0x85eb_ca6b);
    hash ^ hash >> 15
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(seed: u64, epoch: u64, count: u64) -> Vec<u64> {
        let permutation = Permutation::new(seed, epoch, 3, count).expect("the epoch is in range");
        (0..count).map(|position| permutation.apply(position)).collect()
    }

    #[test]
    fn every_size_is_a_bijection() {
        for count in (1..300).chain([1000, 4095, 4096, 4097, 70_000]) {
            let mut found = order(1, 2, count);
            found.sort_unstable();
            assert!(found.into_iter().eq(0..count), "the permutation of {count} positions is not a bijection");
            let mut listed = shuffled(1, 2, count as u32).expect("the epoch is in range");
            listed.sort_unstable();
            assert!(listed.into_iter().eq(0..count as u32), "the list of {count} numbers is not a permutation");
        }
        assert!(shuffled(1, 2, 0).expect("the epoch is in range").is_empty());
        assert!(
            Permutation::new(1, 1 << 40, 0, 5).is_err() && shuffled(1, 1 << 40, 5).is_err(),
            "an epoch beyond the range was accepted"
        );
    }

    /// Chi-square test over many keys: each position is mapped to each place equally often. For random orders the
    /// statistic is below the bound with a probability of 99.9 %.
    #[test]
    fn every_position_is_equally_likely() {
        for (count, keys) in [(2, 2000), (3, 3000), (7, 7000), (16, 16_000), (40, 20_000)] {
            let (mut keyed, mut listed) = (vec![0_u32; count * count], vec![0_u32; count * count]);
            for key in 0..keys {
                for (position, place) in order(5, key, count as u64).into_iter().enumerate() {
                    keyed[position * count + place as usize] += 1;
                }
                for (position, place) in
                    shuffled(5, key, count as u32).expect("the epoch is in range").into_iter().enumerate()
                {
                    listed[position * count + place as usize] += 1;
                }
            }
            let freedom = ((count - 1) * (count - 1)) as f64;
            let bound = freedom + 3.1 * (2.0 * freedom).sqrt() + 8.0;
            for (name, seen) in [("keyed", keyed), ("listed", listed)] {
                let expected = keys as f64 / count as f64;
                let square: f64 = seen.iter().map(|seen| (f64::from(*seen) - expected).powi(2) / expected).sum();
                // Every row and every column of the table sums to the number of keys, so the statistic needs this
                // correction factor.
                let square = square * (count - 1) as f64 / count as f64;
                assert!(square < bound, "{name}, {count} positions: chi-square {square:.1}, wanted below {bound:.1}");
            }
        }
        // All 24 orders of four items occur, about equally often.
        let mut seen = std::collections::HashMap::new();
        for key in 0..24_000 {
            *seen.entry(order(8, key, 4)).or_insert(0_u32) += 1;
        }
        assert_eq!(seen.len(), 24, "some orders never occurred");
        let square: f64 = seen.values().map(|seen| (f64::from(*seen) - 1000.0).powi(2) / 1000.0).sum();
        // 49.7 is the 99.9 % point of the chi-square distribution with 23 degrees of freedom.
        assert!(square < 49.7, "chi-square {square:.1}, wanted below 49.7");
    }

    /// On average, a random order moves an item by a third of the number of items, and about two pairs of neighbours
    /// stay neighbours.
    #[test]
    fn large_orders_move_items_far_and_separate_neighbours() {
        let count = 50_000;
        let found = order(11, 0, count);
        let moved: u64 = found.iter().enumerate().map(|(position, place)| place.abs_diff(position as u64)).sum();
        let share = moved as f64 / (count * count) as f64;
        // The standard deviation of the mean is 0.24 / √count = 0.001.
        assert!((share - 1.0 / 3.0).abs() < 0.005, "the mean displacement is {share} of the count, wanted 1/3");
        let neighbours = found.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) == 1).count();
        // The number of pairs that stay neighbours has a Poisson distribution with mean 2.
        assert!(neighbours < 12, "{neighbours} pairs stayed neighbours, wanted fewer than 12");
        let other = order(11, 1, count);
        let kept = found.iter().zip(&other).filter(|(one, other)| one == other).count();
        assert!(kept < 10, "{kept} items have the same place in the next epoch, wanted fewer than 10");
    }
}
