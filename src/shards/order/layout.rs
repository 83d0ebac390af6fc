//! What determines the order of rows: the options of the plan, and the properties of the data.

use locdiff_core::config::{ShardsConfig, Tail};

use crate::shards::blocks::Blocks;
use crate::shards::format::ELEMENT_BYTES;

/// Maximum bytes per window. Readers hold two windows, so this limit bounds their memory if row groups are large. A
/// block above the limit is a window by itself.
pub const WINDOW_BYTES_MAX: u64 = 192 << 20;
/// Bytes of a row's latitude and longitude.
const COORDINATE_BYTES: u64 = 16;

/// The options that, together with the data, determine the order of rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanOptions {
    /// Seed that determines the order of rows.
    pub seed: u64,
    /// Rows per step, over all workers.
    pub global_batch: u32,
    /// How to handle rows that do not fill the last batch.
    pub tail: Tail,
    /// Maximum blocks per window.
    pub shuffle_row_groups: u32,
    /// Maximum bytes per window, for one view.
    pub window_bytes_max: u64,
}

impl PlanOptions {
    /// Takes the options from the configuration.
    pub fn new(config: &ShardsConfig, seed: u64, global_batch: u32) -> Self {
        let shuffle_row_groups = config.shuffle_row_groups;
        Self { seed, global_batch, tail: config.tail, shuffle_row_groups, window_bytes_max: WINDOW_BYTES_MAX }
    }
}

/// The properties of the data that determine the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataLayout {
    /// Number of rows of each block, including skipped rows.
    pub block_rows: Vec<u32>,
    /// Numbers per embedding.
    pub width: usize,
    /// Views per row.
    pub views: u32,
    /// Identifies the data.
    pub fingerprint: u64,
}

impl DataLayout {
    /// The layout of `blocks`.
    pub fn of(blocks: &dyn Blocks) -> Self {
        let block_rows = blocks.block_rows().to_vec();
        Self { block_rows, width: blocks.width(), views: blocks.views(), fingerprint: blocks.fingerprint() }
    }

    /// For each block, the number of rows in all blocks before it. The last entry is the number of rows in all blocks.
    pub(crate) fn first_rows(&self) -> Vec<u64> {
        first_rows(&self.block_rows)
    }

    /// Bytes in memory of one view of a row.
    pub(crate) fn row_bytes(&self) -> u64 {
        (self.width * ELEMENT_BYTES) as u64 + COORDINATE_BYTES
    }
}

/// For each block, the number of rows in all blocks before it. The last entry is the number of rows in all blocks.
pub(super) fn first_rows(block_rows: &[u32]) -> Vec<u64> {
    let mut first_rows = vec![0];
    for (block, rows) in block_rows.iter().enumerate() {
        first_rows.push(first_rows[block] + u64::from(*rows));
    }
    first_rows
}
