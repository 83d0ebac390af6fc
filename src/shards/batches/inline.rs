//! Makes the same batches as [`Batches`](super::Batches), but sequentially in the calling thread.

use std::collections::VecDeque;

use super::delivery::{Batch, TensorPool, already_failed};
use super::filling::Filling;
use super::readers::{BlockResult, place};
use super::segments::Segments;
use crate::shards::blocks::{BlockRows, Blocks};
use crate::shards::error::ShardsError;
use crate::shards::order::{Plan, Position, Share};

/// The batches of one worker, made on demand in main memory, without a cache. Used to measure the speed of one core.
pub struct InlineBatches<'a> {
    blocks: &'a dyn Blocks,
    plan: Plan,
    segments: Segments,
    filling: Filling,
    ready: VecDeque<Batch>,
    /// Buffer for decoded embeddings, reused for each block.
    embeddings: Vec<u8>,
    /// An error that has not been returned yet.
    failed: Option<ShardsError>,
    /// The text of the error after which no more batches are made. `None` until the error has been returned.
    ended: Option<String>,
}

impl<'a> InlineBatches<'a> {
    /// Makes batches from `position` on.
    pub fn new(blocks: &'a dyn Blocks, plan: Plan, position: Position, share: Share) -> Result<Self, ShardsError> {
        plan.check_position(position)?;
        let slice = plan.slice(share)?;
        let segments = Segments::new(plan.clone(), position, slice.clone())?;
        let filling = Filling::new(plan.clone(), slice, false, TensorPool::new(Some(1)));
        let (ready, embeddings, failed, ended) = (VecDeque::new(), Vec::new(), None, None);
        Ok(Self { blocks, plan, segments, filling, ready, embeddings, failed, ended })
    }

    /// Returns the next batch. Reads the next window if no batch is ready. If a block cannot be read, the error is
    /// returned instead of the first batch that needs the block. After an error there are no more batches.
    #[allow(clippy::should_implement_trait, reason = "the batches never end, and an error is not an item")]
    pub fn next(&mut self) -> Result<Batch, ShardsError> {
        loop {
            if let Some(batch) = self.ready.pop_front() {
                return Ok(batch);
            }
            if let Some(error) = self.failed.take() {
                self.ended = Some(error.to_string());
                return Err(error);
            }
            if let Some(ended) = &self.ended {
                return Err(already_failed(ended));
            }
            self.failed = self.read_window().err();
        }
    }

    /// Makes the batches of the next window. Batches before the first failure are kept.
    fn read_window(&mut self) -> Result<(), ShardsError> {
        let segment = self.segments.next()?;
        let places = self.filling.arrange(&segment)?;
        let results = segment.blocks.iter().zip(places).map(|(at, places)| {
            place(self.blocks, &self.plan, *at, BlockRows::default(), &mut self.embeddings, places)
        });
        let mut results: Vec<BlockResult> = results.collect();
        let ready = &mut self.ready;
        self.filling.take(&segment, &mut results, |batch| {
            ready.push_back(batch);
            Ok(())
        })
    }
}
