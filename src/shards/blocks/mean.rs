//! Means over several views of a row (`shards.mean_views`). They are computed when a block is read, so the code above
//! this layer treats a mean like a stored view.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt as _;

use super::block::{BlockRows, Blocks as _};
use super::dataset::Dataset;
use crate::shards::error::ShardsError;
use crate::shards::format::{BadValue, ELEMENT_BYTES};

/// Numbers that are converted to float32 at a time. They stay in the L1 cache.
const TILE: usize = 1024;

impl Dataset {
    /// The stored views that view number `view` is the mean of. The last mean also takes the views that are left over.
    pub(super) fn averaged(&self, view: u32) -> Range<u32> {
        let first = view * self.mean_views;
        if view + 1 == self.views() { first..self.stored_views } else { first..first + self.mean_views }
    }

    /// Reads the coordinates of a block and the means over some of its stored views. Bad values are set to zero and
    /// added to `found`. The sums are in float32, and the means are rounded to float16.
    pub(super) fn read_mean(
        &self,
        block: u32,
        views: Range<u32>,
        into: &mut BlockRows,
        found: &mut Vec<BadValue>,
    ) -> Result<(), ShardsError> {
        if views.len() == 1 {
            return self.read_block(block, views.start, into, found, None);
        }
        self.read_degrees(block, into, found, None)?;
        let (count, mut sums) = (views.len() as f32, Vec::new());
        for view in views {
            self.read_view(block, view, &mut into.embeddings, found, None)?;
            sums.resize(into.embeddings.len() / ELEMENT_BYTES, 0.0);
            add(&mut sums, &into.embeddings);
        }
        for (sum, bytes) in sums.iter().zip(into.embeddings.as_chunks_mut::<ELEMENT_BYTES>().0) {
            *bytes = f16::from_f32(sum / count).to_le_bytes();
        }
        Ok(())
    }
}

/// Adds the float16 numbers in `bytes` to `sums`.
fn add(sums: &mut [f32], bytes: &[u8]) {
    let (mut halves, mut values) = ([f16::ZERO; TILE], [0.0; TILE]);
    for (sums, bytes) in sums.chunks_mut(TILE).zip(bytes.as_chunks::<ELEMENT_BYTES>().0.chunks(TILE)) {
        halves.iter_mut().zip(bytes).for_each(|(half, bytes)| *half = f16::from_le_bytes(*bytes));
        halves.convert_to_f32_slice(&mut values);
        sums.iter_mut().zip(&values).for_each(|(sum, value)| *sum += value);
    }
}
