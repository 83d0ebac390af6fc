//! Collects the facts about the data that a run needs before its first step, and checks on resume that the data is
//! unchanged.

use std::collections::BTreeMap;

use locdiff_core::config::{OnBadRows, ShardsConfig};

use super::blocks::{Blocks, Contents, Dataset, Scan};
use super::error::ShardsError;
use super::format::{Manifest, Statistics};
use super::order::{Bookmark, Mask};

/// Facts about the data that a run needs before its first step.
#[derive(Debug, Clone, PartialEq)]
pub struct Survey {
    /// The rows that training skips.
    pub mask: Mask,
    /// Mean and standard deviation of the embeddings. `None` for a resumed run, which takes them from its checkpoint.
    pub statistics: Option<Statistics>,
    /// Checksums of the data. `None` if the data has a manifest, which holds the checksums.
    pub contents: Option<Contents>,
}

impl Survey {
    /// Surveys the data of a new run. Data without a manifest is read completely, once. Data with a manifest is
    /// read only if `config` skips bad rows, in order to find them.
    pub fn begin(dataset: &Dataset, config: &ShardsConfig) -> Result<Self, ShardsError> {
        if let Some(statistics) = dataset.manifest().map(Manifest::statistics) {
            let mask = Mask::for_config(dataset, config)?;
            return Ok(Self { mask, statistics: Some(statistics), contents: None });
        }
        let Scan { statistics, contents, bad_rows } = dataset.scan()?;
        let mut skipped: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for bad in bad_rows {
            if config.on_bad_rows == OnBadRows::Error {
                return Err(ShardsError::BadRow { spot: Box::new(bad.spot), reason: bad.reason });
            }
            skipped.entry(bad.block).or_default().push(bad.row);
        }
        let mask = Mask::new(skipped, dataset.block_rows())?;
        Ok(Self { mask, statistics: Some(statistics), contents: Some(contents) })
    }

    /// Surveys the data of a run that resumes from `bookmark`. It is an error if the data at `location` has changed.
    /// After this call, `dataset` compares every read with the checksums in the manifest or, if there is no manifest,
    /// with the checksums in the returned survey.
    pub fn resume(
        dataset: &mut Dataset,
        config: &ShardsConfig,
        bookmark: &Bookmark,
        location: &str,
    ) -> Result<Self, ShardsError> {
        bookmark.check_fingerprint(dataset.fingerprint(), location)?;
        let contents = match (dataset.manifest(), &bookmark.contents) {
            (Some(_), _) => None,
            (None, Some(contents)) => Some(dataset.check_contents(contents)?),
            // The checkpoint has no checksums. Compute them now, so that later changes are detected.
            (None, None) => Some(dataset.read_contents()?),
        };
        dataset.expect_contents(contents.clone())?;
        Ok(Self { mask: Mask::for_config(dataset, config)?, statistics: None, contents })
    }
}
