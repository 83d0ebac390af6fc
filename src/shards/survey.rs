//! What a run knows of its data before its first step, and whether data is what it was when the run began.

use std::collections::BTreeMap;

use locdiff_core::config::{OnBadRows, ShardsConfig};

use super::blocks::{Blocks, Contents, Dataset, Scan};
use super::error::ShardsError;
use super::format::{Manifest, Statistics};
use super::order::{Bookmark, Mask};

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
                return Err(ShardsError::bad(bad.spot, bad.reason));
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
