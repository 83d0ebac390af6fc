//! Replays the plan for different numbers of workers, for `shards verify --epochs`.
//!
//! The replay goes through every step of every worker, like training, and counts how often each row occurs. It reads no
//! data, except for coordinates if they determine how often a row may occur. Every violation is an error. For example,
//! if a row occurs too often in an epoch, the error names the number of workers, the epoch, the step and the row.

use std::hash::Hasher as _;

use locdiff_core::config::ShardsConfig;
use locdiff_core::protocol::{ReplayReport, ReplayedSize};
use twox_hash::XxHash3_64;

use super::layout::{DataLayout, PlanOptions};
use super::mask::Mask;
use super::plan::{Epoch, Plan, Sample, Share};
use super::weights::RowWeights;
use crate::shards::blocks::Blocks;
use crate::shards::error::ShardsError;

/// Options of a replay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replay {
    /// Number of epochs to replay, starting with epoch 0.
    pub epochs: u32,
    /// The numbers of workers for which the plan is replayed.
    pub world_sizes: Vec<u32>,
    /// Rows per step. If the data set has fewer usable rows than this, one batch holds all usable rows.
    pub global_batch: u32,
    /// Seed that determines the order of rows.
    pub seed: u64,
}

impl Replay {
    /// Checks the options.
    pub fn check(&self) -> Result<(), ShardsError> {
        if self.world_sizes.contains(&0) {
            return Err(ShardsError::Config("--world-sizes contains 0, wanted at least 1 for each size".to_owned()));
        }
        Ok(())
    }

    /// Makes a plan for the rows of `blocks` that `mask` does not skip, with the options of `config`, and replays it.
    pub fn run(&self, blocks: &dyn Blocks, mask: Mask, config: &ShardsConfig) -> Result<ReplayReport, ShardsError> {
        let layout = DataLayout::of(blocks);
        let rows: u64 = layout.block_rows.iter().map(|rows| u64::from(*rows)).sum();
        let global_batch = u64::from(self.global_batch).min(rows - mask.count().min(rows)).max(1) as u32;
        let weights = RowWeights::for_config(blocks, &mask, config)?;
        let plan = Plan::weighted(layout, mask, PlanOptions::new(config, self.seed, global_batch), weights)?;
        self.run_plan(&plan)
    }

    /// Replays a plan.
    pub fn run_plan(&self, plan: &Plan) -> Result<ReplayReport, ShardsError> {
        self.check()?;
        let mut world_sizes: Vec<ReplayedSize> = Vec::new();
        let mut ticks = Ticks::new(plan);
        for workers in &self.world_sizes {
            let size = replay_size(plan, self.epochs, *workers, &mut ticks)?;
            if let Some(first) = world_sizes.first().filter(|first| first.order != size.order) {
                return Err(ShardsError::Internal(format!(
                    "the order of rows for {} workers differs from the order for {} workers: its hash is {}, wanted {}",
                    size.workers, first.workers, size.order, first.order
                )));
            }
            world_sizes.push(size);
        }
        let (layout, is_uniform) = (plan.layout(), plan.weights().is_none());
        Ok(ReplayReport {
            rows: plan.rows(),
            skipped_rows: plan.mask().count(),
            blocks: layout.block_rows.iter().filter(|rows| **rows > 0).count() as u64,
            views: layout.views,
            views_proved: is_uniform
                && self.epochs >= layout.views
                && plan.dropped_rows() == 0
                && !world_sizes.is_empty(),
            quota_max: (!is_uniform).then_some(ticks.quota_max),
            epochs: self.epochs,
            global_batch: plan.options().global_batch,
            steps_per_epoch: plan.steps(),
            tail: plan.options().tail,
            dropped_rows: plan.dropped_rows(),
            padded_rows: plan.padded_rows(),
            world_sizes,
        })
    }
}

fn replay_size(plan: &Plan, epochs: u32, workers: u32, ticks: &mut Ticks<'_>) -> Result<ReplayedSize, ShardsError> {
    let slices: Result<Vec<_>, _> = (0..workers).map(|worker| plan.slice(Share { worker, workers })).collect();
    let slices = slices?;
    let lengths = || slices.iter().map(|slice| slice.end - slice.start);
    let mut order = XxHash3_64::new();
    for epoch in 0..u64::from(epochs) {
        let rows = plan.epoch(epoch)?;
        ticks.begin(epoch, &rows);
        for step in 0..plan.steps() {
            for slice in &slices {
                for sample in rows.step(step, slice) {
                    let sample = sample?;
                    ticks.tick(sample).map_err(|reason| {
                        ShardsError::Internal(format!("{workers} workers, epoch {epoch}, step {step}: {reason}"))
                    })?;
                    for number in [sample.block, sample.row, sample.view] {
                        order.write(&number.to_le_bytes());
                    }
                }
            }
        }
        ticks.end().map_err(|reason| ShardsError::Internal(format!("{workers} workers, epoch {epoch}: {reason}")))?;
    }
    let (slice_rows_min, slice_rows_max) = (lengths().min().unwrap_or(0), lengths().max().unwrap_or(0));
    Ok(ReplayedSize { workers, slice_rows_min, slice_rows_max, order: format!("{:016x}", order.finish()) })
}

/// The rows and views that the replay has seen.
struct Ticks<'plan> {
    plan: &'plan Plan,
    /// For each block, the number of rows in all blocks before it.
    first_rows: Vec<u64>,
    /// How often each row may still occur in this epoch. At first, this is the row's quota.
    left: Vec<u32>,
    /// One bit per row and view: set if the view of the row was used in this round. Without weights, a round has one
    /// epoch per view. With weights, it has one epoch.
    views: Vec<u64>,
    /// With weights: number of bits that must be set in `views` at the end of an epoch without dropped rows. A row uses
    /// as many different views as it can.
    views_wanted: u64,
    /// Number of indices (positions in the order of rows) seen in this epoch.
    seen: u64,
    /// The largest quota of a row in any epoch.
    quota_max: u32,
}

impl<'plan> Ticks<'plan> {
    fn new(plan: &'plan Plan) -> Self {
        let layout = plan.layout();
        let first_rows = layout.first_rows();
        let rows = first_rows[layout.block_rows.len()];
        let views = vec![0; (rows * u64::from(layout.views)).div_ceil(64) as usize];
        Self { plan, first_rows, left: vec![0; rows as usize], views, views_wanted: 0, seen: 0, quota_max: 0 }
    }

    fn begin(&mut self, number: u64, epoch: &Epoch) {
        let (layout, mask) = (self.plan.layout(), self.plan.mask());
        if self.plan.weights().is_some() || number.is_multiple_of(u64::from(layout.views)) {
            self.views.fill(0);
        }
        (self.seen, self.views_wanted) = (0, 0);
        self.left.fill(0);
        for (block, rows) in (0_u32..).zip(&layout.block_rows) {
            for index in 0..rows - mask.skipped(block).len() as u32 {
                let row = self.first_rows[block as usize] + u64::from(mask.row(block, index));
                let quota = epoch.quota(block, index) as u32;
                self.left[row as usize] = quota;
                self.views_wanted += u64::from(quota.min(layout.views));
                self.quota_max = self.quota_max.max(quota);
            }
        }
    }

    fn tick(&mut self, sample: Sample) -> Result<(), String> {
        let Sample { block, row, view } = sample;
        let layout = self.plan.layout();
        let exists = layout.block_rows.get(block as usize).is_some_and(|rows| row < *rows) && view < layout.views;
        if !exists {
            return Err(format!("the plan contains {sample:?}, which does not exist"));
        }
        if self.plan.mask().skipped(block).binary_search(&row).is_ok() {
            return Err(format!("the plan contains {sample:?}, which must be skipped"));
        }
        let number = self.first_rows[block as usize] + u64::from(row);
        let is_padding = self.seen >= self.plan.rows();
        self.seen += 1;
        if is_padding {
            return Ok(());
        }
        let left = &mut self.left[number as usize];
        *left = left.checked_sub(1).ok_or_else(|| format!("{sample:?} occurs too often in the epoch"))?;
        let is_first = set(&mut self.views, number * u64::from(layout.views) + u64::from(view));
        if !is_first && self.plan.weights().is_none() {
            return Err(format!("{sample:?} repeats a view before all views were used"));
        }
        Ok(())
    }

    fn end(&self) -> Result<(), String> {
        let missing: u64 = self.left.iter().map(|left| u64::from(*left)).sum();
        let wanted = (self.plan.indices(), self.plan.dropped_rows());
        if (self.seen, missing) != wanted {
            return Err(format!(
                "the epoch has {} indices and misses {missing} occurrences of rows, wanted {} indices and {} missing \
                 occurrences",
                self.seen, wanted.0, wanted.1
            ));
        }
        let views: u64 = self.views.iter().map(|word| u64::from(word.count_ones())).sum();
        if self.plan.weights().is_some() && missing == 0 && views != self.views_wanted {
            return Err(format!("the rows of the epoch use {views} different views, wanted {}", self.views_wanted));
        }
        Ok(())
    }
}

/// Sets a bit. Returns whether the bit was clear before.
fn set(words: &mut [u64], bit: u64) -> bool {
    let (word, mask) = (&mut words[(bit / 64) as usize], 1 << (bit % 64));
    let clear = *word & mask == 0;
    *word |= mask;
    clear
}

#[cfg(test)]
mod tests {
    use locdiff_core::config::Tail;

    use super::*;

    fn sample(block: u32, row: u32, view: u32) -> Sample {
        Sample { block, row, view }
    }

    #[test]
    fn violations_are_detected() {
        let layout = DataLayout { block_rows: vec![2, 0, 3], width: 1, views: 2, fingerprint: 0 };
        let mask = Mask::new([(2, vec![1])].into(), &layout.block_rows).expect("row 1 exists in block 2");
        let options = PlanOptions::new(&ShardsConfig { tail: Tail::Pad, ..ShardsConfig::default() }, 1, 3);
        let plan = Plan::new(layout, mask, options).expect("four rows fill a batch");
        assert_eq!((plan.rows(), plan.steps(), plan.padded_rows()), (4, 2, 2));
        let epochs: Vec<Epoch> = (0..3).map(|epoch| plan.epoch(epoch).expect("the epoch is in range")).collect();
        let mut ticks = Ticks::new(&plan);
        ticks.begin(0, &epochs[0]);
        let mut tick = |sample| ticks.tick(sample).expect_err("the sample is not in the plan");
        assert!(tick(sample(0, 2, 0)).contains("does not exist"));
        assert!(tick(sample(3, 0, 0)).contains("does not exist"));
        assert!(tick(sample(0, 0, 2)).contains("does not exist"));
        assert!(tick(sample(2, 1, 0)).contains("must be skipped"));
        ticks.tick(sample(0, 0, 0)).expect("the sample occurs for the first time");
        assert!(ticks.tick(sample(0, 0, 0)).expect_err("the sample occurs for the second time").contains("too often"));
        assert!(
            ticks
                .end()
                .expect_err("three rows are missing")
                .contains("2 indices and misses 3 occurrences of rows, wanted 6 indices and 0 missing")
        );
        ticks.begin(1, &epochs[1]);
        let again = ticks.tick(sample(0, 0, 0)).expect_err("epoch 0 has used this view");
        assert!(again.contains("repeats a view"), "{again}");
        ticks.begin(2, &epochs[2]);
        for (block, row) in [(0, 0), (0, 1), (2, 0), (2, 2), (0, 0), (0, 1)] {
            ticks.tick(sample(block, row, 1)).expect("each row occurs once before the padding");
        }
        ticks.end().expect("the epoch is complete");
    }
}
