//! The order of rows: a pure function of (seed, epoch, index).
//!
//! ```text
//! blocks of the data set, without empty ones
//!   -> shuffled by (seed, epoch)
//!   -> cut into windows of `shuffle_row_groups` blocks, or fewer if more would exceed `window_bytes_max`
//!   -> rows of each window permuted by (seed, epoch, window)
//!   -> numbered 0, 1, 2, ... within the epoch; every `global_batch` consecutive rows are one step
//! ```
//!
//! With [`RowWeights`], a row is in the list of its block as often as its quota says (0, 1, 2, ... times), before the
//! rows of a window are permuted. The number of indices per epoch is the same as without weights.
//!
//! The order does not depend on the number of workers. With W workers and B rows per global batch, worker w (from 0)
//! takes positions `w B / W .. (w + 1) B / W` of every global batch, each bound rounded down. So all workers have the
//! same number of steps, and the sizes of their slices differ by at most one row. An average over workers must weight
//! each worker by the size of its slice.
//!
//! Without weights, each epoch uses only one view of a block, so the other views need not be read. The view is
//! `(start + epoch) % views`, where `start` is random for each block. Over `views` consecutive epochs, each view of a
//! row is used once, unless one of these epochs drops the row. With weights, the first copy of a row in an epoch uses
//! this view, the second copy the next view, and so on.
//!
//! This module uses neither I/O nor tensors.

use std::ops::Range;
use std::sync::Arc;

use locdiff_core::config::Tail;
use locdiff_core::random::{Draw, Philox, RangeError, Stream};

use super::layout::{DataLayout, PlanOptions, first_rows};
use super::mask::Mask;
use super::permutation::{Permutation, shuffled};
use super::weights::RowWeights;
use crate::shards::error::ShardsError;

/// Identifies one of the workers that share every batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Number of the worker, from 0.
    pub worker: u32,
    /// Number of workers.
    pub workers: u32,
}

impl Share {
    /// The share of a single worker, which reads everything.
    pub const WHOLE: Self = Self { worker: 0, workers: 1 };

    /// The rows that the worker takes from `batch` rows. If the rows cannot be divided evenly, some workers have one
    /// row more than others.
    pub fn rows(self, batch: u32) -> Range<u64> {
        let cut = |worker: u32| u64::from(worker) * u64::from(batch) / u64::from(self.workers);
        cut(self.worker)..cut(self.worker + 1)
    }
}

/// A row of the data set and one of its views.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sample {
    /// Number of the block in the data set.
    pub block: u32,
    /// Number of the row in the block.
    pub row: u32,
    /// Number of the view.
    pub view: u32,
}

/// The order of rows in every epoch. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Plan {
    data: Arc<Data>,
}

#[derive(Debug)]
struct Data {
    options: PlanOptions,
    layout: DataLayout,
    mask: Mask,
    /// Blocks that have usable rows.
    blocks: Vec<u32>,
    /// For each block, the number of usable rows in all blocks before it. The last entry is the number of all usable
    /// rows.
    first_usable: Vec<u64>,
    /// The view that each block uses in epoch 0.
    first_views: Vec<u32>,
    /// `None` if each row comes once per epoch.
    weights: Option<RowWeights>,
    /// Number of all usable rows.
    rows: u64,
}

impl Plan {
    /// Makes a plan for the rows of `layout` that `mask` does not skip. Each row comes once per epoch.
    pub fn new(layout: DataLayout, mask: Mask, options: PlanOptions) -> Result<Self, ShardsError> {
        Self::weighted(layout, mask, options, None)
    }

    /// Like [`Plan::new`], but each row comes as often as `weights` say. `None`: once per epoch.
    pub fn weighted(
        layout: DataLayout,
        mask: Mask,
        options: PlanOptions,
        weights: Option<RowWeights>,
    ) -> Result<Self, ShardsError> {
        check(&layout, &options)?;
        let numbered = || layout.block_rows.iter().zip(0_u32..);
        let usable: Vec<u32> = numbered().map(|(rows, block)| rows - mask.skipped(block).len() as u32).collect();
        let blocks: Vec<u32> = numbered().map(|(_, block)| block).filter(|block| usable[*block as usize] > 0).collect();
        let first_usable = first_rows(&usable);
        let rows = first_usable[usable.len()];
        if let Some(weights) = weights.as_ref().filter(|weights| weights.rows() != rows) {
            return Err(ShardsError::Internal(format!("{} rows have weights, wanted {rows}", weights.rows())));
        }
        let first_views = first_views(options.seed, &layout).map_err(out_of_range)?;
        let data = Data { options, layout, mask, blocks, first_usable, first_views, weights, rows };
        let plan = Self { data: Arc::new(data) };
        if plan.steps() == 0 {
            let (batch, skipped) = (plan.options().global_batch, plan.mask().count());
            return Err(ShardsError::Config(format!(
                "{rows} usable rows ({skipped} skipped) do not fill one batch of {batch}; \
                 lower train.global_batch, or, if there are any usable rows, set shards.tail = \"pad\""
            )));
        }
        Ok(plan)
    }

    /// The options of the plan.
    pub fn options(&self) -> &PlanOptions {
        &self.data.options
    }

    /// The layout of the data.
    pub fn layout(&self) -> &DataLayout {
        &self.data.layout
    }

    /// Rows that are skipped in every epoch.
    pub fn mask(&self) -> &Mask {
        &self.data.mask
    }

    /// How often each row comes. `None`: once per epoch.
    pub fn weights(&self) -> Option<&RowWeights> {
        self.data.weights.as_ref()
    }

    /// Number of usable rows. Each epoch has as many indices, before rows are dropped or repeated to fill the last
    /// batch.
    pub fn rows(&self) -> u64 {
        self.data.rows
    }

    /// Steps per epoch, the same for every worker.
    pub fn steps(&self) -> u64 {
        let batch = u64::from(self.data.options.global_batch);
        match self.data.options.tail {
            Tail::Drop => self.data.rows / batch,
            Tail::Pad => self.data.rows.div_ceil(batch),
        }
    }

    /// Number of rows that each epoch drops because they do not fill a batch. Different epochs drop different rows.
    pub fn dropped_rows(&self) -> u64 {
        self.data.rows.saturating_sub(self.indices())
    }

    /// Number of rows from the start of an epoch that are repeated at its end to fill the last batch.
    pub fn padded_rows(&self) -> u64 {
        self.indices().saturating_sub(self.data.rows)
    }

    /// Number of indices per epoch: steps times global batch.
    pub fn indices(&self) -> u64 {
        self.steps() * u64::from(self.data.options.global_batch)
    }

    /// The positions that a worker takes in every global batch.
    pub fn slice(&self, share: Share) -> Result<Range<u64>, ShardsError> {
        let Share { worker, workers } = share;
        let batch = self.data.options.global_batch;
        if worker >= workers {
            return Err(ShardsError::Config(format!(
                "worker index {worker} is out of range: there are {workers} workers, and indices begin at 0"
            )));
        }
        if workers > batch {
            return Err(ShardsError::Config(format!(
                "{workers} workers cannot share a global batch of {batch} rows; raise train.global_batch to {workers}"
            )));
        }
        Ok(share.rows(batch))
    }

    /// Computes the order of one epoch, in time proportional to the number of blocks.
    pub fn epoch(&self, epoch: u64) -> Result<Epoch, ShardsError> {
        Epoch::new(Arc::clone(&self.data), epoch).map_err(out_of_range)
    }
}

fn check(layout: &DataLayout, options: &PlanOptions) -> Result<(), ShardsError> {
    let positive = [
        ("the global batch is", u64::from(options.global_batch)),
        ("shards.shuffle_row_groups is", u64::from(options.shuffle_row_groups)),
        ("the number of views is", u64::from(layout.views)),
        ("the width of the embeddings is", layout.width as u64),
    ];
    for (subject, value) in positive {
        if value == 0 {
            return Err(ShardsError::Config(format!("{subject} 0, wanted at least 1")));
        }
    }
    if u32::try_from(layout.block_rows.len()).is_err() {
        return Err(ShardsError::Config(format!(
            "the data has {} row groups, wanted fewer than 2^32",
            layout.block_rows.len()
        )));
    }
    Ok(())
}

fn first_views(seed: u64, layout: &DataLayout) -> Result<Vec<u32>, RangeError> {
    let mut views = vec![0; layout.block_rows.len()];
    let draw = Draw { stream: Stream::Views, step: 0, first_sample: 0, elements: 1 };
    Philox::new(seed).fill_int(draw, layout.views, &mut views)?;
    Ok(views.into_iter().map(|view: i64| view as u32).collect())
}

fn out_of_range(error: RangeError) -> ShardsError {
    ShardsError::Config(format!("cannot draw the order of rows: {error}"))
}

/// The order of rows in one epoch.
#[derive(Debug)]
pub struct Epoch {
    data: Arc<Data>,
    epoch: u64,
    /// The blocks with usable rows, in the order of the epoch.
    order: Vec<u32>,
    /// For each block of `order`, the number of indices in the blocks before it. The last entry is the number of all
    /// indices, which is the number of usable rows.
    starts: Vec<u64>,
    /// For each window, the position of its first block in `order`. The last entry is the number of blocks.
    windows: Vec<u32>,
    /// The shift of the quotas in this epoch.
    shift: u64,
}

impl Epoch {
    fn new(data: Arc<Data>, epoch: u64) -> Result<Self, RangeError> {
        let order = shuffled(data.options.seed, epoch, data.blocks.len() as u32)?;
        let order: Vec<u32> = order.into_iter().map(|place| data.blocks[place as usize]).collect();
        let shift = RowWeights::shift(data.options.seed, epoch)?;
        let mut starts = vec![0];
        for (place, block) in order.iter().enumerate() {
            starts.push(starts[place] + data.indices(*block, shift));
        }
        let windows = windows(&data, &order, &starts);
        Ok(Self { data, epoch, order, starts, windows, shift })
    }

    /// How often a row comes in this epoch, before the rows of an incomplete last batch are dropped, or rows are
    /// repeated to fill that batch. `index` is the position of the row among the usable rows of the block, from 0.
    pub(super) fn quota(&self, block: u32, index: u32) -> u64 {
        let row = self.data.first_usable[block as usize] + u64::from(index);
        let before = |weights: &RowWeights, row| weights.quotas_before(row, self.shift);
        self.data.weights.as_ref().map_or(1, |weights| before(weights, row + 1) - before(weights, row))
    }

    /// The rows at a range of indices of the epoch. Indices beyond the last row start again at the first row, as
    /// [`Tail::Pad`] requires. Each time the iterator enters a window, it finds the window by binary search.
    pub fn samples(&self, indices: Range<u64>) -> Samples<'_> {
        Samples { epoch: self, indices, window: None }
    }

    /// One worker's rows of a step. `slice` is the result of [`Plan::slice`] for the worker.
    pub fn step(&self, step: u64, slice: &Range<u64>) -> Samples<'_> {
        let first = step * u64::from(self.data.options.global_batch);
        self.samples(first + slice.start..first + slice.end)
    }

    /// The window that contains `index`, which must be below the number of rows.
    pub(crate) fn window_of(&self, index: u64) -> Result<Window<'_>, ShardsError> {
        let number = self.windows.partition_point(|first| self.starts[*first as usize] <= index) - 1;
        let (first, end) = (self.windows[number] as usize, self.windows[number + 1] as usize);
        let starts = &self.starts[first..=end];
        let rows = self.starts[end] - self.starts[first];
        let permutation =
            Permutation::new(self.data.options.seed, self.epoch, number as u64, rows).map_err(out_of_range)?;
        Ok(Window { epoch: self, blocks: &self.order[first..end], starts, permutation })
    }

    /// The view of a copy of a row. The first copy in this epoch has number 0.
    pub(crate) fn view(&self, block: u32, copy: u64) -> u32 {
        let views = u64::from(self.data.layout.views);
        ((u64::from(self.data.first_views[block as usize]) + self.epoch % views + copy % views) % views) as u32
    }
}

impl Data {
    /// Usable rows of a block, numbered consecutively over all blocks.
    fn usable_rows(&self, block: u32) -> Range<u64> {
        self.first_usable[block as usize]..self.first_usable[block as usize + 1]
    }

    /// Number of indices of a block in an epoch: the sum of the quotas of its rows.
    fn indices(&self, block: u32, shift: u64) -> u64 {
        let Range { start, end } = self.usable_rows(block);
        let before = |weights: &RowWeights, row| weights.quotas_before(row, shift);
        self.weights.as_ref().map_or(end - start, |weights| before(weights, end) - before(weights, start))
    }
}

fn windows(data: &Data, order: &[u32], starts: &[u64]) -> Vec<u32> {
    let mut windows = vec![0];
    let (mut blocks, mut bytes) = (0, 0);
    for ((place, block), indices) in (0_u32..).zip(order).zip(starts.windows(2)) {
        // With weights, the batches of a window can hold more rows than its blocks have.
        let rows = u64::from(data.layout.block_rows[*block as usize]).max(indices[1] - indices[0]);
        let block_bytes = rows * data.layout.row_bytes();
        let full = blocks == data.options.shuffle_row_groups || bytes + block_bytes > data.options.window_bytes_max;
        if blocks > 0 && full {
            windows.push(place);
            (blocks, bytes) = (0, 0);
        }
        blocks += 1;
        bytes += block_bytes;
    }
    windows.push(order.len() as u32);
    windows
}

/// Consecutive blocks of an epoch whose rows are shuffled together.
#[derive(Debug)]
pub(crate) struct Window<'epoch> {
    epoch: &'epoch Epoch,
    blocks: &'epoch [u32],
    starts: &'epoch [u64],
    permutation: Permutation,
}

impl Window<'_> {
    /// The indices within the epoch that belong to the window.
    pub(crate) fn indices(&self) -> Range<u64> {
        self.starts[0]..self.starts[self.blocks.len()]
    }

    /// The window's blocks, in the order of the epoch.
    pub(crate) fn blocks(&self) -> &[u32] {
        self.blocks
    }

    /// Finds the row at an index of the epoch. The index must belong to the window. Returns the position of the row's
    /// block in [`Window::blocks`], the number of the row in the block, and the view.
    pub(crate) fn place(&self, index: u64) -> (usize, u32, u32) {
        let first = self.starts[0];
        let inside = first + self.permutation.apply(index - first);
        let place = self.starts.partition_point(|start| *start <= inside) - 1;
        let (data, block, inside) = (&self.epoch.data, self.blocks[place], inside - self.starts[place]);
        let (row, copy) = match &data.weights {
            None => (inside, 0),
            Some(weights) => {
                let rows = data.usable_rows(block);
                let (row, copy) = weights.row_at(rows.clone(), inside, self.epoch.shift);
                (row - rows.start, copy)
            }
        };
        (place, data.mask.row(block, row as u32), self.epoch.view(block, copy))
    }

    fn sample(&self, index: u64) -> Sample {
        let (place, row, view) = self.place(index);
        Sample { block: self.blocks[place], row, view }
    }
}

/// Consecutive rows of an epoch.
#[derive(Debug)]
pub struct Samples<'epoch> {
    epoch: &'epoch Epoch,
    indices: Range<u64>,
    window: Option<Window<'epoch>>,
}

impl Iterator for Samples<'_> {
    type Item = Result<Sample, ShardsError>;

    fn next(&mut self) -> Option<Self::Item> {
        let index = self.indices.next()? % self.epoch.data.rows;
        if let Some(window) = self.window.as_ref().filter(|window| window.indices().contains(&index)) {
            return Some(Ok(window.sample(index)));
        }
        let window = match self.epoch.window_of(index) {
            Ok(window) => window,
            Err(error) => return Some(Err(error)),
        };
        let sample = window.sample(index);
        self.window = Some(window);
        Some(Ok(sample))
    }
}
