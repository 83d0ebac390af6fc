//! Embeddings straight from the disk into their place: a chunk of one uncompressed PLAIN page of float16, such as ours.
//!
//! Invariant: checked as any other chunk is (checksum, levels, finite numbers), piece by piece while the bytes are in the
//! processor's cache. Whatever is not of this kind, or has a number that is not finite, is left to the general reader.

use xxhash_rust::xxh3::Xxh3;

use super::ELEMENT_BYTES;
use super::checks;
use super::checksum::Checksum;
use super::dataset::Dataset;
use super::decode::{Number, split_levels};
use super::error::ShardsError;
use super::footer::Column;
use super::page_header::split_plain_page;
use parquet::basic::Compression;

/// Bytes that are read at a time: few calls, and what the kernel copies is still in the second-level cache for the checks.
const PIECE_BYTES: usize = 256 << 10;

/// Bytes that are checked at a time, in the first-level cache.
const TILE_BYTES: usize = 16 << 10;

impl Dataset {
    /// Reads the embeddings of a block; false: the general reader must, and `into` holds nothing of use.
    pub(super) fn read_direct(
        &self,
        block: u32,
        column: &Column,
        into: &mut Vec<u8>,
        content: Option<&mut Xxh3>,
    ) -> Result<bool, ShardsError> {
        let at = self.blocks[block as usize];
        let row_group = self.files[at.file].metadata.metadata().row_group(at.row_group);
        let metadata = row_group.column(column.leaf);
        let (start, length) = metadata.byte_range();
        let values = row_group.num_rows() as usize * self.width;
        let value_bytes = values * ELEMENT_BYTES;
        let is_plain = column.number == Number::Float16 && metadata.compression() == Compression::UNCOMPRESSED;
        // One page: the values are the end of the chunk. What is before them is smaller than they, or this is no such chunk.
        let before = (length as usize).checked_sub(value_bytes).filter(|before| *before < value_bytes);
        let Some(before) = before.filter(|_| is_plain && self.source.reads_pieces()) else { return Ok(false) };

        let mut front = self.pool.take(before);
        self.read_bytes(at, &column.name, start, front.as_mut())?;
        let Some((page, levels)) = split_plain_page(front.as_ref()) else { return Ok(false) };
        let is_whole = page.values == values && page.bytes == levels.len() + value_bytes;
        let rest = split_levels(metadata.column_descr(), self.width, &mut 0, levels, values);
        if !is_whole || rest.is_none_or(|rest| !rest.is_empty()) {
            return Ok(false);
        }

        let mut hasher = (self.manifest.is_some() || content.is_some()).then(Xxh3::new);
        hasher.iter_mut().for_each(|hasher| hasher.update(front.as_ref()));
        // Bounded by the chunk, which lies within the file.
        into.resize(value_bytes, 0);
        let (mut from, mut finite) = (start + before as u64, true);
        for piece in into.chunks_mut(PIECE_BYTES) {
            self.read_bytes(at, &column.name, from, piece)?;
            from += piece.len() as u64;
            for tile in piece.chunks(TILE_BYTES) {
                hasher.iter_mut().for_each(|hasher| hasher.update(tile));
                finite &= checks::all_finite_bytes(tile);
            }
        }
        let computed = hasher.as_ref().map(Checksum::from);
        if let Some(computed) = computed {
            self.compare(at, &column.name, computed)?;
        }
        if let (true, Some(content), Some(computed)) = (finite, content, computed) {
            content.update(&computed.0.to_le_bytes());
        }
        Ok(finite)
    }
}
