//! The unit of reading: one view of one row group.
//!
//! Embeddings in memory are always little-endian float16, whatever number type the file stores. A row takes `2 * width`
//! bytes, and there are no gaps between rows. Rows are checked when they are read: numbers are finite, coordinates are
//! valid, and checksums match if they are known. Only rows that the caller skips may be bad.

use crate::native::row_pool::RowPlaces;
use crate::shards::error::ShardsError;
use crate::shards::format::ELEMENT_BYTES;

/// The rows of one block, in file order. The value can be reused, because every read replaces its contents.
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
    /// Checks that the lengths are right for a block of `rows` rows of `width` numbers.
    pub(crate) fn check(&self, block: u32, rows: usize, width: usize) -> Result<(), ShardsError> {
        let got = (self.latitudes.len(), self.longitudes.len(), self.embeddings.len());
        let wanted = (rows, rows, rows * width * ELEMENT_BYTES);
        if got == wanted {
            return Ok(());
        }
        let text = format!(
            "block {block}: the numbers of latitudes, longitudes and embedding bytes are {got:?}, wanted {wanted:?}"
        );
        Err(ShardsError::Internal(text))
    }
}

/// A data set that consists of numbered blocks. Any thread may read any block at any time.
pub trait Blocks: Send + Sync {
    /// Number of rows of each block, in data set order, including skipped rows.
    fn block_rows(&self) -> &[u32];
    /// Numbers per embedding.
    fn width(&self) -> usize;
    /// Views per row. If views are averaged (`shards.mean_views`), each mean counts as a view.
    fn views(&self) -> u32;
    /// Identifies the data: equal files have equal fingerprints. With a manifest, the fingerprint covers the checksums
    /// of all files. Without a manifest, it covers only the size, the footer and the first 64 KiB of each file;
    /// [`super::Contents`] detects changes elsewhere.
    fn fingerprint(&self) -> u64;
    /// Reads one view of a block. Bytes of other views are not read, except those that are averaged with it.
    fn read(&self, block: u32, view: u32, into: &mut BlockRows) -> Result<(), ShardsError> {
        self.read_except(block, view, &[], into)
    }
    /// Like [`Blocks::read`], but the rows in `skip` (ascending) may be bad. Skipped rows keep their places in `into`,
    /// with undefined values. Any other bad row is an error, and damaged data is an error too.
    fn read_except(&self, block: u32, view: u32, skip: &[u32], into: &mut BlockRows) -> Result<(), ShardsError>;
    /// Like [`Blocks::read_except`], but writes each embedding to its row's destination in `places`, if the row has
    /// one. Writes the coordinates of all rows to `into`; the embeddings in `into` are undefined afterwards. After an
    /// error, the rows in `places` are undefined.
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
    /// Reads the coordinates of a block. A bad coordinate is an error unless its row is in `skip`. The embeddings in
    /// `into` are undefined afterwards.
    fn read_coordinates(&self, block: u32, skip: &[u32], into: &mut BlockRows) -> Result<(), ShardsError> {
        self.read_except(block, 0, skip, into)
    }
    /// Unusable rows of a block, ascending. A row is unusable if its coordinates are bad, or if its embedding is bad in
    /// any view. Damaged data is an error, not a bad row.
    fn bad_rows(&self, block: u32) -> Result<Vec<u32>, ShardsError>;
}
