//! Reads blocks without the rows that a mask skips.
//!
//! After a block is read, its skipped rows are still in the buffer, with undefined values. The functions of this module
//! remove the skipped rows. The other rows keep their order.

use super::{BlockRows, Blocks, Dataset, ELEMENT_BYTES, Mask, ShardsError};

impl Mask {
    /// The numbers of the usable (not skipped) rows of a block, in ascending order. The block has `rows` rows.
    pub fn usable_rows(&self, block: u32, rows: u32) -> impl Iterator<Item = u32> + '_ {
        let skipped = self.skipped(block);
        (0..rows).filter(|row| skipped.binary_search(row).is_err())
    }
}

impl Dataset {
    /// Reads the usable rows of a block, in order: their coordinates, and their embeddings in the view `view`.
    pub fn read_usable(&self, mask: &Mask, block: u32, view: u32, into: &mut BlockRows) -> Result<(), ShardsError> {
        self.read_except(block, view, mask.skipped(block), into)?;
        self.keep_usable(mask, block, into);
        Ok(())
    }

    /// Reads the first stored view of the usable rows of a block, in order, also if views are averaged.
    pub fn read_usable_first_view(&self, mask: &Mask, block: u32, into: &mut BlockRows) -> Result<(), ShardsError> {
        let mut found = Vec::new();
        self.read_block(block, 0, into, &mut found, None)?;
        self.check_bad_rows(block, found, mask.skipped(block))?;
        self.keep_usable(mask, block, into);
        Ok(())
    }

    /// Reads the coordinates of the usable rows of a block, in order. Leaves `into.embeddings` empty.
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
        let usable = || mask.usable_rows(block, self.block_rows()[block as usize]);
        if !rows.latitudes.is_empty() {
            keep(&mut rows.latitudes, 1, usable());
            keep(&mut rows.longitudes, 1, usable());
        }
        if !rows.embeddings.is_empty() {
            keep(&mut rows.embeddings, self.width() * ELEMENT_BYTES, usable());
        }
    }
}

/// Keeps only `rows` (ascending) of an array that has `per_row` values per row.
fn keep<T: Copy>(values: &mut Vec<T>, per_row: usize, rows: impl Iterator<Item = u32>) {
    let mut end = 0;
    for row in rows {
        let start = row as usize * per_row;
        values.copy_within(start..start + per_row, end);
        end += per_row;
    }
    values.truncate(end);
}
