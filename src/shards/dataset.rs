//! Ours or anybody's Parquet as numbered blocks: one per row group.
//!
//! Invariant: what [`Blocks::read`] and [`Blocks::read_placed`] hand out has been checked on this very read: the checksum of every column chunk where a
//! manifest knows it, no nulls, lists of the right width, finite numbers, coordinates on the Earth.

use std::sync::{Arc, OnceLock};

use locdiff_launch::config::ShardsConfig;
use twox_hash::XxHash3_64;

use super::careful::BadValue;
use super::checksum::Checksum;
use super::error::{ShardsError, Spot};
use super::footer::{ColumnNames, Footer, bad, corrupt};
use super::index::DatasetIndex;
use super::locate;
use super::manifest::Manifest;
use super::source::{BufferPool, ByteSource};
use super::statistics::{Moments, Statistics};
use super::{BlockRows, Blocks, ELEMENT_BYTES};
use crate::native::places::RowPlaces;

/// Numbers of an embedding, at most: a footer that says more would have memory allocated for what is not there.
const WIDTH_MAX: usize = 1 << 20;

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
    pub(super) block_rows: Vec<u32>,
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
        let mut content = XxHash3_64::new();
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
        if self.width > WIDTH_MAX {
            let (file, column) = (&self.files[0].name, &self.files[0].views[0].name);
            return Err(bad(
                file,
                Some(column),
                format!("has embeddings of width {}, at most {WIDTH_MAX}", self.width),
            ));
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
        let columns = footer.views.iter().chain([&footer.latitude, &footer.longitude]);
        let named = columns.map(|column| (column.name.as_str(), column.leaf));
        for (name, leaf) in named.chain(footer.id.map(|(_, leaf)| ("id", leaf))) {
            let chunk = footer.metadata.metadata().row_group(at.row_group).column(leaf);
            // Not `byte_range`, which panics where a number is negative.
            let start = chunk.dictionary_page_offset().unwrap_or_else(|| chunk.data_page_offset());
            let length = chunk.compressed_size();
            let end = u64::try_from(start)
                .ok()
                .zip(u64::try_from(length).ok())
                .and_then(|(start, length)| start.checked_add(length));
            if end.is_none_or(|end| end > footer.bytes) {
                let reason = format!("bytes {start} to {start}+{length} of a file of {}", footer.bytes);
                let spot = Box::new(self.spot(block as u32, Some(name), None));
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

    /// Name of the column of identifiers, where the block's file has one.
    pub(super) fn id_name(&self, block: u32) -> Option<String> {
        let footer = &self.files[self.blocks[block as usize].file];
        footer.id.map(|(root, _)| footer.metadata.schema().field(root).name().clone())
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

    fn read_placed(
        &self,
        block: u32,
        view: u32,
        skip: &[u32],
        into: &mut BlockRows,
        places: &mut RowPlaces,
    ) -> Result<(), ShardsError> {
        let mut found = Vec::new();
        self.place_block(block, view, into, places, &mut found)?;
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

fn add_usable(moments: &mut Moments, rows: &BlockRows, width: usize, found: &[(String, BadValue)]) {
    let bad: std::collections::BTreeSet<usize> = found.iter().map(|(_, value)| value.row).collect();
    let embeddings = rows.embeddings.chunks_exact((width * ELEMENT_BYTES).max(1));
    embeddings.enumerate().filter(|(row, _)| !bad.contains(row)).for_each(|(_, bytes)| moments.add_bytes(bytes));
}
