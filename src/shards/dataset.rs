//! Ours or anybody's Parquet as numbered blocks: one per row group.
//!
//! Invariant: what [`Blocks::read`] hands out has been checked on this very read: the checksum of every column chunk where a
//! manifest knows it, no nulls, lists of the right width, finite numbers, coordinates on the Earth.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use locdiff_launch::config::ShardsConfig;
use parquet::errors::ParquetError;
use xxhash_rust::xxh3::Xxh3;

use super::careful::{BadValue, CarefulChunk};
use super::checks;
use super::checksum::Checksum;
use super::decode::{Chunk, ChunkBytes, Number, Sink};
use super::error::{ShardsError, Spot};
use super::footer::{Column, ColumnNames, Footer, bad, corrupt};
use super::index::DatasetIndex;
use super::locate;
use super::manifest::Manifest;
use super::source::{BufferPool, ByteSource};
use super::statistics::{Moments, Statistics};
use super::{BlockRows, Blocks, ELEMENT_BYTES};

/// A row group that has rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockAt {
    pub(super) file: usize,
    pub(super) row_group: usize,
}

/// A row that cannot be used, found by a scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadRow {
    /// Its block.
    pub block: u32,
    /// Its row in the block.
    pub row: u32,
    /// Where it is, and what is wrong with it.
    pub message: String,
}

/// What reading everything once tells.
#[derive(Debug, Clone, PartialEq)]
pub struct Scan {
    /// Over the rows of view 0 that can be used.
    pub statistics: Statistics,
    /// xxh3 over the checksums of every column chunk that is ever read: differs where any byte of them does.
    pub content: Checksum,
    /// Rows that cannot be used in some view, in the order of the data.
    pub bad_rows: Vec<BadRow>,
}

/// A data set that is open.
pub struct Dataset {
    pub(super) source: Arc<dyn ByteSource>,
    pub(super) manifest: Option<Manifest>,
    pub(super) files: Vec<Footer>,
    pub(super) blocks: Vec<BlockAt>,
    block_rows: Vec<u32>,
    pub(super) width: usize,
    views: u32,
    fingerprint: u64,
    pub(super) pool: Arc<BufferPool>,
    statistics: OnceLock<Statistics>,
}

impl Dataset {
    /// Opens a folder (with a manifest or without), a file, a glob or a URL: footers are read, rows are not.
    pub fn open(location: &str, config: &ShardsConfig) -> Result<Self, ShardsError> {
        let found = locate::locate(location, config)?;
        Self::assemble(&DatasetIndex::of(location, &found)?, found.source, config)
    }

    /// Opens what another process has listed and read the footers of, without asking for either again.
    pub fn from_index(index: &DatasetIndex, config: &ShardsConfig) -> Result<Self, ShardsError> {
        Self::assemble(index, index.source(config)?, config)
    }

    /// The same with given access to the server.
    #[cfg(feature = "s3")]
    pub fn from_index_s3(
        index: &DatasetIndex,
        options: &super::S3Options,
        config: &ShardsConfig,
    ) -> Result<Self, ShardsError> {
        Self::assemble(index, locate::locate_index_s3(index, options)?, config)
    }

    /// Puts together what was located.
    fn assemble(index: &DatasetIndex, source: Arc<dyn ByteSource>, config: &ShardsConfig) -> Result<Self, ShardsError> {
        let manifest = index.manifest()?;
        // The format's own names stand in what we wrote; the configuration's are for others' files.
        let names = if manifest.is_some() { ColumnNames::own() } else { ColumnNames::of(config) };
        let files = index.files().map(|(name, bytes, raw)| Footer::parse(name, bytes, raw, &names));
        let files = files.collect::<Result<Vec<Footer>, ShardsError>>()?;
        let fingerprint = index.fingerprint();
        let statistics = manifest.as_ref().map(Manifest::statistics);
        let mut dataset = Self {
            source,
            files,
            blocks: Vec::new(),
            block_rows: Vec::new(),
            width: manifest.as_ref().map_or(0, |manifest| manifest.width as usize),
            views: manifest.as_ref().map_or(0, |manifest| manifest.views),
            manifest,
            fingerprint,
            pool: Arc::default(),
            statistics: statistics.map_or_else(OnceLock::new, OnceLock::from),
        };
        dataset.number_blocks(index.location())?;
        dataset.agree()?;
        Ok(dataset)
    }

    /// The manifest, where there is one.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.manifest.as_ref()
    }

    /// Rows of all blocks.
    pub fn rows(&self) -> u64 {
        self.block_rows.iter().map(|&rows| u64::from(rows)).sum()
    }

    /// Number of files.
    pub fn file_count(&self) -> usize {
        self.files.len()
    }

    /// Mean and standard deviation of view 0: the manifest's, or a scan's, which is made once.
    pub fn statistics(&self) -> Result<Statistics, ShardsError> {
        if let Some(known) = self.statistics.get() {
            return Ok(known.clone());
        }
        let statistics = self.scan()?.statistics;
        Ok(self.statistics.get_or_init(|| statistics).clone())
    }

    /// Where a row is, for messages.
    pub fn spot(&self, block: u32, column: Option<&str>, row: Option<usize>) -> Spot {
        let at = self.blocks[block as usize];
        Spot {
            file: self.files[at.file].name.clone(),
            row_group: u32::try_from(at.row_group).ok(),
            column: column.map(str::to_owned),
            row: row.map(|row| row as u64),
        }
    }

    /// Reads everything once. Rows that cannot be used are found, not refused.
    pub fn scan(&self) -> Result<Scan, ShardsError> {
        let mut moments = Moments::new(self.width);
        let mut content = Xxh3::new();
        let mut bad_rows = Vec::new();
        let mut rows = BlockRows::default();
        for block in 0..self.blocks.len() as u32 {
            let mut of_block = Vec::new();
            for view in 0..self.views {
                let mut found = Vec::new();
                self.read_block(block, view, &mut rows, &mut found, Some(&mut content))?;
                if view == 0 {
                    add_usable(&mut moments, &rows, self.width, &found);
                }
                of_block.extend(found.into_iter().map(|(column, value)| {
                    let spot = self.spot(block, Some(&column), Some(value.row));
                    BadRow { block, row: value.row as u32, message: format!("{spot}: {}", value.reason) }
                }));
            }
            of_block.sort_by_key(|bad| bad.row);
            of_block.dedup_by_key(|bad| bad.row);
            bad_rows.append(&mut of_block);
        }
        Ok(Scan { statistics: moments.statistics(), content: Checksum::from(&content), bad_rows })
    }

    /// Row groups with rows, in the order of the files.
    fn number_blocks(&mut self, location: &str) -> Result<(), ShardsError> {
        for (file, footer) in self.files.iter().enumerate() {
            let row_groups = footer.metadata.metadata().row_groups();
            for (row_group, found) in row_groups.iter().enumerate() {
                let rows = u32::try_from(found.num_rows()).map_err(|_| {
                    corrupt(&footer.name, format!("row group {row_group} has {} rows", found.num_rows()))
                })?;
                if rows > 0 {
                    self.blocks.push(BlockAt { file, row_group });
                    self.block_rows.push(rows);
                }
            }
        }
        if self.blocks.is_empty() {
            let reason = format!("its {} files hold no rows", self.files.len());
            return Err(ShardsError::Missing { location: location.to_owned(), reason });
        }
        Ok(())
    }

    /// Do all files agree on width and views, and with the manifest?
    fn agree(&mut self) -> Result<(), ShardsError> {
        let first = &self.files[0];
        if self.views == 0 {
            self.views = first.views.len() as u32;
        }
        for footer in &self.files {
            if footer.views.len() != self.views as usize {
                let (got, want) = (footer.views.len(), self.views);
                let like = if self.manifest.is_some() { "the manifest" } else { &first.name };
                return Err(bad(&footer.name, None, format!("has {got} views, expected {want} as {like} has")));
            }
        }
        if self.width == 0 {
            self.width = self.find_width()?;
        }
        for block in 0..self.blocks.len() {
            self.check_shape(block)?;
        }
        Ok(())
    }

    /// The width of the first list that is there.
    fn find_width(&self) -> Result<usize, ShardsError> {
        for (block, at) in self.blocks.iter().enumerate() {
            let column = &self.files[at.file].views[0];
            let values = self.chunk_values(*at, column.leaf);
            let rows = i64::from(self.block_rows[block]);
            if values % rows == 0 && values > rows {
                return Ok((values / rows) as usize);
            }
            // Nulls or ragged lists, or lists of one number: only the data tells.
            let bytes = self.read_chunk(*at, column.leaf, &column.name)?;
            let first = self.careful(*at, column, bytes).first_width();
            if let Some(width) = first.map_err(|error| self.undecodable(block as u32, &column.name, &error))? {
                return Ok(width);
            }
        }
        let name = &self.files[0].views[0].name;
        Err(bad(&self.files[0].name, Some(name), "has no embedding that is not empty".into()))
    }

    fn chunk_values(&self, at: BlockAt, leaf: usize) -> i64 {
        self.files[at.file].metadata.metadata().row_group(at.row_group).column(leaf).num_values()
    }

    /// Footers tell how many numbers a row group has: a wrong width is found before anything is read.
    fn check_shape(&self, block: usize) -> Result<(), ShardsError> {
        let (at, rows) = (self.blocks[block], self.block_rows[block]);
        let footer = &self.files[at.file];
        if let Some(manifest) = &self.manifest {
            let listed = manifest.files[at.file].row_groups.get(at.row_group).map(|row_group| row_group.rows);
            if listed != Some(rows) {
                let reason = format!("{rows} rows, the manifest says {}", listed.unwrap_or(0));
                let spot = Box::new(self.spot(block as u32, None, None));
                return Err(ShardsError::Corrupt { spot, reason });
            }
        }
        let chunk_bytes = |leaf: usize| footer.metadata.metadata().row_group(at.row_group).column(leaf).byte_range();
        for column in footer.views.iter().chain([&footer.latitude, &footer.longitude]) {
            let (start, length) = chunk_bytes(column.leaf);
            if start.checked_add(length).is_none_or(|end| end > footer.bytes) {
                let reason = format!("bytes {start} to {start}+{length} of a file of {}", footer.bytes);
                let spot = Box::new(self.spot(block as u32, Some(&column.name), None));
                return Err(ShardsError::Corrupt { spot, reason });
            }
        }
        for column in &footer.views {
            let values = self.chunk_values(at, column.leaf);
            let whole = values % i64::from(rows) == 0;
            if whole && values > i64::from(rows) && values / i64::from(rows) != self.width as i64 {
                let spot = Box::new(self.spot(block as u32, Some(&column.name), None));
                let reason = format!("embeddings of width {}, expected {}", values / i64::from(rows), self.width);
                return Err(ShardsError::Bad { spot, reason });
            }
        }
        Ok(())
    }

    /// Reads one column chunk, checked against the manifest.
    pub(super) fn read_chunk(&self, at: BlockAt, leaf: usize, column: &str) -> Result<ChunkBytes, ShardsError> {
        let footer = &self.files[at.file];
        let (start, length) = footer.metadata.metadata().row_group(at.row_group).column(leaf).byte_range();
        let mut buffer = self.pool.take(length as usize);
        self.read_bytes(at, column, start, buffer.as_mut())?;
        if self.manifest.is_some() {
            self.compare(at, column, Checksum::of(buffer.as_ref()))?;
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

    /// Is this the checksum that the manifest, where there is one, has of the chunk?
    pub(super) fn compare(&self, at: BlockAt, column: &str, computed: Checksum) -> Result<(), ShardsError> {
        let Some(manifest) = &self.manifest else { return Ok(()) };
        let listed = manifest.files[at.file].row_groups.get(at.row_group).and_then(|group| group.xxh3.get(column));
        if listed == Some(&computed) {
            return Ok(());
        }
        let listed = listed.map_or_else(|| "none".to_owned(), Checksum::to_string);
        let reason = format!("its bytes have xxh3 {computed}, the manifest says {listed}: the file is damaged");
        Err(ShardsError::Corrupt { spot: self.chunk_spot(at, column), reason })
    }

    fn chunk_spot(&self, at: BlockAt, column: &str) -> Box<Spot> {
        let (file, row_group) = (self.files[at.file].name.clone(), u32::try_from(at.row_group).ok());
        Box::new(Spot { file, row_group, column: Some(column.to_owned()), row: None })
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
        content: Option<&mut Xxh3>,
    ) -> Result<(), ShardsError> {
        let at = self.blocks[block as usize];
        let bytes = self.read_chunk(at, column.leaf, &column.name)?;
        note(content, &bytes.bytes);
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

    fn read_halves(
        &self,
        block: u32,
        column: &Column,
        into: &mut Vec<u8>,
        found: &mut Vec<(String, BadValue)>,
        mut content: Option<&mut Xxh3>,
    ) -> Result<(), ShardsError> {
        if self.read_direct(block, column, into, content.as_deref_mut())? {
            return Ok(());
        }
        let at = self.blocks[block as usize];
        let bytes = self.read_chunk(at, column.leaf, &column.name)?;
        note(content, &bytes.bytes);
        let undecodable = |error| self.undecodable(block, &column.name, &error);
        into.clear();
        // Bounded by the chunk: a footer that lies about its rows reserves no memory that the file does not have.
        let expanded = self.block_rows[block as usize] as usize * self.width * ELEMENT_BYTES;
        into.reserve(expanded.min(bytes.bytes.len() * if column.number == Number::Float16 { 1 } else { 4 }));
        let chunk = self.chunk(at, column, bytes.clone(), self.width);
        let taken = chunk.decode(&mut Sink::Halves(into)).map_err(undecodable)?;
        if taken && checks::all_finite_bytes(into) {
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

    /// Reads the coordinates of a block and no embedding; zero where they are none.
    pub(super) fn read_coordinates(
        &self,
        block: u32,
        latitudes: &mut Vec<f64>,
        longitudes: &mut Vec<f64>,
    ) -> Result<(), ShardsError> {
        let footer = &self.files[self.blocks[block as usize].file];
        let mut found = Vec::new();
        self.read_doubles(block, &footer.latitude, (90.0, "latitude"), latitudes, &mut found, None)?;
        self.read_doubles(block, &footer.longitude, (180.0, "longitude"), longitudes, &mut found, None)?;
        self.refuse(block, found, &[])
    }

    /// The first of the rows that cannot be used is an error, unless it is one of `skip` (ascending).
    fn refuse(&self, block: u32, found: Vec<(String, BadValue)>, skip: &[u32]) -> Result<(), ShardsError> {
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

    /// Name of the column of identifiers, where the block's file has one.
    pub(super) fn id_name(&self, block: u32) -> Option<String> {
        let footer = &self.files[self.blocks[block as usize].file];
        footer.id.map(|(root, _)| footer.metadata.schema().field(root).name().clone())
    }

    /// Reads a block; rows that cannot be used are zeros, and named in `found` with their column.
    pub(super) fn read_block(
        &self,
        block: u32,
        view: u32,
        into: &mut BlockRows,
        found: &mut Vec<(String, BadValue)>,
        mut content: Option<&mut Xxh3>,
    ) -> Result<(), ShardsError> {
        let footer = &self.files[self.blocks[block as usize].file];
        let (latitude, longitude) = ((90.0, "latitude"), (180.0, "longitude"));
        self.read_doubles(block, &footer.latitude, latitude, &mut into.latitudes, found, content.as_deref_mut())?;
        self.read_doubles(block, &footer.longitude, longitude, &mut into.longitudes, found, content.as_deref_mut())?;
        self.read_halves(block, &footer.views[view as usize], &mut into.embeddings, found, content)
    }
}

impl Blocks for Dataset {
    fn block_rows(&self) -> &[u32] {
        &self.block_rows
    }

    fn width(&self) -> usize {
        self.width
    }

    fn views(&self) -> u32 {
        self.views
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn read(&self, block: u32, view: u32, into: &mut BlockRows) -> Result<(), ShardsError> {
        self.read_except(block, view, &[], into)
    }

    fn read_except(&self, block: u32, view: u32, skip: &[u32], into: &mut BlockRows) -> Result<(), ShardsError> {
        let mut found = Vec::new();
        self.read_block(block, view, into, &mut found, None)?;
        self.refuse(block, found, skip)
    }

    fn bad_rows(&self, block: u32) -> Result<Vec<u32>, ShardsError> {
        let (mut rows, mut found) = (BlockRows::default(), Vec::new());
        for view in 0..self.views {
            self.read_block(block, view, &mut rows, &mut found, None)?;
        }
        let bad: std::collections::BTreeSet<u32> =
            found.iter().filter_map(|(_, value)| u32::try_from(value.row).ok()).collect();
        Ok(bad.into_iter().collect())
    }
}

fn note(content: Option<&mut Xxh3>, bytes: &[u8]) {
    if let Some(content) = content {
        content.update(&Checksum::of(bytes).0.to_le_bytes());
    }
}

fn add_usable(moments: &mut Moments, rows: &BlockRows, width: usize, found: &[(String, BadValue)]) {
    let bad: std::collections::BTreeSet<usize> = found.iter().map(|(_, value)| value.row).collect();
    let embeddings = rows.embeddings.chunks_exact((width * ELEMENT_BYTES).max(1));
    embeddings.enumerate().filter(|(row, _)| !bad.contains(row)).for_each(|(_, bytes)| moments.add_bytes(bytes));
}
