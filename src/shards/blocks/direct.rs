//! The fast path for embeddings: a column chunk that is one uncompressed PLAIN page of float16, as our writer makes
//! them.
//!
//! The destination is a block, or the places of rows in a batch. Rows are copied to a batch from a piece that is still
//! in the CPU cache, with non-temporal stores (`native::row_pool`), so each byte is read from memory once and written
//! once.
//!
//! Invariant: these chunks get the same checks as all others (checksum, levels, finite numbers), piece by piece while
//! the bytes are in the CPU cache. Chunks of any other kind, or with a number that is not finite, are left to the
//! general reader.

use std::hash::Hasher as _;

use parquet::basic::Compression;
use twox_hash::XxHash3_64;

use super::dataset::{BlockAt, Dataset};
use super::reading::ChecksumSlots;
use crate::native::finite::all_finite_halves;
use crate::native::row_pool::RowPlaces;
use crate::shards::error::ShardsError;
use crate::shards::format::{Checksum, Column, ELEMENT_BYTES, Number, split_levels, split_plain_page};

/// Bytes read at a time. Large enough for few system calls, small enough to stay in the L2 cache for the checks.
const PIECE_BYTES: usize = 256 << 10;

/// Bytes checked at a time, in the L1 cache.
const TILE_BYTES: usize = 16 << 10;

impl Dataset {
    /// Reads the embeddings of a block. Returns false if the general reader must do it; `into` is then undefined.
    pub(super) fn read_direct(
        &self,
        at: BlockAt,
        column: &Column,
        into: &mut Vec<u8>,
        note: ChecksumSlots<'_>,
    ) -> Result<bool, ShardsError> {
        let Some(mut chunk) = self.direct(at, column, note.is_some())? else { return Ok(false) };
        // Bounded by the chunk, which lies within the file.
        into.resize(chunk.left, 0);
        for piece in into.chunks_mut(PIECE_BYTES) {
            chunk.read(piece)?;
        }
        chunk.close(note)
    }

    /// Reads the wanted embeddings of a block into their places. Returns false if the general reader must do it; the
    /// places are then undefined.
    pub(super) fn place_direct(
        &self,
        at: BlockAt,
        column: &Column,
        places: &mut RowPlaces,
    ) -> Result<bool, ShardsError> {
        let Some(mut chunk) = self.direct(at, column, false)? else { return Ok(false) };
        let row_bytes = self.width * ELEMENT_BYTES;
        let mut buffer = self.pool.take((PIECE_BYTES / row_bytes).max(1) * row_bytes);
        places.restart();
        while chunk.left > 0 {
            let length = buffer.as_ref().len().min(chunk.left);
            let piece = &mut buffer.as_mut()[..length];
            chunk.read(piece)?;
            places.write(piece);
        }
        chunk.close(None)
    }

    /// Opens a chunk and reads it up to its first value. `None` if the chunk is not of this kind.
    fn direct<'a>(&'a self, at: BlockAt, column: &'a Column, hashed: bool) -> Result<Option<Direct<'a>>, ShardsError> {
        let metadata = self.chunk_metadata(at, column);
        let (start, length) = metadata.byte_range();
        let values = self.block_rows[at.number] as usize * self.width;
        let value_bytes = values * ELEMENT_BYTES;
        // In a chunk of one page, the values are at the end. Headers and levels are smaller than the values, or the
        // chunk is of another kind.
        let before = (length as usize).checked_sub(value_bytes).filter(|before| *before < value_bytes);
        let is_plain = column.number == Number::Float16 && metadata.compression() == Compression::UNCOMPRESSED;
        let Some(before) = before.filter(|_| is_plain && self.source.reads_pieces()) else { return Ok(None) };

        let mut front = self.pool.take(before);
        self.read_bytes(at, column, start, front.as_mut())?;
        let Some((page, levels)) = split_plain_page(front.as_ref()) else { return Ok(None) };
        let is_whole = page.values == values && page.bytes == levels.len() + value_bytes;
        let rest = split_levels(metadata.column_descr(), self.width, &mut 0, levels, values);
        if !is_whole || rest.is_none_or(|rest| !rest.is_empty()) {
            return Ok(None);
        }
        let mut hasher = (hashed || self.has_checksums()).then(XxHash3_64::new);
        hasher.iter_mut().for_each(|hasher| hasher.write(front.as_ref()));
        let from = start + before as u64;
        Ok(Some(Direct { dataset: self, at, column, from, left: value_bytes, hasher, finite: true }))
    }
}

/// A chunk that is being read, and the results of its checks so far.
struct Direct<'a> {
    dataset: &'a Dataset,
    at: BlockAt,
    column: &'a Column,
    /// File offset of the next value.
    from: u64,
    /// Bytes of values left to read.
    left: usize,
    /// `None` if the checksum is not needed.
    hasher: Option<XxHash3_64>,
    finite: bool,
}

impl Direct<'_> {
    /// Reads and checks the next values.
    fn read(&mut self, piece: &mut [u8]) -> Result<(), ShardsError> {
        self.dataset.read_bytes(self.at, self.column, self.from, piece)?;
        for tile in piece.chunks(TILE_BYTES) {
            self.hasher.iter_mut().for_each(|hasher| hasher.write(tile));
            self.finite &= all_finite_halves(tile);
        }
        self.from += piece.len() as u64;
        self.left -= piece.len();
        Ok(())
    }

    /// Compares the checksum after all values were read. Returns whether all of them are finite.
    fn close(self, note: ChecksumSlots<'_>) -> Result<bool, ShardsError> {
        if let Some(hasher) = &self.hasher {
            self.dataset.compare(self.at, self.column, Checksum(hasher.finish()), note)?;
        }
        Ok(self.finite)
    }
}
