//! How often each row comes in an epoch if rows are drawn by density (`shards.density_alpha` above 0).
//!
//! The weight of a row is n^-alpha, where n is the number of usable rows in the row's cell. All weights are scaled so
//! that their mean is 1. In each epoch, a row has a quota: its weight, rounded down or up to a whole number. The row
//! comes that many times. Quotas come from systematic sampling: the weights of all usable rows are laid end to end on a
//! line, in the order of the data set, and the quota of a row is the number of whole numbers in its part of the line,
//! after the whole line is shifted by a number between 0 and 1.
//!
//! ```text
//! quota(row, epoch) = floor(end(row) + shift(epoch)) - floor(start(row) + shift(epoch))
//! shift(epoch)      = fractional part of (random number of the seed + epoch · golden ratio)
//! ```
//!
//! - The line is as long as there are usable rows. So every epoch has as many indices as without weights.
//! - Any sequence of such shifts is spread evenly over 0 to 1. So after a few epochs, each row has come about as often
//!   as its weight says, and rows with a weight below 1 take turns.
//! - The sums are integers, in units of 2^-32, so they do not depend on rounding.
//!
//! Source: Madow and Madow, "On the theory of systematic sampling", Ann. Math. Statist. 15, 1944.

use std::collections::HashMap;
use std::hash::Hasher as _;
use std::ops::Range;

use locdiff_core::config::ShardsConfig;
use locdiff_core::geo::{Degrees, Place, cell_of};
use locdiff_core::random::{Draw, Philox, RangeError, Stream};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::mask::Mask;
use crate::shards::blocks::{BlockRows, Blocks};
use crate::shards::error::ShardsError;
use crate::shards::parallel::in_order;

/// The sums of weights are multiples of 2^-`FRACTION_BITS`.
const FRACTION_BITS: u32 = 32;
/// Index of the random number for the shifts within the stream `Shuffle`. The permutations have the smaller indices.
const SHIFTS: u16 = 2;
/// 2^64 divided by the golden ratio.
const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;

/// The weights of all usable rows.
#[derive(Debug, Clone, PartialEq)]
pub struct RowWeights {
    /// For each usable row, in the order of the data set, the sum of its weight and of all weights before it.
    ends: Vec<u64>,
    mark: WeightsMark,
}

/// The record of the weights in a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightsMark {
    /// `shards.density_alpha`.
    pub alpha: f64,
    /// `shards.density_cell_degrees`.
    pub cell_degrees: f64,
    /// Digest of all weights, 16 hexadecimal digits.
    pub digest: String,
}

impl RowWeights {
    /// Computes the weights for the configuration. `None` if `shards.density_alpha` is 0. Otherwise reads the
    /// coordinates of all rows.
    pub fn for_config(blocks: &dyn Blocks, mask: &Mask, config: &ShardsConfig) -> Result<Option<Self>, ShardsError> {
        if config.density_alpha == 0.0 {
            return Ok(None);
        }
        let block_rows = blocks.block_rows();
        let cells = in_order(config.reader_threads as usize, block_rows.len(), |block| {
            let (block, mut rows) = (block as u32, BlockRows::default());
            blocks.read_coordinates(block, mask.skipped(block), &mut rows)?;
            let usable = block_rows[block as usize] - mask.skipped(block).len() as u32;
            let cell = |index| {
                let row = mask.row(block, index) as usize;
                let place = Place::new(Degrees(rows.latitudes[row]), Degrees(rows.longitudes[row]));
                let place =
                    place.map_err(|error| ShardsError::Internal(format!("block {block}, row {row}: {error}")))?;
                Ok(cell_of(place, config.density_cell_degrees))
            };
            (0..usable).map(cell).collect::<Result<Vec<u64>, ShardsError>>()
        })?;
        Self::new(&cells.concat(), config).map(Some)
    }

    /// Computes the weights of rows from the cell of each usable row, in the order of the data set.
    pub fn new(cells: &[u64], config: &ShardsConfig) -> Result<Self, ShardsError> {
        let rows = u32::try_from(cells.len()).map_err(|_| {
            ShardsError::Config(format!(
                "the data has {} usable rows, but shards.density_alpha above 0 works with fewer than 2^32; set it to 0",
                cells.len()
            ))
        })?;
        let mut counts: HashMap<u64, u32> = HashMap::new();
        cells.iter().for_each(|cell| *counts.entry(*cell).or_default() += 1);
        // Rounding to integers makes all sums exact. A weight before scaling is at most 1, and there are fewer than
        // 2^32 rows, so the product below is less than 2^128.
        let one = (1_u64 << FRACTION_BITS) as f64;
        let weight = |cell: &u64| (f64::from(counts[cell]).powf(-config.density_alpha) * one).round() as u128;
        let total: u128 = cells.iter().map(weight).sum();
        let length = u128::from(rows) << FRACTION_BITS;
        let ends = cells.iter().scan(0, |sum, cell| {
            *sum += weight(cell);
            Some((*sum * length / total) as u64)
        });
        Ok(Self::of(ends.collect(), config))
    }

    fn of(ends: Vec<u64>, config: &ShardsConfig) -> Self {
        let mut hash = XxHash3_64::new();
        ends.iter().for_each(|end| hash.write(&end.to_le_bytes()));
        let (alpha, cell_degrees) = (config.density_alpha, config.density_cell_degrees);
        Self { ends, mark: WeightsMark { alpha, cell_degrees, digest: format!("{:016x}", hash.finish()) } }
    }

    /// The weights as bytes, for other ranks.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.ends.iter().flat_map(|end| end.to_le_bytes()).collect()
    }

    /// The weights from [`RowWeights::to_bytes`], with the same configuration.
    pub fn from_bytes(bytes: &[u8], config: &ShardsConfig) -> Self {
        Self::of(bytes.as_chunks().0.iter().map(|end| u64::from_le_bytes(*end)).collect(), config)
    }

    /// Number of usable rows.
    pub(super) fn rows(&self) -> u64 {
        self.ends.len() as u64
    }

    /// The record for a checkpoint.
    pub(super) fn mark(&self) -> &WeightsMark {
        &self.mark
    }

    /// The smallest and the largest weight.
    pub fn range(&self) -> (f64, f64) {
        let weight = |row| (self.start(row + 1) - self.start(row)) as f64 / (1_u64 << FRACTION_BITS) as f64;
        let weights = || (0..self.rows()).map(weight);
        (weights().fold(f64::INFINITY, f64::min), weights().fold(0.0, f64::max))
    }

    /// The shift of an epoch.
    pub(super) fn shift(seed: u64, epoch: u64) -> Result<u64, RangeError> {
        let mut words = [0; 2];
        let draw = Draw { stream: Stream::Shuffle(SHIFTS), step: 0, first_sample: 0, elements: words.len() };
        Philox::new(seed).fill_bits(draw, &mut words)?;
        let first = u64::from(words[0]) << 32 | u64::from(words[1]);
        Ok(first.wrapping_add(epoch.wrapping_mul(GOLDEN_RATIO)) >> (u64::BITS - FRACTION_BITS))
    }

    /// The sum of the quotas of all rows before `row`. Rows are numbered among the usable rows of the data set.
    pub(super) fn quotas_before(&self, row: u64, shift: u64) -> u64 {
        (self.start(row) + shift) >> FRACTION_BITS
    }

    /// The row at `index` if every row of `rows` is listed as often as its quota says. Also returns the number of the
    /// copy: 0 if the row is listed for the first time.
    pub(super) fn row_at(&self, rows: Range<u64>, index: u64, shift: u64) -> (u64, u64) {
        let wanted = self.quotas_before(rows.start, shift) + index;
        let ends = &self.ends[rows.start as usize..rows.end as usize];
        let row = rows.start + ends.partition_point(|end| (end + shift) >> FRACTION_BITS <= wanted) as u64;
        (row, wanted - self.quotas_before(row, shift))
    }

    fn start(&self, row: u64) -> u64 {
        if row == 0 { 0 } else { self.ends[row as usize - 1] }
    }
}
