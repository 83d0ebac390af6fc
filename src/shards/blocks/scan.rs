//! Reading everything once: statistics, checksums, rows that cannot be used.

use std::collections::BTreeSet;

use half::f16;

use super::block::{BlockRows, Blocks};
use super::contents::Contents;
use super::dataset::Dataset;
use crate::shards::error::{ShardsError, Spot};
use crate::shards::format::{Checksum, ELEMENT_BYTES, Moments, Statistics};

/// A row that cannot be used, found by a scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadRow {
    /// Its block.
    pub block: u32,
    /// Its row in the block.
    pub row: u32,
    /// Where it is.
    pub spot: Spot,
    /// What is wrong with it.
    pub reason: String,
}

/// What reading everything once tells.
#[derive(Debug, Clone, PartialEq)]
pub struct Scan {
    /// Over view 0 of the rows that can be used in every view.
    pub statistics: Statistics,
    /// What was read.
    pub contents: Contents,
    /// Rows that cannot be used in some view, in the order of the data.
    pub bad_rows: Vec<BadRow>,
}

impl Dataset {
    /// Reads everything once. Rows that cannot be used are found, not refused.
    pub fn scan(&self) -> Result<Scan, ShardsError> {
        // Before the first byte: what changes meanwhile has another version afterwards.
        let versions = self.versions()?;
        let mut moments = Moments::new(self.width);
        let (mut xxh3, mut bad_rows) = (vec![Checksum(0); self.blocks.len() * self.columns()], Vec::new());
        let mut rows = BlockRows::default();
        for (block, of_block) in (0_u32..).zip(xxh3.chunks_exact_mut(self.columns())) {
            let bad = self.scan_block(block, &mut rows, of_block)?;
            add_usable(&mut moments, &rows, self.width, &bad);
            bad_rows.extend(bad);
        }
        Ok(Scan { statistics: moments.statistics(), contents: Contents { versions, xxh3 }, bad_rows })
    }

    /// View 0 last, whose rows stay in `rows`: by then it is known which of them can be used.
    fn scan_block(&self, block: u32, rows: &mut BlockRows, xxh3: &mut [Checksum]) -> Result<Vec<BadRow>, ShardsError> {
        let mut found = Vec::new();
        for view in (0..self.views()).rev() {
            let mut of_view = Vec::new();
            self.read_block(block, view, rows, &mut of_view, Some(&mut *xxh3))?;
            of_view.append(&mut found);
            found = of_view;
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

fn add_usable(moments: &mut Moments, rows: &BlockRows, width: usize, bad: &[BadRow]) {
    let bad: BTreeSet<usize> = bad.iter().map(|bad| bad.row as usize).collect();
    let embeddings = rows.embeddings.as_chunks::<ELEMENT_BYTES>().0.chunks_exact(width.max(1));
    let mut halves = vec![f16::ZERO; width];
    for (_, row) in embeddings.enumerate().filter(|(row, _)| !bad.contains(row)) {
        halves.iter_mut().zip(row).for_each(|(value, bytes)| *value = f16::from_le_bytes(*bytes));
        moments.add(&halves);
    }
}
