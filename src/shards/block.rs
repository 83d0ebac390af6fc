//! The unit of reading: one row group, one view.
//!
//! Embeddings are little-endian float16 everywhere behind this door, whatever a file stores: rows of `2 * width` bytes without
//! gaps. A reader has checked what it hands out: finite numbers, coordinates on the Earth, the checksum where one is known.

use super::ShardsError;

/// Bytes of one number of an embedding in memory.
pub const ELEMENT_BYTES: usize = 2;

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

/// A data set as the plan and the prefetcher see it: numbered blocks that any thread may read at any time.
pub trait Blocks: Send + Sync {
    /// Rows of each block, in the order of the data set; bad rows that are skipped count.
    fn block_rows(&self) -> &[u32];
    /// Numbers per embedding.
    fn width(&self) -> usize;
    /// Views per row.
    fn views(&self) -> u32;
    /// What the data is: equal for equal files, different for any that differ in a byte.
    fn fingerprint(&self) -> u64;
    /// Reads one block of one view, and no bytes of other views.
    fn read(&self, block: u32, view: u32, into: &mut BlockRows) -> Result<(), ShardsError>;
    /// As [`Blocks::read`], but the rows of `skip` (ascending) may be bad: they keep their places, and what stands there
    /// has no meaning. Any other bad row is an error, and so are bytes that are not those that were written.
    fn read_except(&self, block: u32, view: u32, skip: &[u32], into: &mut BlockRows) -> Result<(), ShardsError>;
    /// Rows of one block that cannot be used, ascending: bad coordinates, or a bad number in any view. Bytes that are
    /// not those that were written are an error, not a bad row.
    fn bad_rows(&self, block: u32) -> Result<Vec<u32>, ShardsError>;
}
