//! Reads one block of an open data set: reads the column chunks, compares their checksums, decodes the values and
//! checks them.
//!
//! [`Dataset::read_block`] writes the embeddings to a [`BlockRows`]. [`Dataset::place_block`] writes the wanted rows to
//! their places in batches. Both make the same checks.

use bytes::Bytes;
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;

use super::block::BlockRows;
use super::dataset::{BlockAt, Dataset};
use crate::native::finite::all_finite_halves;
use crate::native::row_pool::RowPlaces;
use crate::shards::error::{ShardsError, Spot};
use crate::shards::format::{
    BadValue, CarefulChunk, Checksum, Chunk, ChunkBytes, Column, DecodedNumber, ELEMENT_BYTES, Number, is_within,
    outside,
};

/// Receives the checksums of a block's chunks, in the order of [`crate::shards::format::Footer::columns`]. `None` if
/// they are not wanted.
pub(super) type ChecksumSlots<'a> = Option<&'a mut [Checksum]>;

impl Dataset {
    /// Reads one column chunk. If a checksum of the chunk was recorded, checks the bytes against it.
    pub(super) fn read_chunk(
        &self,
        at: BlockAt,
        column: &Column,
        note: ChecksumSlots<'_>,
    ) -> Result<ChunkBytes, ShardsError> {
        let (start, length) = self.chunk_metadata(at, column).byte_range();
        let mut buffer = self.pool.take(length as usize);
        self.read_bytes(at, column, start, buffer.as_mut())?;
        if note.is_some() || self.has_checksums() {
            self.compare(at, column, Checksum::of(buffer.as_ref()), note)?;
        }
        Ok(ChunkBytes { bytes: Bytes::from_owner(buffer), start, file_bytes: self.files[at.file].bytes })
    }

    /// Metadata of a column chunk, from the footer.
    pub(super) fn chunk_metadata(&self, at: BlockAt, column: &Column) -> &ColumnChunkMetaData {
        self.files[at.file].metadata.metadata().row_group(at.row_group).column(column.leaf)
    }

    /// Fills `into` with the bytes at offset `start` of the file. An error names the column.
    pub(super) fn read_bytes(
        &self,
        at: BlockAt,
        column: &Column,
        start: u64,
        into: &mut [u8],
    ) -> Result<(), ShardsError> {
        self.source.read_at(at.file, start, into).map_err(|error| match error {
            ShardsError::Corrupt { reason, .. } => ShardsError::corrupt(self.chunk_spot(at, &column.name), reason),
            other => other,
        })
    }

    /// Whether the manifest or the run has checksums to compare with.
    pub(super) fn has_checksums(&self) -> bool {
        self.manifest.is_some() || self.contents.is_some()
    }

    /// Compares a chunk's checksum with the checksum in the manifest. Without a manifest, compares it with the checksum
    /// that the run has recorded, if there is one.
    pub(super) fn compare(
        &self,
        at: BlockAt,
        column: &Column,
        computed: Checksum,
        note: ChecksumSlots<'_>,
    ) -> Result<(), ShardsError> {
        // `number` is `None` for the identifier column, because training does not read that column.
        let number = self.files[at.file].columns().position(|other| other.leaf == column.leaf);
        if let Some((note, number)) = note.zip(number) {
            note[number] = computed;
        }
        let Some(manifest) = &self.manifest else {
            let recorded = self.contents.as_ref().zip(number);
            let wanted = recorded.and_then(|(contents, number)| contents.xxh3.get(at.number * self.columns() + number));
            return wanted.map_or(Ok(()), |wanted| self.check_chunk(at, column, computed, *wanted));
        };
        let row_group = manifest.files[at.file].row_groups.get(at.row_group);
        let listed = row_group.and_then(|row_group| row_group.xxh3.get(&column.name));
        if listed == Some(&computed) {
            return Ok(());
        }
        let listed = listed.map_or_else(|| "nothing".to_owned(), Checksum::to_string);
        let reason = format!("its bytes have xxh3 {computed}, but the manifest says {listed}: the file is damaged");
        Err(ShardsError::corrupt(self.chunk_spot(at, &column.name), reason))
    }

    pub(super) fn chunk_spot(&self, at: BlockAt, column: &str) -> Spot {
        self.spot(at.number as u32, Some(column), None)
    }

    /// For each row of a block, its identifier, or the reason why the identifier is bad. `None` if the file has no
    /// identifier column.
    pub fn ids(&self, block: u32) -> Result<Option<Vec<Result<String, String>>>, ShardsError> {
        let at = self.blocks[block as usize];
        let Some(column) = &self.files[at.file].id else { return Ok(None) };
        let mut ids = Vec::new();
        let read = self.careful(at, column, self.read_chunk(at, column, None)?).ids(&mut ids);
        read.map_err(|error| self.undecodable(at, column, &error))?;
        Ok(Some(ids))
    }

    pub(super) fn careful<'a>(&'a self, at: BlockAt, column: &'a Column, bytes: ChunkBytes) -> CarefulChunk<'a> {
        CarefulChunk { bytes, metadata: &self.files[at.file].metadata, row_group: at.row_group, column }
    }

    pub(super) fn undecodable(&self, at: BlockAt, column: &Column, error: &ParquetError) -> ShardsError {
        ShardsError::corrupt(self.chunk_spot(at, &column.name), format!("its values cannot be decoded: {error}"))
    }

    /// Decodes a chunk with `width` numbers per row. Tries [`Chunk::decode`] first. If that function does not support
    /// the chunk, or `is_good` rejects the values, decodes row by row with `carefully`, which can report bad rows.
    fn decode<T: DecodedNumber>(
        &self,
        (at, column, width): (BlockAt, &Column, usize),
        bytes: ChunkBytes,
        into: &mut Vec<T>,
        is_good: impl FnOnce(&[T]) -> bool,
        carefully: impl FnOnce(CarefulChunk<'_>, &mut Vec<T>) -> Result<usize, ParquetError>,
    ) -> Result<(), ShardsError> {
        let (metadata, rows) = (self.chunk_metadata(at, column), self.block_rows[at.number] as usize);
        let chunk = Chunk { bytes: bytes.clone(), metadata, rows, number: column.number, width };
        let undecodable = |error| self.undecodable(at, column, &error);
        if chunk.decode(into).map_err(undecodable)? && is_good(into) {
            return Ok(());
        }
        into.clear();
        let got = carefully(self.careful(at, column, bytes), into).map_err(undecodable)?;
        if got == rows {
            return Ok(());
        }
        Err(ShardsError::corrupt(
            self.chunk_spot(at, &column.name),
            format!("it has {got} rows, but the footer says {rows}"),
        ))
    }

    fn read_doubles(
        &self,
        (at, column): (BlockAt, &Column),
        (limit, what): (f64, &str),
        into: &mut Vec<f64>,
        found: &mut Vec<BadValue>,
        note: ChecksumSlots<'_>,
    ) -> Result<(), ShardsError> {
        let bytes = self.read_chunk(at, column, note)?;
        into.clear();
        self.decode(
            (at, column, 1),
            bytes,
            into,
            |_| true,
            |chunk, into| chunk.doubles(self.may_lack_coordinates, into, found),
        )?;
        let is_bad = |value: f64| !(is_within(value, limit) || self.may_lack_coordinates && value.is_nan());
        for (row, value) in into.iter_mut().enumerate().filter(|(_, value)| is_bad(**value)) {
            found.push(column.bad(row, outside(*value, limit, what)));
            *value = 0.0;
        }
        Ok(())
    }

    /// Reads the embeddings of a chunk of any kind. Bad rows are set to zero and added to `found`.
    fn read_halves(
        &self,
        (at, column): (BlockAt, &Column),
        into: &mut Vec<u8>,
        found: &mut Vec<BadValue>,
        note: ChecksumSlots<'_>,
    ) -> Result<(), ShardsError> {
        let bytes = self.read_chunk(at, column, note)?;
        into.clear();
        // The size of the chunk limits the reserved memory, so that a footer with a wrong row count does not cause a
        // huge allocation.
        let expanded = self.block_rows[at.number] as usize * self.width * ELEMENT_BYTES;
        into.reserve(expanded.min(bytes.bytes.len() * if column.number == Number::Float16 { 1 } else { 4 }));
        let carefully = |chunk: CarefulChunk<'_>, into: &mut Vec<u8>| chunk.halves(self.width, into, found);
        self.decode((at, column, self.width), bytes, into, all_finite_halves, carefully)
    }

    /// Reads latitudes and longitudes. Bad values are set to zero and added to `found`. If coordinates are ignored,
    /// both lists are empty afterwards.
    pub(super) fn read_degrees(
        &self,
        block: u32,
        into: &mut BlockRows,
        found: &mut Vec<BadValue>,
        mut note: ChecksumSlots<'_>,
    ) -> Result<(), ShardsError> {
        let at = self.blocks[block as usize];
        let Some([latitude, longitude]) = &self.files[at.file].coordinates else {
            into.latitudes.clear();
            into.longitudes.clear();
            return Ok(());
        };
        let limits = ((90.0, "latitude"), (180.0, "longitude"));
        self.read_doubles((at, latitude), limits.0, &mut into.latitudes, found, note.as_deref_mut())?;
        self.read_doubles((at, longitude), limits.1, &mut into.longitudes, found, note)
    }

    /// Fails on the first bad row that is not in `skip` (ascending).
    pub(crate) fn check_bad_rows(&self, block: u32, found: Vec<BadValue>, skip: &[u32]) -> Result<(), ShardsError> {
        let is_skipped = |row: usize| u32::try_from(row).is_ok_and(|row| skip.binary_search(&row).is_ok());
        let first = found.into_iter().filter(|value| !is_skipped(value.row)).min_by_key(|value| value.row);
        first.map_or(Ok(()), |value| Err(self.bad_value(block, value)))
    }

    /// The error for a bad row of a block.
    pub(crate) fn bad_value(&self, block: u32, BadValue { column, row, reason }: BadValue) -> ShardsError {
        ShardsError::BadRow { spot: Box::new(self.spot(block, Some(&column), Some(row))), reason }
    }

    /// Reads one view of a block. Bad coordinates and bad embeddings are set to zero and added to `found`.
    pub(crate) fn read_block(
        &self,
        block: u32,
        view: u32,
        into: &mut BlockRows,
        found: &mut Vec<BadValue>,
        mut note: ChecksumSlots<'_>,
    ) -> Result<(), ShardsError> {
        self.read_degrees(block, into, found, note.as_deref_mut())?;
        self.read_view(block, view, &mut into.embeddings, found, note)
    }

    /// Reads the embeddings of one view of a block. Bad embeddings are set to zero and added to `found`.
    pub(super) fn read_view(
        &self,
        block: u32,
        view: u32,
        into: &mut Vec<u8>,
        found: &mut Vec<BadValue>,
        mut note: ChecksumSlots<'_>,
    ) -> Result<(), ShardsError> {
        let at = self.blocks[block as usize];
        let column = &self.files[at.file].views[view as usize];
        if self.read_direct(at, column, into, note.as_deref_mut())? {
            return Ok(());
        }
        self.read_halves((at, column), into, found, note)
    }

    /// Reads the coordinates of a block into `into` and writes the wanted embeddings to `places`. If the fast path does
    /// not support the chunk, the embeddings are first decoded to `into.embeddings`.
    pub(super) fn place_block(
        &self,
        (block, view): (u32, u32),
        into: &mut BlockRows,
        places: &mut RowPlaces,
        found: &mut Vec<BadValue>,
    ) -> Result<(), ShardsError> {
        self.read_degrees(block, into, found, None)?;
        let at = self.blocks[block as usize];
        let column = &self.files[at.file].views[view as usize];
        if self.place_direct(at, column, places)? {
            return Ok(());
        }
        self.read_halves((at, column), &mut into.embeddings, found, None)?;
        places.restart();
        places.write(&into.embeddings);
        Ok(())
    }
}
