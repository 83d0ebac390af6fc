//! Reads all data once, computes statistics and checksums, and finds bad rows.

use std::collections::BTreeSet;

use super::block::BlockRows;
use super::contents::Contents;
use super::dataset::Dataset;
use crate::shards::error::{ShardsError, Spot};
use crate::shards::format::{Checksum, MomentSums, Statistics};

/// A bad row that a scan found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadRow {
    /// Number of the block.
    pub block: u32,
    /// Row within the block.
    pub row: u32,
    /// Location, for error messages.
    pub spot: Spot,
    /// Why the row cannot be used.
    pub reason: String,
}

/// The result of [`Dataset::scan`].
#[derive(Debug, Clone, PartialEq)]
pub struct Scan {
    /// Statistics of view 0 over the rows that are usable in every view.
    pub statistics: Statistics,
    /// Checksums of the data.
    pub contents: Contents,
    /// Rows that are bad in some view, in data set order.
    pub bad_rows: Vec<BadRow>,
}

impl Dataset {
    /// Reads all data once. Bad rows are not an error: they are listed in the result.
    pub fn scan(&self) -> Result<Scan, ShardsError> {
        // Get the versions before reading. If a file changes during the scan, its recorded version is then out of date,
        // and a resumed run reads the file again.
        let versions = self.versions()?;
        let mut moments = MomentSums::new(self.width);
        let (mut xxh3, mut bad_rows) = (vec![Checksum(0); self.blocks.len() * self.columns()], Vec::new());
        let mut rows = BlockRows::default();
        for (block, block_xxh3) in (0_u32..).zip(xxh3.chunks_exact_mut(self.columns())) {
            let bad = self.scan_block(block, &mut rows, block_xxh3)?;
            let bad_here: BTreeSet<usize> = bad.iter().map(|bad| bad.row as usize).collect();
            moments.add_bytes(&rows.embeddings, |row| !bad_here.contains(&row));
            bad_rows.extend(bad);
        }
        Ok(Scan { statistics: moments.statistics(), contents: Contents { versions, xxh3 }, bad_rows })
    }

    /// Finds the bad rows of a block. View 0 is read last, so that `rows` holds the embeddings of view 0 afterwards.
    fn scan_block(&self, block: u32, rows: &mut BlockRows, xxh3: &mut [Checksum]) -> Result<Vec<BadRow>, ShardsError> {
        let mut found = Vec::new();
        for view in (0..self.stored_views()).rev() {
            let mut in_view = Vec::new();
            self.read_block(block, view, rows, &mut in_view, Some(&mut *xxh3))?;
            in_view.append(&mut found);
            found = in_view;
        }
        let bad = found.into_iter().map(|value| {
            let spot = self.spot(block, Some(&value.column), Some(value.row));
            BadRow { block, row: value.row as u32, spot, reason: value.reason }
        });
        let mut bad: Vec<BadRow> = bad.collect();
        bad.sort_by_key(|bad| bad.row);
        bad.dedup_by_key(|bad| bad.row);
        Ok(bad)
    }
}
