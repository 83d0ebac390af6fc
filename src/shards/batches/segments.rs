//! Splits the plan into segments. A segment lists the rows that one worker needs from one window.

use std::ops::Range;

use crate::shards::error::ShardsError;
use crate::shards::order::{Epoch, Plan, Position};

/// One worker's part of a window.
#[derive(Debug)]
pub(super) struct Segment {
    /// The blocks with their views, in the order in which the segment first uses them. A block whose rows come more
    /// than once can be listed with several views.
    pub(super) blocks: Vec<(u32, u32)>,
    /// The rows in the order of the plan, each as (index in `blocks`, number of the row in the block).
    rows: Vec<(u32, u32)>,
    /// The steps in order, each with the number of its rows in this segment. A step may have further rows in other
    /// segments.
    steps: Vec<(Position, usize)>,
}

impl Segment {
    /// The steps in order, each with its rows in this segment.
    pub(super) fn steps(&self) -> impl Iterator<Item = (Position, &[(u32, u32)])> {
        let mut rest = self.rows.as_slice();
        self.steps.iter().map(move |(position, count)| {
            let (rows, after) = rest.split_at(*count);
            rest = after;
            (*position, rows)
        })
    }
}

/// Produces one segment after the other, through all epochs, starting at a position.
#[derive(Debug)]
pub(super) struct Segments {
    plan: Plan,
    slice: Range<u64>,
    epoch: Epoch,
    position: Position,
    /// Index of the next row within the epoch.
    index: u64,
}

impl Segments {
    pub(super) fn new(plan: Plan, position: Position, slice: Range<u64>) -> Result<Self, ShardsError> {
        let epoch = plan.epoch(position.epoch)?;
        let index = position.step * u64::from(position.global_batch);
        Ok(Self { plan, slice, epoch, position, index })
    }

    /// The positions that this worker takes in every global batch.
    pub(super) fn slice(&self) -> &Range<u64> {
        &self.slice
    }

    /// Returns the segment of the next window that has rows for this worker.
    pub(super) fn next(&mut self) -> Result<Segment, ShardsError> {
        loop {
            if self.index == self.plan.indices() {
                self.position = Position { epoch: self.position.epoch + 1, step: 0, ..self.position };
                self.epoch = self.plan.epoch(self.position.epoch)?;
                self.index = 0;
            }
            let segment = self.window()?;
            if !segment.rows.is_empty() {
                return Ok(segment);
            }
        }
    }

    /// Returns this worker's rows from `self.index` to the end of the window or of the epoch, whichever comes first.
    /// Advances `self.index` to this end.
    fn window(&mut self) -> Result<Segment, ShardsError> {
        // Indices beyond the last row are padding: they repeat the epoch's rows from the first row on.
        let around = self.index - self.index % self.plan.rows();
        let window = self.epoch.window_of(self.index - around)?;
        let indices = self.index..(around + window.indices().end).min(self.plan.indices());
        let mut segment = Segment { blocks: Vec::new(), rows: Vec::new(), steps: Vec::new() };
        let views = self.plan.layout().views as usize;
        let mut places = vec![u32::MAX; window.blocks().len() * views];
        let batch = u64::from(self.position.global_batch);
        for step in indices.start / batch..indices.end.div_ceil(batch) {
            let first = (step * batch + self.slice.start).max(indices.start);
            let end = (step * batch + self.slice.end).min(indices.end);
            for index in first..end {
                let (place, row, view) = window.place(index - around);
                let in_segment = &mut places[place * views + view as usize];
                if *in_segment == u32::MAX {
                    *in_segment = segment.blocks.len() as u32;
                    segment.blocks.push((window.blocks()[place], view));
                }
                segment.rows.push((*in_segment, row));
            }
            if first < end {
                segment.steps.push((Position { step, ..self.position }, (end - first) as usize));
            }
        }
        self.index = indices.end;
        Ok(segment)
    }
}
