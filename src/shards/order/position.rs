//! The position of training in the data. It is stored in checkpoints, together with everything that determines the
//! order of rows.
//!
//! A [`Position`] names the next step, so a resumed run neither repeats nor skips a step. The plan finds the rows of a
//! step without reading earlier data.
//!
//! A checkpoint stores a [`Bookmark`]: the position, and all values that determine the order of rows. If one of these
//! values has changed, resuming fails, and the error names the old and the new value. The number of workers is not one
//! of them and may change.

use locdiff_core::config::Tail;
use serde::{Deserialize, Serialize};

use super::plan::Plan;
use super::weights::{RowWeights, WeightsMark};
use crate::shards::blocks::Contents;
use crate::shards::error::ShardsError;

/// The next step to train on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Seed that determines the order of rows.
    pub seed: u64,
    /// Epoch, from 0.
    pub epoch: u64,
    /// Step within the epoch, from 0.
    pub step: u64,
    /// Rows per step.
    pub global_batch: u32,
}

/// A position in the data, and everything that determines the order of rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bookmark {
    /// The next step.
    pub position: Position,
    /// Fingerprint of the data, 16 hexadecimal digits.
    pub fingerprint: String,
    /// Digest of the skipped rows, 16 hexadecimal digits. All zeros if no row is skipped.
    pub skipped_digest: String,
    /// Number of skipped rows.
    pub skipped_rows: u64,
    /// Number of usable rows.
    pub rows: u64,
    /// Views per row. A mean of several stored views counts as one view.
    pub views: u32,
    /// Largest number of blocks in a shuffle window.
    pub shuffle_row_groups: u32,
    /// Largest number of bytes in a shuffle window.
    pub window_bytes_max: u64,
    /// How to handle rows that do not fill the last batch.
    pub tail: Tail,
    /// How often each row comes. `None`: once per epoch.
    #[serde(default)]
    pub weights: Option<WeightsMark>,
    /// Checksums of data without a manifest. `None` for data with a manifest, because the fingerprint of a manifest
    /// covers all data.
    #[serde(default)]
    pub contents: Option<Contents>,
}

impl Bookmark {
    /// Checks that the fingerprint of the data at `location` is unchanged.
    pub(crate) fn check_fingerprint(&self, now: u64, location: &str) -> Result<(), ShardsError> {
        let now = format!("{now:016x}");
        if now == self.fingerprint {
            return Ok(());
        }
        let reason = format!(
            "its fingerprint is {now}, but the run began with data of fingerprint {}; restore that data, or train on \
             this data in a new run (`--run NAME`)",
            self.fingerprint
        );
        Err(ShardsError::Changed { location: location.to_owned(), reason })
    }
}

impl Plan {
    /// The position of the first step.
    pub fn start(&self) -> Position {
        let options = self.options();
        Position { seed: options.seed, epoch: 0, step: 0, global_batch: options.global_batch }
    }

    /// The position one step later.
    pub fn after(&self, position: Position) -> Position {
        let step = position.step + 1;
        if step < self.steps() {
            Position { step, ..position }
        } else {
            Position { epoch: position.epoch + 1, step: 0, ..position }
        }
    }

    /// The bookmark for a checkpoint. Its `contents` are `None`; for data without a manifest the caller sets them.
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
            weights: self.weights().map(RowWeights::mark).cloned(),
            contents: None,
        }
    }

    /// Returns the position at which training continues. It is an error if the data or the order of rows has changed
    /// since the bookmark was made. `location` names the data in messages.
    pub fn resume(&self, bookmark: &Bookmark, location: &str) -> Result<Position, ShardsError> {
        let now = self.bookmark(bookmark.position);
        bookmark.check_fingerprint(self.layout().fingerprint, location)?;
        check_data(&now, bookmark, location)?;
        check_order(&now, bookmark)?;
        check_weights(&now, bookmark, location)?;
        self.check_position(bookmark.position)?;
        Ok(bookmark.position)
    }

    /// Checks that a position belongs to this plan.
    pub fn check_position(&self, position: Position) -> Result<(), ShardsError> {
        let (options, steps) = (self.options(), self.steps());
        check_equal("train.seed", options.seed, position.seed)?;
        check_equal("train.global_batch", options.global_batch, position.global_batch)?;
        if position.step >= steps {
            let reason =
                format!("the position is step {}, but an epoch has only the steps 0 to {}", position.step, steps - 1);
            return Err(ShardsError::Config(reason));
        }
        Ok(())
    }
}

/// Checks that the skipped rows, the number of usable rows and the number of views have not changed.
fn check_data(now: &Bookmark, recorded: &Bookmark, location: &str) -> Result<(), ShardsError> {
    let changed = |reason| Err(ShardsError::Changed { location: location.to_owned(), reason });
    if (&now.skipped_digest, now.skipped_rows) != (&recorded.skipped_digest, recorded.skipped_rows) {
        return changed(format!(
            "{} rows are left out (digest {}), wanted {} rows left out (digest {})",
            now.skipped_rows, now.skipped_digest, recorded.skipped_rows, recorded.skipped_digest
        ));
    }
    if (now.rows, now.views) != (recorded.rows, recorded.views) {
        return changed(format!(
            "it has {} usable rows with {} views, wanted {} usable rows with {} views",
            now.rows, now.views, recorded.rows, recorded.views
        ));
    }
    Ok(())
}

/// Checks that the settings that determine the order of rows have not changed.
fn check_order(now: &Bookmark, recorded: &Bookmark) -> Result<(), ShardsError> {
    check_equal("shards.shuffle_row_groups", now.shuffle_row_groups, recorded.shuffle_row_groups)?;
    check_equal("the maximum bytes per window", now.window_bytes_max, recorded.window_bytes_max)?;
    let name = |tail| if tail == Tail::Drop { "drop" } else { "pad" };
    check_equal("shards.tail", name(now.tail), name(recorded.tail))
}

/// Checks that each row comes as often as before.
fn check_weights(now: &Bookmark, recorded: &Bookmark, location: &str) -> Result<(), ShardsError> {
    let alpha = |bookmark: &Bookmark| bookmark.weights.as_ref().map_or(0.0, |weights| weights.alpha);
    check_equal("shards.density_alpha", alpha(now), alpha(recorded))?;
    let (Some(now), Some(recorded)) = (&now.weights, &recorded.weights) else { return Ok(()) };
    check_equal("shards.density_cell_degrees", now.cell_degrees, recorded.cell_degrees)?;
    if now.digest == recorded.digest {
        return Ok(());
    }
    let reason = format!("the weights of its rows have digest {}, wanted {}", now.digest, recorded.digest);
    Err(ShardsError::Changed { location: location.to_owned(), reason })
}

fn check_equal<T: PartialEq + std::fmt::Display>(field: &str, got: T, wanted: T) -> Result<(), ShardsError> {
    if got == wanted {
        return Ok(());
    }
    Err(ShardsError::Config(format!(
        "{field} is {got}, but the resumed run began with {wanted}, and the order of rows depends on \
         this setting; restore the old value, or start a new run"
    )))
}
