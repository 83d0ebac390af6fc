//! The fast path for embeddings. It reads column chunks that consist of one uncompressed PLAIN page of float16, which
//! is what `format::writer` writes.
//!
//! Embeddings are read either as a whole block or directly into batches. In both cases, a chunk is read in pieces. If
//! rows go directly into batches, the rows of a piece are copied there with non-temporal stores (`native::row_pool`)
//! while the piece is still in the CPU cache. So each byte is read from memory once and written once.
//!
//! Invariant: the fast path makes the same checks as the general reader (checksum, levels, finite numbers), piece by
//! piece while the bytes are in the CPU cache. The general reader reads the chunks that the fast path does not support,
//! and chunks with a number that is not finite.

use std::hash::Hasher as _;

use parquet::basic::Compression;
use twox_hash::XxHash3_64;

use super::dataset::{BlockAt, Dataset};
use super::reading::ChecksumSlots;
use crate::native::finite::all_finite_halves;
use crate::native::row_pool::RowPlaces;
use crate::shards::error::ShardsError;
use crate::shards::format::{Checksum, Column, ELEMENT_BYTES, Number, split_levels, split_plain_page};

/// Bytes read at a time. The size is large enough for few system calls and small enough that a piece is still in the L2
/// cache when it is checked.
const PIECE_BYTES: usize = 256 << 10;

/// Bytes checked at a time. They fit in the L1 cache.
const TILE_BYTES: usize = 16 << 10;

impl Dataset {
    /// Reads the embeddings of a block. Returns false if the general reader must read them; the contents of `into` are
    /// then undefined.
    pub(super) fn read_direct(
        &self,
        at: BlockAt,
        column: &Column,
        into: &mut Vec<u8>,
        note: ChecksumSlots<'_>,
    ) -> Result<bool, ShardsError> {
        let Some(mut chunk) = self.direct(at, column, note.is_some())? else { return Ok(false) };
        // The buffer is not larger than the chunk, and the chunk lies within the file. So a wrong footer cannot cause a
        // huge allocation.
        into.resize(chunk.left, 0);
        for piece in into.chunks_mut(PIECE_BYTES) {
            chunk.read(piece)?;
        }
        chunk.close(note)
    }

    /// Reads the embeddings of a block and writes those with a destination to `places`. Returns false if the general
    /// reader must read the block instead; the rows in `places` are then undefined.
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

    /// Reads the page header and the levels of a chunk. `None` if the fast path cannot read the chunk, or if reading
    /// single pieces from the source is slow.
    fn direct<'a>(&'a self, at: BlockAt, column: &'a Column, hashed: bool) -> Result<Option<Direct<'a>>, ShardsError> {
        let metadata = self.chunk_metadata(at, column);
        let (start, length) = metadata.byte_range();
        let values = self.block_rows[at.number] as usize * self.width;
        let value_bytes = values * ELEMENT_BYTES;
        // In a chunk of one page, the values are at the end. The fast path reads the chunk only if more than half of
        // its bytes are values.
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

/// A chunk that is being read, with the results of the checks so far.
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

    /// Ends the read: checks the chunk's checksum if one is known. Returns whether all values are finite.
    fn close(self, note: ChecksumSlots<'_>) -> Result<bool, ShardsError> {
        if let Some(hasher) = &self.hasher {
            self.dataset.compare(self.at, self.column, Checksum(hasher.finish()), note)?;
        }
        Ok(self.finite)
    }
}
