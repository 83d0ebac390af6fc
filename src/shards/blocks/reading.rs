//! One block of an open data set: column chunks read, compared with the manifest, decoded and checked.
//!
//! Embeddings go into a block of their own ([`Dataset::read_block`]) or straight into the places of the rows that are wanted
//! ([`Dataset::place_block`]), after the same checks.

use bytes::Bytes;
use parquet::errors::ParquetError;

use super::careful::{BadValue, CarefulChunk};
use super::checks;
use super::checksum::Checksum;
use super::dataset::{BlockAt, Dataset};
use super::decode::{Chunk, ChunkBytes, Number, Sink};
use super::error::{ShardsError, Spot};
use super::footer::Column;
use super::{BlockRows, ELEMENT_BYTES};
use crate::native::finite::all_finite_halves;
use crate::native::places::RowPlaces;

/// Where the checksums of a block's chunks are noted, in the order of [`super::footer::Footer::columns`].
pub(super) type Note<'a> = Option<&'a mut [Checksum]>;

impl Dataset {
    /// Reads one column chunk, checked against what is known of it.
    pub(super) fn read_chunk(
        &self,
        at: BlockAt,
        leaf: usize,
        column: &str,
        note: Note<'_>,
    ) -> Result<ChunkBytes, ShardsError> {
        let footer = &self.files[at.file];
        let (start, length) = footer.metadata.metadata().row_group(at.row_group).column(leaf).byte_range();
        let mut buffer = self.pool.take(length as usize);
        self.read_bytes(at, column, start, buffer.as_mut())?;
        if note.is_some() || self.knows_checksums() {
            self.compare(at, column, Checksum::of(buffer.as_ref()), note)?;
        }
        Ok(ChunkBytes { bytes: Bytes::from_owner(buffer), start, file_bytes: footer.bytes })
    }

    /// Fills `into` from an offset of a column's file.
    pub(super) fn read_bytes(&self, at: BlockAt, column: &str, start: u64, into: &mut [u8]) -> Result<(), ShardsError> {
        self.source.read_at(at.file, start, into).map_err(|error| match error {
            ShardsError::Corrupt { reason, .. } => ShardsError::Corrupt { spot: self.chunk_spot(at, column), reason },
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
        column: &str,
        computed: Checksum,
        note: Note<'_>,
    ) -> Result<(), ShardsError> {
        let number = || self.files[at.file].columns().position(|known| known.name == column);
        if let Some((note, number)) = note.and_then(|note| Some((note, number()?))) {
            note[number] = computed;
        }
        let Some(manifest) = &self.manifest else { return self.compare_contents(at, column, computed) };
        let listed = manifest.files[at.file].row_groups.get(at.row_group).and_then(|group| group.xxh3.get(column));
        if listed == Some(&computed) {
            return Ok(());
        }
        let listed = listed.map_or_else(|| "none".to_owned(), Checksum::to_string);
        let reason = format!("its bytes have xxh3 {computed}, the manifest says {listed}: the file is damaged");
        Err(ShardsError::Corrupt { spot: self.chunk_spot(at, column), reason })
    }

    pub(super) fn chunk_spot(&self, at: BlockAt, column: &str) -> Box<Spot> {
        let (file, row_group) = (self.files[at.file].name.clone(), u32::try_from(at.row_group).ok());
        Box::new(Spot { file, row_group, column: Some(column.to_owned()), row: None })
    }

    /// Identifiers of a block's rows, or why one cannot be used; none at all where its file has no column of them.
    pub fn ids(&self, block: u32) -> Result<Option<Vec<Result<String, String>>>, ShardsError> {
        let at = self.blocks[block as usize];
        let Some((root, leaf)) = self.files[at.file].id else { return Ok(None) };
        let name = self.id_name(block).unwrap_or_default();
        let bytes = self.read_chunk(at, leaf, &name, None)?;
        let column = Column { name, root, leaf, number: Number::Float64 };
        let mut ids = Vec::new();
        let read = self.careful(at, &column, bytes).ids(&mut ids);
        read.map_err(|error| self.undecodable(block, &column.name, &error))?;
        Ok(Some(ids))
    }

    pub(super) fn careful<'a>(&'a self, at: BlockAt, column: &Column, bytes: ChunkBytes) -> CarefulChunk<'a> {
        let metadata = &self.files[at.file].metadata;
        CarefulChunk { bytes, metadata, row_group: at.row_group, root: column.root }
    }

    pub(super) fn undecodable(&self, block: u32, column: &str, error: &ParquetError) -> ShardsError {
        let spot = Box::new(self.spot(block, Some(column), None));
        ShardsError::Corrupt { spot, reason: format!("cannot be decoded: {error}") }
    }

    fn chunk<'a>(&'a self, at: BlockAt, column: &Column, bytes: ChunkBytes, width: usize) -> Chunk<'a> {
        let row_group = self.files[at.file].metadata.metadata().row_group(at.row_group);
        let rows = row_group.num_rows() as usize;
        Chunk { bytes, metadata: row_group.column(column.leaf), rows, number: column.number, width }
    }

    fn read_doubles(
        &self,
        block: u32,
        column: &Column,
        (limit, what): (f64, &str),
        into: &mut Vec<f64>,
        found: &mut Vec<(String, BadValue)>,
        note: Note<'_>,
    ) -> Result<(), ShardsError> {
        let at = self.blocks[block as usize];
        let bytes = self.read_chunk(at, column.leaf, &column.name, note)?;
        let undecodable = |error| self.undecodable(block, &column.name, &error);
        into.clear();
        let taken = self.chunk(at, column, bytes.clone(), 1).decode(&mut Sink::Doubles(into)).map_err(undecodable)?;
        let mut values = Vec::new();
        if !taken {
            into.clear();
            let rows = self.careful(at, column, bytes).doubles(into, &mut values).map_err(undecodable)?;
            self.check_rows(block, &column.name, rows)?;
        }
        let outside = into.iter().enumerate().filter(|(_, value)| !checks::is_within(**value, limit));
        values.extend(outside.map(|(row, value)| BadValue { row, reason: checks::outside(*value, limit, what) }));
        values.iter().for_each(|value| into[value.row] = 0.0);
        found.extend(values.into_iter().map(|value| (column.name.clone(), value)));
        Ok(())
    }

    /// Embeddings of any kind of chunk.
    fn read_halves(
        &self,
        block: u32,
        column: &Column,
        into: &mut Vec<u8>,
        found: &mut Vec<(String, BadValue)>,
        note: Note<'_>,
    ) -> Result<(), ShardsError> {
        let at = self.blocks[block as usize];
        let bytes = self.read_chunk(at, column.leaf, &column.name, note)?;
        let undecodable = |error| self.undecodable(block, &column.name, &error);
        into.clear();
        // Bounded by the chunk: a footer that lies about its rows reserves no memory that the file does not have.
        let expanded = self.block_rows[block as usize] as usize * self.width * ELEMENT_BYTES;
        into.reserve(expanded.min(bytes.bytes.len() * if column.number == Number::Float16 { 1 } else { 4 }));
        let chunk = self.chunk(at, column, bytes.clone(), self.width);
        let taken = chunk.decode(&mut Sink::Halves(into)).map_err(undecodable)?;
        if taken && all_finite_halves(into) {
            return Ok(());
        }
        into.clear();
        let mut values = Vec::new();
        let rows = self.careful(at, column, bytes).halves(self.width, into, &mut values).map_err(undecodable)?;
        self.check_rows(block, &column.name, rows)?;
        found.extend(values.into_iter().map(|value| (column.name.clone(), value)));
        Ok(())
    }

    fn check_rows(&self, block: u32, column: &str, rows: usize) -> Result<(), ShardsError> {
        let want = self.block_rows[block as usize] as usize;
        if rows == want {
            return Ok(());
        }
        let spot = Box::new(self.spot(block, Some(column), None));
        Err(ShardsError::Corrupt { spot, reason: format!("{rows} rows, the footer says {want}") })
    }

    /// Reads the coordinates of a block and no embedding; the first that is none is an error, unless its row is one of `skip`.
    pub(super) fn read_coordinates(&self, block: u32, skip: &[u32], into: &mut BlockRows) -> Result<(), ShardsError> {
        let mut found = Vec::new();
        self.read_degrees(block, into, &mut found, None)?;
        self.refuse(block, found, skip)
    }

    /// Latitudes and longitudes; zero where they are none, which is named in `found`.
    fn read_degrees(
        &self,
        block: u32,
        into: &mut BlockRows,
        found: &mut Vec<(String, BadValue)>,
        mut note: Note<'_>,
    ) -> Result<(), ShardsError> {
        let footer = &self.files[self.blocks[block as usize].file];
        let (latitude, longitude) = ((90.0, "latitude"), (180.0, "longitude"));
        self.read_doubles(block, &footer.latitude, latitude, &mut into.latitudes, found, note.as_deref_mut())?;
        self.read_doubles(block, &footer.longitude, longitude, &mut into.longitudes, found, note)
    }

    /// The first of the rows that cannot be used is an error, unless it is one of `skip` (ascending).
    pub(super) fn refuse(&self, block: u32, found: Vec<(String, BadValue)>, skip: &[u32]) -> Result<(), ShardsError> {
        let is_skipped = |row: usize| u32::try_from(row).is_ok_and(|row| skip.binary_search(&row).is_ok());
        let first = found.into_iter().filter(|(_, value)| !is_skipped(value.row)).min_by_key(|(_, value)| value.row);
        match first {
            None => Ok(()),
            Some((column, value)) => {
                let spot = Box::new(self.spot(block, Some(&column), Some(value.row)));
                Err(ShardsError::Bad { spot, reason: value.reason })
            }
        }
    }

    /// Reads a block; rows that cannot be used are zeros, and named in `found` with their column.
    pub(super) fn read_block(
        &self,
        block: u32,
        view: u32,
        into: &mut BlockRows,
        found: &mut Vec<(String, BadValue)>,
        mut note: Note<'_>,
    ) -> Result<(), ShardsError> {
        self.read_degrees(block, into, found, note.as_deref_mut())?;
        let column = &self.files[self.blocks[block as usize].file].views[view as usize];
        if self.read_direct(block, column, &mut into.embeddings, note.as_deref_mut())? {
            return Ok(());
        }
        self.read_halves(block, column, &mut into.embeddings, found, note)
    }

    /// Reads the coordinates of a block into `into`, and the embeddings that are wanted into their places, by way of
    /// `into.embeddings` where the chunk cannot be read straight.
    pub(super) fn place_block(
        &self,
        block: u32,
        view: u32,
        into: &mut BlockRows,
        places: &mut RowPlaces,
        found: &mut Vec<(String, BadValue)>,
    ) -> Result<(), ShardsError> {
        self.read_degrees(block, into, found, None)?;
        let column = &self.files[self.blocks[block as usize].file].views[view as usize];
        if self.place_direct(block, column, places)? {
            return Ok(());
        }
        self.read_halves(block, column, &mut into.embeddings, found, None)?;
        places.restart();
        places.write(&into.embeddings);
        Ok(())
    }
}
