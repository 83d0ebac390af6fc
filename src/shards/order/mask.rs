//! The set of rows to skip. One scan of the data finds these rows before the plan is made.
//!
//! Skipping a row does not renumber the other rows or the blocks. The plan uses only the rows that are not skipped (the
//! usable rows). The digest of a mask depends only on which rows are skipped. It is 0 if no row is skipped.

use std::collections::BTreeMap;
use std::hash::Hasher as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use locdiff_core::config::{OnBadRows, ShardsConfig};
use twox_hash::XxHash3_64;

use crate::shards::blocks::{BlockRows, Blocks};
use crate::shards::error::ShardsError;
use crate::shards::parallel::in_order;

/// Maximum number of blocks for which [`Mask::describe`] describes the first bad row.
const DESCRIBED_MAX: usize = 3;

/// The rows to skip.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mask {
    /// Skipped rows by block, ascending. Blocks without skipped rows have no entry.
    skipped: BTreeMap<u32, Vec<u32>>,
    count: u64,
    digest: u64,
}

impl Mask {
    /// A mask that skips no rows.
    pub fn none() -> Self {
        Self::default()
    }

    /// A mask that skips the given rows, which are listed by block. Each list must be ascending and contain only rows
    /// of its block. `block_rows` is the number of rows of each block.
    pub fn new(skipped: BTreeMap<u32, Vec<u32>>, block_rows: &[u32]) -> Result<Self, ShardsError> {
        let skipped: BTreeMap<u32, Vec<u32>> = skipped.into_iter().filter(|(_, rows)| !rows.is_empty()).collect();
        let mut hash = XxHash3_64::new();
        let mut count = 0;
        for (block, rows) in &skipped {
            let total = block_rows.get(*block as usize).copied().unwrap_or(0);
            let ascending = rows.windows(2).all(|pair| pair[0] < pair[1]);
            if !ascending || rows.last().is_some_and(|last| *last >= total) {
                let reason =
                    format!("the skipped rows of block {block} are {rows:?}, wanted ascending numbers below {total}");
                return Err(ShardsError::Internal(reason));
            }
            count += rows.len() as u64;
            hash.write(&block.to_le_bytes());
            hash.write(&(rows.len() as u64).to_le_bytes());
            rows.iter().for_each(|row| hash.write(&row.to_le_bytes()));
        }
        let digest = if count == 0 { 0 } else { hash.finish() };
        Ok(Self { skipped, count, digest })
    }

    /// Reads the whole data set and makes a mask that skips all bad rows.
    pub fn scan(blocks: &dyn Blocks, threads: u32) -> Result<Self, ShardsError> {
        let found = in_order(threads as usize, blocks.block_rows().len(), |block| {
            catch_panic(block as u32, || blocks.bad_rows(block as u32))
        })?;
        Self::new((0..).zip(found).collect(), blocks.block_rows())
    }

    /// Makes the mask for the configuration. With [`OnBadRows::Error`] the mask skips no rows. With
    /// [`OnBadRows::Skip`] the mask skips the bad rows that a scan finds.
    pub fn for_config(blocks: &dyn Blocks, config: &ShardsConfig) -> Result<Self, ShardsError> {
        match config.on_bad_rows {
            OnBadRows::Error => Ok(Self::none()),
            OnBadRows::Skip => Self::scan(blocks, config.reader_threads),
        }
    }

    /// Number of skipped rows.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Digest of the set of skipped rows. 0 if no row is skipped.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Skipped rows of a block, ascending.
    pub fn skipped(&self, block: u32) -> &[u32] {
        self.skipped.get(&block).map_or(&[], Vec::as_slice)
    }

    /// Skipped rows by block.
    pub fn into_skipped(self) -> BTreeMap<u32, Vec<u32>> {
        self.skipped
    }

    /// Returns the row number of a usable row within its block. `index` counts only usable rows of the block, from 0.
    pub(super) fn row(&self, block: u32, index: u32) -> u32 {
        if self.count == 0 {
            return index;
        }
        let skipped = self.skipped(block);
        // Before row `skipped[i]` there are `skipped[i] - i` usable rows. This number never decreases as i grows, so
        // binary search works.
        let (mut low, mut high) = (0, skipped.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            if skipped[middle] - middle as u32 <= index { low = middle + 1 } else { high = middle }
        }
        index + low as u32
    }

    /// Says how many rows are skipped. For each of the first few blocks with skipped rows, describes the first skipped
    /// row. `None` if no row is skipped.
    pub fn describe(&self, blocks: &dyn Blocks) -> Option<String> {
        if self.count == 0 {
            return None;
        }
        let rows: u64 = blocks.block_rows().iter().map(|rows| u64::from(*rows)).sum();
        let first: Vec<String> =
            self.skipped.iter().take(DESCRIBED_MAX).map(|(block, rows)| describe_block(blocks, *block, rows)).collect();
        let more = if self.skipped.len() > DESCRIBED_MAX { "; ..." } else { "" };
        Some(format!("{} of {rows} rows are left out: {}{more}", self.count, first.join("; ")))
    }
}

/// Describes the first bad row of a block: by the error from reading the block or, if the read succeeds, by the row's
/// number. Also gives the number of other skipped rows. `rows` are the skipped rows of the block.
fn describe_block(blocks: &dyn Blocks, block: u32, rows: &[u32]) -> String {
    let mut into = BlockRows::default();
    let found = (0..blocks.views()).find_map(|view| blocks.read(block, view, &mut into).err());
    let others =
        if rows.len() > 1 { format!(" (and {} more in this row group)", rows.len() - 1) } else { String::new() };
    match found {
        None => format!("block {block}: row {}{others}", rows[0]),
        // The row is left out already, so the error's advice to leave it out is not repeated.
        Some(ShardsError::BadRow { spot, reason }) => format!("{spot}: {reason}{others}"),
        Some(error) => format!("{error}{others}"),
    }
}

/// Runs `body`, which reads a block, and turns a panic into an error.
pub(crate) fn catch_panic<T>(block: u32, body: impl FnOnce() -> Result<T, ShardsError>) -> Result<T, ShardsError> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic_text(panic.as_ref());
        Err(ShardsError::Internal(format!("the reader of block {block} panicked: {text}")))
    })
}

/// The message of a panic.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("the panic has no message")
}
