//! One block of an open data set: column chunks read, compared with the manifest, decoded and checked.
//!
//! Embeddings go into a block of their own ([`Dataset::read_block`]) or straight into the places of the rows that are wanted
//! ([`Dataset::place_block`]), after the same checks.

use bytes::Bytes;
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;

use super::block::BlockRows;
use super::dataset::{BlockAt, Dataset};
use crate::native::finite::all_finite_halves;
use crate::native::places::RowPlaces;
use crate::shards::error::{ShardsError, Spot};
use crate::shards::format::{
    BadValue, CarefulChunk, Checksum, Chunk, ChunkBytes, Column, Decoded, ELEMENT_BYTES, Footer, Number, is_within,
    outside,
};

/// Where the checksums of a block's chunks are noted, in the order of [`crate::shards::format::Footer::columns`].
pub(super) type Note<'a> = Option<&'a mut [Checksum]>;

impl Dataset {
    /// Reads one column chunk, checked against what is known of it.
    pub(super) fn read_chunk(&self, at: BlockAt, column: &Column, note: Note<'_>) -> Result<ChunkBytes, ShardsError> {
        let (start, length) = self.chunk_metadata(at, column).byte_range();
        let mut buffer = self.pool.take(length as usize);
        self.read_bytes(at, column, start, buffer.as_mut())?;
        if note.is_some() || self.knows_checksums() {
            self.compare(at, column, Checksum::of(buffer.as_ref()), note)?;
        }
        Ok(ChunkBytes { bytes: Bytes::from_owner(buffer), start, file_bytes: self.files[at.file].bytes })
    }

    /// What the footer says of a column chunk.
    pub(super) fn chunk_metadata(&self, at: BlockAt, column: &Column) -> &ColumnChunkMetaData {
        self.files[at.file].metadata.metadata().row_group(at.row_group).column(column.leaf)
    }

    /// Fills `into` from an offset of a column's file.
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

    /// Would anybody compare a checksum?
    pub(super) fn knows_checksums(&self) -> bool {
        self.manifest.is_some() || self.contents.is_some()
    }

    /// Is this the checksum that the manifest or, without one, the run has of the chunk?
    pub(super) fn compare(
        &self,
        at: BlockAt,
        column: &Column,
        computed: Checksum,
        note: Note<'_>,
    ) -> Result<(), ShardsError> {
        // None: identifiers, which training does not read.
        let number = self.files[at.file].columns().position(|known| known.leaf == column.leaf);
        if let Some((note, number)) = note.zip(number) {
            note[number] = computed;
        }
        let Some(manifest) = &self.manifest else {
            let known = self.contents.as_ref().zip(number);
            let wanted = known.and_then(|(then, number)| then.xxh3.get(at.number * self.columns() + number));
            return wanted.map_or(Ok(()), |wanted| self.same_chunk(at, column, computed, *wanted));
        };
        let row_group = manifest.files[at.file].row_groups.get(at.row_group);
        let listed = row_group.and_then(|row_group| row_group.xxh3.get(&column.name));
        if listed == Some(&computed) {
            return Ok(());
        }
        let listed = listed.map_or_else(|| "none".to_owned(), Checksum::to_string);
        let reason = format!("its bytes have xxh3 {computed}, the manifest says {listed}: the file is damaged");
        Err(ShardsError::corrupt(self.chunk_spot(at, &column.name), reason))
    }

    pub(super) fn chunk_spot(&self, at: BlockAt, column: &str) -> Spot {
        self.spot(at.number as u32, Some(column), None)
    }

    /// Identifiers of a block's rows, or why one cannot be used; none at all where its file has no column of them.
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
        ShardsError::corrupt(self.chunk_spot(at, &column.name), format!("cannot be decoded: {error}"))
    }

    /// Decodes a chunk with `width` numbers per row: straight from its pages where it is of the kind that [`Chunk::decode`] takes
    /// and `is_good` says yes of what came, else row by row with `carefully`, which may find rows that cannot be used.
    fn decode<T: Decoded>(
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
        Err(ShardsError::corrupt(self.chunk_spot(at, &column.name), format!("{got} rows, the footer says {rows}")))
    }

    fn read_doubles(
        &self,
        (at, column): (BlockAt, &Column),
        (limit, what): (f64, &str),
        into: &mut Vec<f64>,
        found: &mut Vec<BadValue>,
        note: Note<'_>,
    ) -> Result<(), ShardsError> {
        let bytes = self.read_chunk(at, column, note)?;
        into.clear();
        self.decode((at, column, 1), bytes, into, |_| true, |chunk, into| chunk.doubles(into, found))?;
        for (row, value) in into.iter_mut().enumerate().filter(|(_, value)| !is_within(**value, limit)) {
            found.push(column.bad(row, outside(*value, limit, what)));
            *value = 0.0;
        }
        Ok(())
    }

    /// Embeddings of any kind of chunk.
    fn read_halves(
        &self,
        (at, column): (BlockAt, &Column),
        into: &mut Vec<u8>,
        found: &mut Vec<BadValue>,
        note: Note<'_>,
    ) -> Result<(), ShardsError> {
        let bytes = self.read_chunk(at, column, note)?;
        into.clear();
        // Bounded by the chunk: a footer that lies about its rows reserves no memory that the file does not have.
        let expanded = self.block_rows[at.number] as usize * self.width * ELEMENT_BYTES;
        into.reserve(expanded.min(bytes.bytes.len() * if column.number == Number::Float16 { 1 } else { 4 }));
        let carefully = |chunk: CarefulChunk<'_>, into: &mut Vec<u8>| chunk.halves(self.width, into, found);
        self.decode((at, column, self.width), bytes, into, all_finite_halves, carefully)
    }

    /// Reads the coordinates of a block and no embedding; the first that is none is an error, unless its row is one of `skip`.
    pub(crate) fn read_coordinates(&self, block: u32, skip: &[u32], into: &mut BlockRows) -> Result<(), ShardsError> {
        let mut found = Vec::new();
        self.read_degrees(block, into, &mut found, None)?;
        self.refuse(block, found, skip)
    }

    /// Latitudes and longitudes; zero where they are none, which is named in `found`.
    fn read_degrees(
        &self,
        block: u32,
        into: &mut BlockRows,
        found: &mut Vec<BadValue>,
        mut note: Note<'_>,
    ) -> Result<(), ShardsError> {
        let at = self.blocks[block as usize];
        let Footer { latitude, longitude, .. } = &self.files[at.file];
        let limits = ((90.0, "latitude"), (180.0, "longitude"));
        self.read_doubles((at, latitude), limits.0, &mut into.latitudes, found, note.as_deref_mut())?;
        self.read_doubles((at, longitude), limits.1, &mut into.longitudes, found, note)
    }

    /// The first of the rows that cannot be used is an error, unless it is one of `skip` (ascending).
    pub(super) fn refuse(&self, block: u32, found: Vec<BadValue>, skip: &[u32]) -> Result<(), ShardsError> {
        let is_skipped = |row: usize| u32::try_from(row).is_ok_and(|row| skip.binary_search(&row).is_ok());
        let first = found.into_iter().filter(|value| !is_skipped(value.row)).min_by_key(|value| value.row);
        first.map_or(Ok(()), |value| Err(self.bad_value(block, value)))
    }

    /// The error that a row of a block is.
    pub(crate) fn bad_value(&self, block: u32, BadValue { column, row, reason }: BadValue) -> ShardsError {
        ShardsError::bad(self.spot(block, Some(&column), Some(row)), reason)
    }

    /// Reads a block; rows that cannot be used are zeros, and named in `found` with their column.
    pub(crate) fn read_block(
        &self,
        block: u32,
        view: u32,
        into: &mut BlockRows,
        found: &mut Vec<BadValue>,
        mut note: Note<'_>,
    ) -> Result<(), ShardsError> {
        self.read_degrees(block, into, found, note.as_deref_mut())?;
        let at = self.blocks[block as usize];
        let column = &self.files[at.file].views[view as usize];
        if self.read_direct(at, column, &mut into.embeddings, note.as_deref_mut())? {
            return Ok(());
        }
        self.read_halves((at, column), &mut into.embeddings, found, note)
    }

    /// Reads the coordinates of a block into `into`, and the embeddings that are wanted into their places, by way of
    /// `into.embeddings` where the chunk cannot be read straight.
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
