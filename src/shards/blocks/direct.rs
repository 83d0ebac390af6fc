//! Embeddings straight from the disk into their place: a chunk of one uncompressed PLAIN page of float16, such as ours.
//!
//! The place is a block, or that of each row in a batch. The latter is written from a piece that the kernel has just copied into the
//! processor's cache, by stores that pass the caches by (`native::places`): each byte comes from memory once and goes there once.
//!
//! Invariant: checked as any other chunk is (checksum, levels, finite numbers), piece by piece while the bytes are in the
//! processor's cache. Whatever is not of this kind, or has a number that is not finite, is left to the general reader.

use std::hash::Hasher as _;

use parquet::basic::Compression;
use twox_hash::XxHash3_64;

use super::dataset::{BlockAt, Dataset};
use super::reading::Note;
use crate::native::finite::all_finite_halves;
use crate::native::places::RowPlaces;
use crate::shards::error::ShardsError;
use crate::shards::format::{Checksum, Column, ELEMENT_BYTES, Number, split_levels, split_plain_page};

/// Bytes that are read at a time: few calls, and what the kernel copies is still in the second-level cache for the checks.
const PIECE_BYTES: usize = 256 << 10;

/// Bytes that are checked at a time, in the first-level cache.
const TILE_BYTES: usize = 16 << 10;

impl Dataset {
    /// Reads the embeddings of a block; false: the general reader must, and `into` holds nothing of use.
    pub(super) fn read_direct(
        &self,
        at: BlockAt,
        column: &Column,
        into: &mut Vec<u8>,
        note: Note<'_>,
    ) -> Result<bool, ShardsError> {
        let Some(mut chunk) = self.direct(at, column, note.is_some())? else { return Ok(false) };
        // Bounded by the chunk, which lies within the file.
        into.resize(chunk.left, 0);
        for piece in into.chunks_mut(PIECE_BYTES) {
            chunk.read(piece)?;
        }
        chunk.close(note)
    }

    /// Reads the embeddings of a block into the places of those that are wanted; false: the general reader must, and the
    /// places hold nothing of use.
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

    /// A chunk of this kind, up to its first value; none: it is of another.
    fn direct<'a>(&'a self, at: BlockAt, column: &'a Column, hashed: bool) -> Result<Option<Direct<'a>>, ShardsError> {
        let metadata = self.chunk_metadata(at, column);
        let (start, length) = metadata.byte_range();
        let values = self.block_rows[at.number] as usize * self.width;
        let value_bytes = values * ELEMENT_BYTES;
        // One page: the values are the end of the chunk. What is before them is smaller than they, or this is no such chunk.
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
        let mut hasher = (hashed || self.knows_checksums()).then(XxHash3_64::new);
        hasher.iter_mut().for_each(|hasher| hasher.write(front.as_ref()));
        let from = start + before as u64;
        Ok(Some(Direct { dataset: self, at, column, from, left: value_bytes, hasher, finite: true }))
    }
}

/// A chunk that is being read, and what has been seen of it.
struct Direct<'a> {
    dataset: &'a Dataset,
    at: BlockAt,
    column: &'a Column,
    /// Where in the file the values go on.
    from: u64,
    /// Bytes of values from there on.
    left: usize,
    /// None where nobody asks for a checksum.
    hasher: Option<XxHash3_64>,
    finite: bool,
}

impl Direct<'_> {
    /// Reads and checks the next bytes of values.
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

    /// Compares the checksum, once all values were seen; whether all of them are finite.
    fn close(self, note: Note<'_>) -> Result<bool, ShardsError> {
        if let Some(hasher) = &self.hasher {
            self.dataset.compare(self.at, self.column, Checksum(hasher.finish()), note)?;
        }
        Ok(self.finite)
    }
}
