//! The unit of reading: one view of one row group.
//!
//! Whatever number type a file stores, embeddings in memory are little-endian float16: rows of `2 * width` bytes
//! without gaps. Rows returned by a reader have been checked: finite numbers, valid coordinates, and the checksum if
//! one is known.

use crate::native::row_pool::RowPlaces;
use crate::shards::error::ShardsError;
use crate::shards::format::ELEMENT_BYTES;

/// The rows of one block, in file order. It can be reused: a reader clears it before filling it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BlockRows {
    /// Latitudes, degrees.
    pub latitudes: Vec<f64>,
    /// Longitudes, degrees.
    pub longitudes: Vec<f64>,
    /// Embeddings of the requested view: `rows * width * ELEMENT_BYTES` bytes.
    pub embeddings: Vec<u8>,
}

impl BlockRows {
    /// Checks that the lengths fit a block of `rows` rows of `width` numbers.
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

/// A data set as numbered blocks that any thread may read at any time.
pub trait Blocks: Send + Sync {
    /// Rows of each block, in data set order. Skipped rows are included.
    fn block_rows(&self) -> &[u32];
    /// Numbers per embedding.
    fn width(&self) -> usize;
    /// Views per row.
    fn views(&self) -> u32;
    /// Identifies the data: equal files have equal fingerprints. With a manifest, any changed byte changes the
    /// fingerprint. Without one, only a change in a file's size, footer or first 64 KiB does; [`super::Contents`]
    /// detects all other changes.
    fn fingerprint(&self) -> u64;
    /// Reads one view of a block. Bytes of other views are not read.
    fn read(&self, block: u32, view: u32, into: &mut BlockRows) -> Result<(), ShardsError> {
        self.read_except(block, view, &[], into)
    }
    /// As [`Blocks::read`], but the rows in `skip` (ascending) may be bad. They keep their places in `into` with
    /// undefined values. Any other bad row is an error, and so is damaged data.
    fn read_except(&self, block: u32, view: u32, skip: &[u32], into: &mut BlockRows) -> Result<(), ShardsError>;
    /// As [`Blocks::read_except`], but writes the embeddings of the wanted rows to `places`. All coordinates go to
    /// `into`, whose embeddings are undefined afterwards. After an error the contents of `places` are undefined.
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
    /// Unusable rows of a block, ascending: those with bad coordinates or a bad number in any view. Damaged data is an
    /// error, not a bad row.
    fn bad_rows(&self, block: u32) -> Result<Vec<u32>, ShardsError>;
}
