//! Fills batches: assigns a place in a batch to each row, and releases batches that are complete.
//!
//! Invariant: a batch is released only after all blocks that contribute rows to it were read and checked without an
//! error. Until then only the readers that fill the batch can access its memory ([`RowPlaces`]). If one of the blocks
//! fails, the batch is never released.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::delivery::{Batch, TensorPool};
use super::readers::BlockResult;
use super::segments::Segment;
use crate::native::host::HostRows;
use crate::native::row_pool::RowPlaces;
use crate::shards::error::ShardsError;
use crate::shards::format::ELEMENT_BYTES;
use crate::shards::order::{Plan, Position};

/// A batch that is not complete yet.
struct OpenBatch {
    position: Position,
    rows: HostRows,
    latitudes: Vec<f64>,
    longitudes: Vec<f64>,
}

/// The batches that are not complete yet. They are in the order of the plan.
pub(super) struct Filling {
    plan: Plan,
    slice: Range<u64>,
    pinned: bool,
    spare: Arc<TensorPool>,
    open: VecDeque<OpenBatch>,
}

impl Filling {
    pub(super) fn new(plan: Plan, slice: Range<u64>, pinned: bool, spare: Arc<TensorPool>) -> Self {
        Self { plan, slice, pinned, spare, open: VecDeque::new() }
    }

    /// Assigns a place in a batch to every row of the next segment. Returns these places, grouped by block of the
    /// segment.
    pub(super) fn arrange(&mut self, segment: &Segment) -> Result<Vec<RowPlaces>, ShardsError> {
        let row_bytes = self.plan.layout().width * ELEMENT_BYTES;
        let block_rows = &self.plan.layout().block_rows;
        let places =
            segment.blocks.iter().map(|(block, _)| RowPlaces::new(block_rows[*block as usize] as usize, row_bytes));
        let mut places: Vec<RowPlaces> = places.collect();
        for (position, rows) in segment.steps() {
            if self.open.back().is_none_or(|last| last.rows.unassigned() == 0) {
                let open = self.begin(position)?;
                self.open.push_back(open);
            }
            if let Some(open) = self.open.back_mut() {
                rows.iter().for_each(|(block, row)| open.rows.assign(&mut places[*block as usize], *row as usize));
            }
        }
        self.spare.make_room(self.open.len());
        Ok(places)
    }

    fn begin(&self, position: Position) -> Result<OpenBatch, ShardsError> {
        let (count, width) = (self.count(), self.plan.layout().width);
        let reused = self.spare.take().and_then(|tensor| HostRows::reuse(tensor, count, width));
        let rows = match reused {
            Some(rows) => rows,
            None => HostRows::new(count, width, self.pinned)?,
        };
        Ok(OpenBatch { position, rows, latitudes: Vec::with_capacity(count), longitudes: Vec::with_capacity(count) })
    }

    /// Rows per batch.
    fn count(&self) -> usize {
        (self.slice.end - self.slice.start) as usize
    }

    /// Takes the results of a segment and passes the batches that are now complete to `send`. Segments must be taken in
    /// the order in which they were arranged.
    pub(super) fn take<E: From<ShardsError>>(
        &mut self,
        segment: &Segment,
        results: &mut [BlockResult],
        mut send: impl FnMut(Batch) -> Result<(), E>,
    ) -> Result<(), E> {
        for (_, rows) in segment.steps() {
            let count = self.count();
            let Some(open) = self.open.front_mut() else {
                return Err(ShardsError::Internal(NOT_OPEN.to_owned()).into());
            };
            for (block, row) in rows.iter().map(|(block, row)| (*block as usize, *row as usize)) {
                let block = match &mut results[block] {
                    Ok(block) => block,
                    failed => return Err(take_error(failed).into()),
                };
                open.latitudes.push(block.latitudes[row]);
                open.longitudes.push(block.longitudes[row]);
            }
            if open.latitudes.len() == count
                && let Some(full) = self.open.pop_front()
            {
                let OpenBatch { position, rows, latitudes, longitudes } = full;
                let (slice, embeddings, spare) = (self.slice.clone(), rows.into_tensor(), Arc::clone(&self.spare));
                send(Batch { embeddings, latitudes, longitudes, position, slice, waited: Duration::ZERO, spare })?;
            }
        }
        Ok(())
    }
}

const NOT_OPEN: &str = "rows arrived for a batch that was not begun";

/// Moves the error out of a result. The value that is left in its place is never read.
fn take_error(result: &mut BlockResult) -> ShardsError {
    match std::mem::replace(result, Ok(Arc::default())) {
        Err(error) => error,
        Ok(_) => ShardsError::Internal("a result without an error was taken for an error".to_owned()),
    }
}
