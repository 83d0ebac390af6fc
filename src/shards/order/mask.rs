//! Rows that are left out: found by one scan over the data, before the plan is made.
//!
//! Blocks keep their numbers and rows keep theirs; the plan counts only the rows that are left. The digest is a function
//! of which rows are left out and of nothing else, and 0 where none is.

use std::collections::BTreeMap;
use std::hash::Hasher as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use locdiff_core::config::{OnBadRows, ShardsConfig};
use twox_hash::XxHash3_64;

use crate::shards::blocks::{BlockRows, Blocks};
use crate::shards::error::ShardsError;
use crate::shards::parallel::in_order;

/// Blocks whose first bad row is told in words.
const TOLD: usize = 3;

/// Which rows are left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mask {
    /// By block, ascending; no empty list.
    skipped: BTreeMap<u32, Vec<u32>>,
    count: u64,
    digest: u64,
}

impl Mask {
    /// Leaves nothing out.
    pub fn none() -> Self {
        Self::default()
    }

    /// Leaves out the given rows of the given blocks, each list ascending and within its block.
    pub fn new(skipped: BTreeMap<u32, Vec<u32>>, block_rows: &[u32]) -> Result<Self, ShardsError> {
        let skipped: BTreeMap<u32, Vec<u32>> = skipped.into_iter().filter(|(_, rows)| !rows.is_empty()).collect();
        let mut hash = XxHash3_64::new();
        let mut count = 0;
        for (block, rows) in &skipped {
            let all = block_rows.get(*block as usize).copied().unwrap_or(0);
            let ascending = rows.windows(2).all(|pair| pair[0] < pair[1]);
            if !ascending || rows.last().is_some_and(|last| *last >= all) {
                let reason = format!("bad rows of block {block} are {rows:?}, wanted ascending numbers below {all}");
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

    /// Reads the whole data set and leaves out what cannot be used.
    pub fn scan(blocks: &dyn Blocks, threads: u32) -> Result<Self, ShardsError> {
        let found = in_order(threads as usize, blocks.block_rows().len(), |block| {
            caught(block as u32, || blocks.bad_rows(block as u32))
        })?;
        Self::new((0..).zip(found).collect(), blocks.block_rows())
    }

    /// What the configuration wants: nothing left out, or what a scan finds.
    pub fn for_config(blocks: &dyn Blocks, config: &ShardsConfig) -> Result<Self, ShardsError> {
        match config.on_bad_rows {
            OnBadRows::Error => Ok(Self::none()),
            OnBadRows::Skip => Self::scan(blocks, config.reader_threads),
        }
    }

    /// Rows that are left out.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Stands for which rows are left out; 0: none.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Rows of a block that are left out, ascending.
    pub fn skipped(&self, block: u32) -> &[u32] {
        self.skipped.get(&block).map_or(&[], Vec::as_slice)
    }

    /// The rows that are left out, by block.
    pub fn into_skipped(self) -> BTreeMap<u32, Vec<u32>> {
        self.skipped
    }

    /// The row of the block that is the `index`-th of those that are left.
    pub(super) fn row(&self, block: u32, index: u32) -> u32 {
        if self.count == 0 {
            return index;
        }
        let skipped = self.skipped(block);
        // Before the i-th skipped row stand `skipped[i] - i` that are left, which never falls.
        let (mut low, mut high) = (0, skipped.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            if skipped[middle] - middle as u32 <= index { low = middle + 1 } else { high = middle }
        }
        index + low as u32
    }

    /// How many rows are left out and where the first ones are, in the reader's own words; none: nothing to say.
    pub fn describe(&self, blocks: &dyn Blocks) -> Option<String> {
        if self.count == 0 {
            return None;
        }
        let rows: u64 = blocks.block_rows().iter().map(|rows| u64::from(*rows)).sum();
        let first: Vec<String> =
            self.skipped.iter().take(TOLD).map(|(block, rows)| told(blocks, *block, rows)).collect();
        let more = if self.skipped.len() > TOLD { "; ..." } else { "" };
        Some(format!("{} of {rows} rows are left out: {}{more}", self.count, first.join("; ")))
    }
}

/// What a strict reader says about the block.
fn told(blocks: &dyn Blocks, block: u32, rows: &[u32]) -> String {
    let mut into = BlockRows::default();
    let found = (0..blocks.views()).find_map(|view| blocks.read(block, view, &mut into).err());
    let others =
        if rows.len() > 1 { format!(" (and {} more in this row group)", rows.len() - 1) } else { String::new() };
    found.map_or_else(|| format!("block {block}: row {}{others}", rows[0]), |error| format!("{error}{others}"))
}

/// What reading a block comes to; a panic is an error.
pub(crate) fn caught<T>(block: u32, body: impl FnOnce() -> Result<T, ShardsError>) -> Result<T, ShardsError> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic_text(panic.as_ref());
        Err(ShardsError::Internal(format!("the reader of block {block} panicked: {text}")))
    })
}

/// What a panic says.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}
