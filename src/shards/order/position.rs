//! Where training stands in the data: four integers, and what they are worth only together with.
//!
//! A position names the next step, so that resuming neither repeats nor skips one: the plan finds its rows without
//! reading what came before. The [`Bookmark`] of a checkpoint also holds what the order depends on; resuming with
//! anything else is an error that names got and wanted. The number of workers is not part of it.

use locdiff_core::config::Tail;
use serde::{Deserialize, Serialize};

use super::plan::Plan;
use crate::shards::blocks::Contents;
use crate::shards::error::ShardsError;

/// The next step to train on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Seed of the order.
    pub seed: u64,
    /// Epoch, from 0.
    pub epoch: u64,
    /// Step within the epoch, from 0.
    pub step: u64,
    /// Rows of one step.
    pub global_batch: u32,
}

/// A position, and what the order depends on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bookmark {
    /// The next step.
    pub position: Position,
    /// Fingerprint of the data, 16 hexadecimal digits.
    pub fingerprint: String,
    /// Digest of the rows that are left out, 16 hexadecimal digits; zeros: none.
    pub skipped_digest: String,
    /// Rows that are left out.
    pub skipped_rows: u64,
    /// Rows that are not.
    pub rows: u64,
    /// Views per row.
    pub views: u32,
    /// Blocks of one window.
    pub shuffle_row_groups: u32,
    /// Bytes of one window.
    pub window_bytes_max: u64,
    /// What becomes of the rows that do not fill the last batch.
    pub tail: Tail,
    /// What data without a manifest was; none: the fingerprint, which is the manifest's, says it all.
    #[serde(default)]
    pub contents: Option<Contents>,
}

impl Bookmark {
    /// That the data at `location` has the fingerprint that it had.
    pub(crate) fn check_fingerprint(&self, now: u64, location: &str) -> Result<(), ShardsError> {
        let now = format!("{now:016x}");
        if now == self.fingerprint {
            return Ok(());
        }
        let reason = format!("its fingerprint is {now}, wanted {}", self.fingerprint);
        Err(ShardsError::Changed { location: location.to_owned(), reason })
    }
}

impl Plan {
    /// The first step.
    pub fn start(&self) -> Position {
        let options = self.options();
        Position { seed: options.seed, epoch: 0, step: 0, global_batch: options.global_batch }
    }

    /// The position one step on.
    pub fn after(&self, position: Position) -> Position {
        let step = position.step + 1;
        if step < self.steps() {
            Position { step, ..position }
        } else {
            Position { epoch: position.epoch + 1, step: 0, ..position }
        }
    }

    /// What a checkpoint keeps; where data has no manifest, its [`Contents`] too.
    pub fn bookmark(&self, position: Position) -> Bookmark {
        let (options, layout, mask) = (self.options(), self.layout(), self.mask());
        Bookmark {
            position,
            fingerprint: format!("{:016x}", layout.fingerprint),
            skipped_digest: format!("{:016x}", mask.digest()),
            skipped_rows: mask.count(),
            rows: self.rows(),
            views: layout.views,
            shuffle_row_groups: options.shuffle_row_groups,
            window_bytes_max: options.window_bytes_max,
            tail: options.tail,
            contents: None,
        }
    }

    /// The position to go on from, if data and order are those of the bookmark; `location` names the data in messages.
    pub fn resume(&self, bookmark: &Bookmark, location: &str) -> Result<Position, ShardsError> {
        let now = self.bookmark(bookmark.position);
        bookmark.check_fingerprint(self.layout().fingerprint, location)?;
        check_data(&now, bookmark, location)?;
        check_order(&now, bookmark)?;
        self.check_position(bookmark.position)?;
        Ok(bookmark.position)
    }

    /// That the position is one of this plan.
    pub fn check_position(&self, position: Position) -> Result<(), ShardsError> {
        let (options, steps) = (self.options(), self.steps());
        same("train.seed", options.seed, position.seed)?;
        same("train.global_batch", options.global_batch, position.global_batch)?;
        if position.step >= steps {
            let reason = format!("the position is step {} of an epoch that has {steps}", position.step);
            return Err(ShardsError::Config(reason));
        }
        Ok(())
    }
}

/// The rows themselves.
fn check_data(now: &Bookmark, then: &Bookmark, location: &str) -> Result<(), ShardsError> {
    let changed = |reason| Err(ShardsError::Changed { location: location.to_owned(), reason });
    if (&now.skipped_digest, now.skipped_rows) != (&then.skipped_digest, then.skipped_rows) {
        return changed(format!(
            "{} rows are left out (digest {}), wanted {} (digest {})",
            now.skipped_rows, now.skipped_digest, then.skipped_rows, then.skipped_digest
        ));
    }
    if (now.rows, now.views) != (then.rows, then.views) {
        return changed(format!(
            "it has {} usable rows of {} views, wanted {} of {}",
            now.rows, now.views, then.rows, then.views
        ));
    }
    Ok(())
}

/// What the configuration says about their order.
fn check_order(now: &Bookmark, then: &Bookmark) -> Result<(), ShardsError> {
    same("shards.shuffle_row_groups", now.shuffle_row_groups, then.shuffle_row_groups)?;
    same("the bound of a window in bytes", now.window_bytes_max, then.window_bytes_max)?;
    let name = |tail| if tail == Tail::Drop { "drop" } else { "pad" };
    same("shards.tail", name(now.tail), name(then.tail))
}

fn same<T: PartialEq + std::fmt::Display>(field: &str, got: T, wanted: T) -> Result<(), ShardsError> {
    if got == wanted {
        return Ok(());
    }
    Err(ShardsError::Config(format!(
        "{field} is {got}, but the run that is resumed began with {wanted}, and the order of its rows depends on it; \
         set it back, or begin a new run"
    )))
}
