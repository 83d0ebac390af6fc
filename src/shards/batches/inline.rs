//! Batches without threads: the steps of [`Batches`](super::Batches) one after the other, in the thread that asks.

use std::collections::VecDeque;

use super::delivery::{Batch, Spare, after_the_end};
use super::filling::Filling;
use super::readers::{Answer, place};
use super::segments::Segments;
use crate::shards::blocks::{BlockRows, Blocks};
use crate::shards::error::ShardsError;
use crate::shards::order::{Plan, Position, Share};

/// The batches of one worker, made when they are asked for: for measuring what one core does. Main memory only, no cache.
pub struct InlineBatches<'a> {
    blocks: &'a dyn Blocks,
    plan: Plan,
    segments: Segments,
    filling: Filling,
    ready: VecDeque<Batch>,
    /// Where embeddings are decoded, from block to block.
    embeddings: Vec<u8>,
    /// What went wrong, until it is said.
    failed: Option<ShardsError>,
    /// What was said to have gone wrong.
    ended: Option<String>,
}

impl<'a> InlineBatches<'a> {
    /// From a position on.
    pub fn new(blocks: &'a dyn Blocks, plan: Plan, position: Position, share: Share) -> Result<Self, ShardsError> {
        plan.check_position(position)?;
        let slice = plan.slice(share)?;
        let segments = Segments::new(plan.clone(), position, slice.clone())?;
        let filling = Filling::new(plan.clone(), slice, false, Spare::new(Some(1)));
        let (ready, embeddings, failed, ended) = (VecDeque::new(), Vec::new(), None, None);
        Ok(Self { blocks, plan, segments, filling, ready, embeddings, failed, ended })
    }

    /// The next batch; reads the next window where no batch is ready. What fails arrives in the place of the first batch that
    /// needs it; after an error there are no more.
    #[allow(clippy::should_implement_trait, reason = "it never ends, and an error is no item")]
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
                return Err(after_the_end(ended));
            }
            self.failed = self.read_window().err();
        }
    }

    /// Makes the batches of the next window ready, up to the first that fails.
    fn read_window(&mut self) -> Result<(), ShardsError> {
        let segment = self.segments.next()?;
        let places = self.filling.arrange(&segment)?;
        let answers = segment.blocks.iter().zip(places).map(|(at, places)| {
            place(self.blocks, &self.plan, *at, BlockRows::default(), &mut self.embeddings, places)
        });
        let mut answers: Vec<Answer> = answers.collect();
        let ready = &mut self.ready;
        self.filling.take(&segment, &mut answers, |batch| {
            ready.push_back(batch);
            Ok(())
        })
    }
}
