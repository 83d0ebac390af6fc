//! The unit of reading: one row group, one view.
//!
//! Embeddings are little-endian float16 everywhere behind this door, whatever a file stores: rows of `2 * width` bytes without
//! gaps. A reader has checked what it hands out: finite numbers, coordinates on the Earth, the checksum where one is known.

use crate::native::places::RowPlaces;
use crate::shards::error::ShardsError;
use crate::shards::format::ELEMENT_BYTES;

/// The rows of one block, in the order of the file. Reused from block to block: a reader clears and fills it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BlockRows {
    /// Latitudes, degrees.
    pub latitudes: Vec<f64>,
    /// Longitudes, degrees.
    pub longitudes: Vec<f64>,
    /// Embeddings of the view that was asked for: `rows * width * ELEMENT_BYTES` bytes.
    pub embeddings: Vec<u8>,
}

impl BlockRows {
    /// Are these the rows of a block of so many, of this width?
    pub(crate) fn check(&self, block: u32, rows: usize, width: usize) -> Result<(), ShardsError> {
        let got = (self.latitudes.len(), self.longitudes.len(), self.embeddings.len());
        let wanted = (rows, rows, rows * width * ELEMENT_BYTES);
        if got == wanted {
            return Ok(());
        }
        let text =
            format!("block {block}: latitudes, longitudes and bytes of embeddings are {got:?}, wanted {wanted:?}");
        Err(ShardsError::Internal(text))
    }
}

/// A data set as the plan and the prefetcher see it: numbered blocks that any thread may read at any time.
pub trait Blocks: Send + Sync {
    /// Rows of each block, in the order of the data set; bad rows that are skipped count.
    fn block_rows(&self) -> &[u32];
    /// Numbers per embedding.
    fn width(&self) -> usize;
    /// Views per row.
    fn views(&self) -> u32;
    /// What the data is: equal for equal files. With a manifest, different for any that differ in a byte; without one, for those that
    /// differ in size, footer or first 64 KiB, and [`super::Contents`] tells the rest apart.
    fn fingerprint(&self) -> u64;
    /// Reads one block of one view, and no bytes of other views.
    fn read(&self, block: u32, view: u32, into: &mut BlockRows) -> Result<(), ShardsError> {
        self.read_except(block, view, &[], into)
    }
    /// As [`Blocks::read`], but the rows of `skip` (ascending) may be bad: they keep their places, and what stands there
    /// has no meaning. Any other bad row is an error, and so are bytes that are not those that were written.
    fn read_except(&self, block: u32, view: u32, skip: &[u32], into: &mut BlockRows) -> Result<(), ShardsError>;
    /// As [`Blocks::read_except`], with the embeddings in the places of the rows that are wanted. All coordinates go to `into`,
    /// whose embeddings have no meaning afterwards. After an error the places hold anything.
    fn read_placed(
        &self,
        (block, view): (u32, u32),
        skip: &[u32],
        into: &mut BlockRows,
        places: &mut RowPlaces,
    ) -> Result<(), ShardsError> {
        self.read_except(block, view, skip, into)?;
        into.check(block, self.block_rows()[block as usize] as usize, self.width())?;
        places.write(&into.embeddings);
        Ok(())
    }
    /// Rows of one block that cannot be used, ascending: bad coordinates, or a bad number in any view. Bytes that are
    /// not those that were written are an error, not a bad row.
    fn bad_rows(&self, block: u32) -> Result<Vec<u32>, ShardsError>;
}
