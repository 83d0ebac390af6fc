//! Reading everything once: statistics, checksums, rows that cannot be used. And what a run takes from that before its first step.

use std::collections::{BTreeMap, BTreeSet};

use locdiff_core::config::{OnBadRows, ShardsConfig};

use super::checksum::Checksum;
use super::contents::Contents;
use super::dataset::Dataset;
use super::error::{ShardsError, Spot};
use super::manifest::Manifest;
use super::statistics::{Moments, Statistics};
use super::{BlockRows, Blocks, Bookmark, ELEMENT_BYTES, Mask};

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
        Ok(Scan { statistics: moments.statistics(), contents: Contents::new(versions, xxh3), bad_rows })
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
        let bad = found.into_iter().map(|(column, value)| {
            let spot = self.spot(block, Some(&column), Some(value.row));
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
    let embeddings = rows.embeddings.chunks_exact((width * ELEMENT_BYTES).max(1));
    embeddings.enumerate().filter(|(row, _)| !bad.contains(row)).for_each(|(_, bytes)| moments.add_bytes(bytes));
}

/// What a run knows of its data before its first step.
#[derive(Debug, Clone, PartialEq)]
pub struct Survey {
    /// Rows that are left out.
    pub mask: Mask,
    /// Mean and standard deviation; none for a run that goes on, whose checkpoint has them.
    pub statistics: Option<Statistics>,
    /// What was read; none where a manifest knows.
    pub contents: Option<Contents>,
}

impl Survey {
    /// Of a run that begins. Data without a manifest is read as a whole, once.
    pub fn begin(dataset: &Dataset, config: &ShardsConfig) -> Result<Self, ShardsError> {
        if let Some(statistics) = dataset.manifest().map(Manifest::statistics) {
            let mask = Mask::for_config(dataset, config)?;
            return Ok(Self { mask, statistics: Some(statistics), contents: None });
        }
        let Scan { statistics, contents, bad_rows } = dataset.scan()?;
        let mut skipped: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for bad in bad_rows {
            if config.on_bad_rows == OnBadRows::Error {
                return Err(ShardsError::Bad { spot: Box::new(bad.spot), reason: bad.reason });
            }
            skipped.entry(bad.block).or_default().push(bad.row);
        }
        let mask = Mask::new(skipped, dataset.block_rows())?;
        Ok(Self { mask, statistics: Some(statistics), contents: Some(contents) })
    }

    /// Of a run that goes on from `then`: that the data at `location` is what it was. `dataset` compares every read with it
    /// from now on.
    pub fn resume(
        dataset: &mut Dataset,
        config: &ShardsConfig,
        then: &Bookmark,
        location: &str,
    ) -> Result<Self, ShardsError> {
        then.check_fingerprint(dataset.fingerprint(), location)?;
        let contents = match (dataset.manifest(), &then.contents) {
            (Some(_), _) => None,
            (None, Some(contents)) => Some(dataset.check_contents(contents)?),
            // A checkpoint that knows nothing of them: they count from now on.
            (None, None) => Some(dataset.read_contents()?),
        };
        dataset.expect(contents.clone())?;
        Ok(Self { mask: Mask::for_config(dataset, config)?, statistics: None, contents })
    }
}
