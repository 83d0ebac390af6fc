//! One reader of the rows that can be used: a block without those that a mask leaves out.
//!
//! Rows keep their order. What stood in the place of a row that is left out has no meaning, and nobody behind this door sees it.

use super::{BlockRows, Blocks, Dataset, ELEMENT_BYTES, Mask, ShardsError};

impl Mask {
    /// The numbers of the rows of a block of `rows` that are not left out, ascending.
    pub fn left(&self, block: u32, rows: u32) -> impl Iterator<Item = u32> + '_ {
        let skipped = self.skipped(block);
        (0..rows).filter(|row| skipped.binary_search(row).is_err())
    }
}

impl Dataset {
    /// Reads one view of a block: the rows that can be used, in their order.
    pub fn read_usable(&self, mask: &Mask, block: u32, view: u32, into: &mut BlockRows) -> Result<(), ShardsError> {
        self.read_except(block, view, mask.skipped(block), into)?;
        self.keep_usable(mask, block, into);
        Ok(())
    }

    /// The same without embeddings, which are not read.
    pub fn read_usable_coordinates(&self, mask: &Mask, block: u32, into: &mut BlockRows) -> Result<(), ShardsError> {
        into.embeddings.clear();
        self.read_coordinates(block, mask.skipped(block), into)?;
        self.keep_usable(mask, block, into);
        Ok(())
    }

    fn keep_usable(&self, mask: &Mask, block: u32, rows: &mut BlockRows) {
        if mask.skipped(block).is_empty() {
            return;
        }
        let left = || mask.left(block, self.block_rows()[block as usize]);
        keep(&mut rows.latitudes, 1, left());
        keep(&mut rows.longitudes, 1, left());
        if !rows.embeddings.is_empty() {
            keep(&mut rows.embeddings, self.width() * ELEMENT_BYTES, left());
        }
    }
}

/// Keeps these rows, ascending, of values of which each row has so many.
fn keep<T: Copy>(values: &mut Vec<T>, per_row: usize, rows: impl Iterator<Item = u32>) {
    let mut end = 0;
    for row in rows {
        let start = row as usize * per_row;
        values.copy_within(start..start + per_row, end);
        end += per_row;
    }
    values.truncate(end);
}
