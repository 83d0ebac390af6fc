//! An open data set. Its Parquet files, from this program or from any other, are presented as numbered blocks, one per
//! row group.
//!
//! Invariant: [`Blocks::read`], [`Blocks::read_except`] and [`Blocks::read_placed`] check all rows that they return,
//! except those that the caller skips. No value is null, lists have the right width, numbers are finite and coordinates
//! are valid. The checksum of every column chunk is compared if the manifest or the run has recorded it.

use std::collections::BTreeMap;
use std::sync::Arc;

use locdiff_core::config::{OnBadRows, ShardsConfig};
use parquet::basic::Compression;

use super::block::{BlockRows, Blocks};
use super::contents::Contents;
use crate::native::row_pool::RowPlaces;
use crate::shards::error::{ShardsError, Spot};
use crate::shards::format::{Coordinates, Footer, Manifest};
use crate::shards::source::{BufferPool, ByteSource, DatasetIndex, Origin, S3Options};

/// Maximum width of an embedding. The limit protects against a damaged footer that would cause a huge allocation.
const WIDTH_MAX: usize = 1 << 20;

/// One compressed byte is assumed to expand to at most this many bytes. 1032 is the limit of deflate, which only
/// constant data reaches.
const REPETITION_MAX: i64 = 1032;

/// A row group may claim up to this many rows, whatever its size in bytes. The destinations (`RowPlaces`) of that
/// many rows take 8 MiB. The number is also pyarrow's default row group size.
const ROWS_ANYHOW: i64 = 1 << 20;

/// A row group that is not empty.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockAt {
    /// Number of the block.
    pub(super) number: usize,
    pub(super) file: usize,
    pub(super) row_group: usize,
}

/// An open data set.
pub struct Dataset {
    pub(crate) source: Arc<dyn ByteSource>,
    pub(crate) manifest: Option<Manifest>,
    origin: Option<Origin>,
    pub(crate) files: Vec<Footer>,
    pub(super) blocks: Vec<BlockAt>,
    pub(super) block_rows: Vec<u32>,
    pub(super) width: usize,
    /// Number of views per row in the files.
    pub(super) stored_views: u32,
    /// Number of stored views that are averaged.
    pub(super) mean_views: u32,
    fingerprint: u64,
    /// Whether coordinates may be null.
    pub(super) may_lack_coordinates: bool,
    /// Checksums that the run has recorded. `None` if it has recorded none yet, or if the data has a manifest.
    pub(super) contents: Option<Contents>,
    pub(super) pool: Arc<BufferPool>,
}

impl Dataset {
    /// Opens a folder (with or without a manifest), a file, a glob or a URL. Reads the footers and, for data without a
    /// manifest, the first bytes of each file. For such data, also reads some embeddings if the footers do not give the
    /// width, or if bad rows are skipped.
    pub fn open(location: &str, config: &ShardsConfig) -> Result<Self, ShardsError> {
        Self::open_with(Coordinates::Needed, location, config)
    }

    /// Like [`Dataset::open`], but rows need coordinates only if `coordinates` says so.
    pub fn open_with(coordinates: Coordinates, location: &str, config: &ShardsConfig) -> Result<Self, ShardsError> {
        let (index, source) = DatasetIndex::open(location, config)?;
        Self::assemble(&index, source, config, coordinates)
    }

    /// Opens a data set from an index that another process has made. Neither lists files nor reads footers.
    pub fn from_index(index: &DatasetIndex, config: &ShardsConfig) -> Result<Self, ShardsError> {
        Self::assemble(index, index.source(config)?, config, Coordinates::Needed)
    }

    /// Like [`Dataset::from_index`], but takes the S3 options from `options` instead of the environment.
    pub fn from_index_s3(
        index: &DatasetIndex,
        options: &S3Options,
        config: &ShardsConfig,
    ) -> Result<Self, ShardsError> {
        Self::assemble(index, index.source_s3(options)?, config, Coordinates::Needed)
    }

    /// Builds the data set from its index.
    fn assemble(
        index: &DatasetIndex,
        source: Arc<dyn ByteSource>,
        config: &ShardsConfig,
        coordinates: Coordinates,
    ) -> Result<Self, ShardsError> {
        let manifest = index.manifest()?;
        let without = manifest.as_ref().and_then(|manifest| manifest.rows_with_coordinates);
        let coordinates = match (coordinates, without) {
            (Coordinates::Needed, Some(some)) if some == 0 || config.on_bad_rows == OnBadRows::Error => {
                return Err(without_coordinates(index.location(), some));
            }
            (Coordinates::Stored, Some(0)) => Coordinates::Ignored,
            (wanted, _) => wanted,
        };
        // Shards with a manifest always have the default column names. The configured names apply only to data without
        // a manifest.
        let own = ShardsConfig::default();
        let names = if manifest.is_some() { &own } else { config };
        let files = index.files().map(|(name, bytes, raw)| Footer::parse(name, bytes, raw, names, coordinates));
        let files = files.collect::<Result<Vec<Footer>, ShardsError>>()?;
        let fingerprint = index.table.fingerprint;
        let origin = manifest.as_ref().map_or_else(|| index.table.origin.clone(), |manifest| Some(manifest.into()));
        let mut dataset = Self {
            source,
            files,
            blocks: Vec::new(),
            block_rows: Vec::new(),
            width: manifest.as_ref().map_or(0, |manifest| manifest.width as usize),
            stored_views: manifest.as_ref().map_or(0, |manifest| manifest.views),
            mean_views: config.mean_views,
            manifest,
            origin,
            fingerprint,
            may_lack_coordinates: coordinates == Coordinates::Stored && without.is_some(),
            contents: None,
            pool: Arc::default(),
        };
        dataset.number_blocks(index.location())?;
        dataset.check_files(config.on_bad_rows)?;
        Ok(dataset)
    }

    /// The manifest, if there is one.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.manifest.as_ref()
    }

    /// Where the rows came from, according to the manifest; `None` if not known. If local files were opened without a
    /// manifest, for example with a glob, the manifest in the folder of each file is used if it lists the file.
    pub fn origin(&self) -> Option<&Origin> {
        self.origin.as_ref()
    }

    /// Number of rows in all blocks.
    pub fn rows(&self) -> u64 {
        self.block_rows.iter().map(|&rows| u64::from(rows)).sum()
    }

    /// Number of rows that have coordinates, according to the manifest; all rows without a manifest.
    pub fn rows_with_coordinates(&self) -> u64 {
        let stated = self.manifest.as_ref().and_then(|manifest| manifest.rows_with_coordinates);
        stated.unwrap_or_else(|| self.rows())
    }

    /// Number of views per row in the files. [`Blocks::views`] is smaller if views are averaged.
    pub fn stored_views(&self) -> u32 {
        self.stored_views
    }

    /// Number of files.
    pub fn file_count(&self) -> usize {
        self.files.len()
    }

    /// Location of a block, column or row, for error messages.
    pub fn spot(&self, block: u32, column: Option<&str>, row: Option<usize>) -> Spot {
        let at = self.blocks[block as usize];
        Spot {
            file: self.files[at.file].name.clone(),
            row_group: u32::try_from(at.row_group).ok(),
            column: column.map(str::to_owned),
            row: row.map(|row| row as u64),
        }
    }

    /// Numbers the row groups that are not empty, in file order.
    fn number_blocks(&mut self, location: &str) -> Result<(), ShardsError> {
        for (file, footer) in self.files.iter().enumerate() {
            let row_groups = footer.metadata.metadata().row_groups();
            for (row_group, found) in row_groups.iter().enumerate() {
                let rows = u32::try_from(found.num_rows()).map_err(|_| {
                    let reason = format!(
                        "the footer says that row group {row_group} has {} rows, wanted 0 to 2^32 - 1",
                        found.num_rows()
                    );
                    ShardsError::corrupt(Spot::file(&footer.name), reason)
                })?;
                if rows > 0 {
                    self.blocks.push(BlockAt { number: self.blocks.len(), file, row_group });
                    self.block_rows.push(rows);
                }
            }
        }
        if self.blocks.is_empty() {
            let reason = format!("its {} files have no rows", self.files.len());
            return Err(ShardsError::Missing { location: location.to_owned(), reason });
        }
        Ok(())
    }

    /// Checks that all files have the same width and number of views, and match the manifest.
    fn check_files(&mut self, on_bad_rows: OnBadRows) -> Result<(), ShardsError> {
        let first = &self.files[0];
        if self.stored_views == 0 {
            self.stored_views = first.views.len() as u32;
        }
        for footer in &self.files {
            if footer.views.len() != self.stored_views as usize {
                let (got, want) = (footer.views.len(), self.stored_views);
                let other = if self.manifest.is_some() { "the manifest" } else { &first.name };
                let reason = format!("the file has {got} views, wanted {want} as in {other}");
                return Err(ShardsError::bad(Spot::file(&footer.name), reason));
            }
        }
        for block in 0..self.blocks.len() {
            self.check_bytes(block)?;
        }
        if self.width == 0 {
            self.width = self.find_width(on_bad_rows)?;
        }
        if self.width > WIDTH_MAX {
            let reason = format!("has embeddings of width {}, wanted at most {WIDTH_MAX}", self.width);
            return Err(ShardsError::bad(self.first_view(), reason));
        }
        // If the data has no manifest and bad rows are skipped, a row with an embedding of the wrong width is skipped
        // like any other bad row. Otherwise, an embedding of the wrong width is an error.
        let is_strict = self.manifest.is_some() || on_bad_rows == OnBadRows::Error;
        (0..self.blocks.len()).filter(|_| is_strict).try_for_each(|block| self.check_width(block))
    }

    /// Finds the width of the embeddings. If bad rows are an error, the width is the number of values per row that the
    /// footer gives for the first block. If bad rows are skipped, or that number is not an integer above 1, the width
    /// is the most common list length in the largest row group that has a non-empty list.
    fn find_width(&self, on_bad_rows: OnBadRows) -> Result<usize, ShardsError> {
        let rows = i64::from(self.block_rows[0]);
        let first = self.blocks[0];
        let values = self.chunk_metadata(first, &self.files[first.file].views[0]).num_values();
        if on_bad_rows == OnBadRows::Error && values % rows == 0 && values > rows {
            return Ok((values / rows) as usize);
        }
        let mut blocks = self.blocks.clone();
        blocks.sort_by_key(|at| std::cmp::Reverse(self.block_rows[at.number]));
        for at in blocks {
            let column = &self.files[at.file].views[0];
            let found = self.careful(at, column, self.read_chunk(at, column, None)?).commonest_width();
            if let Some(width) = found.map_err(|error| self.undecodable(at, column, &error))? {
                return Ok(width);
            }
        }
        Err(ShardsError::bad(self.first_view(), "all embeddings are empty, wanted lists of numbers"))
    }

    fn first_view(&self) -> Spot {
        Spot::file(&self.files[0].name).column(&self.files[0].views[0].name)
    }

    /// Checks that the file is large enough for the row group that its footer describes. So no memory is allocated for
    /// data that the file cannot hold.
    fn check_bytes(&self, block: usize) -> Result<(), ShardsError> {
        let (at, rows) = (self.blocks[block], self.block_rows[block]);
        let footer = &self.files[at.file];
        let corrupt = |column: Option<&str>, reason: String| {
            Err(ShardsError::corrupt(self.spot(block as u32, column, None), reason))
        };
        if let Some(manifest) = &self.manifest {
            let listed = manifest.files[at.file].row_groups.get(at.row_group).map(|row_group| row_group.rows);
            if listed != Some(rows) {
                return corrupt(
                    None,
                    format!("the row group has {rows} rows, but the manifest says {}", listed.unwrap_or(0)),
                );
            }
        }
        for column in footer.columns().chain(&footer.id) {
            let chunk = self.chunk_metadata(at, column);
            // Do not call `byte_range` here, because it panics if a number is negative.
            let start = chunk.dictionary_page_offset().unwrap_or_else(|| chunk.data_page_offset());
            let length = chunk.compressed_size();
            let end = u64::try_from(start)
                .ok()
                .zip(u64::try_from(length).ok())
                .and_then(|(start, length)| start.checked_add(length));
            if end.is_none_or(|end| end > footer.bytes) {
                let reason = format!(
                    "the footer says that the chunk has {length} bytes from byte {start} on, but the file has {} bytes",
                    footer.bytes
                );
                return corrupt(Some(&column.name), reason);
            }
        }
        for column in &footer.views {
            let chunk = self.chunk_metadata(at, column);
            let (values, bytes) = (chunk.num_values(), chunk.compressed_size());
            let held = rows_held(chunk.compression(), bytes);
            if i64::from(rows) > values || i64::from(rows) > held {
                let reason = format!(
                    "the footer says {rows} rows, but {values} values in {bytes} bytes hold at most {} rows",
                    values.min(held)
                );
                return corrupt(Some(&column.name), reason);
            }
        }
        Ok(())
    }

    /// Checks the width of the embeddings in a row group. The width is computed from the number of values,
    /// which the footer gives, so a wrong width is found before data is read.
    fn check_width(&self, block: usize) -> Result<(), ShardsError> {
        let (at, rows) = (self.blocks[block], i64::from(self.block_rows[block]));
        for column in &self.files[at.file].views {
            let values = self.chunk_metadata(at, column).num_values();
            if values % rows == 0 && values > rows && values / rows != self.width as i64 {
                let reason = format!("has embeddings of width {}, wanted {}", values / rows, self.width);
                return Err(ShardsError::bad(self.chunk_spot(at, &column.name), reason));
            }
        }
        Ok(())
    }

    /// Names of the columns in the first file. Each key says what its column holds: `latitude`, `longitude`,
    /// `embedding` or `id`.
    pub fn column_names(&self) -> BTreeMap<String, String> {
        let Footer { id, coordinates, views, .. } = &self.files[0];
        let coordinate = |index: usize| coordinates.as_ref().map(|columns| &columns[index]);
        let columns = [("latitude", coordinate(0)), ("longitude", coordinate(1)), ("embedding", views.first())];
        let columns = columns.into_iter().chain([("id", id.as_ref())]);
        columns.filter_map(|(what, column)| Some((what.to_owned(), column?.name.clone()))).collect()
    }

    /// Name of the identifier column, if the block's file has one.
    pub fn id_name(&self, block: u32) -> Option<String> {
        self.files[self.blocks[block as usize].file].id.as_ref().map(|column| column.name.clone())
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
        (self.stored_views / self.mean_views).max(1)
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn read_except(&self, block: u32, view: u32, skip: &[u32], into: &mut BlockRows) -> Result<(), ShardsError> {
        let mut found = Vec::new();
        self.read_mean(block, self.averaged(view), into, &mut found)?;
        self.check_bad_rows(block, found, skip)
    }

    fn read_placed(
        &self,
        (block, view): (u32, u32),
        skip: &[u32],
        into: &mut BlockRows,
        places: &mut RowPlaces,
    ) -> Result<(), ShardsError> {
        let (mut found, views) = (Vec::new(), self.averaged(view));
        if views.len() == 1 {
            self.place_block((block, views.start), into, places, &mut found)?;
        } else {
            self.read_mean(block, views, into, &mut found)?;
            places.write(&into.embeddings);
        }
        self.check_bad_rows(block, found, skip)
    }

    fn read_coordinates(&self, block: u32, skip: &[u32], into: &mut BlockRows) -> Result<(), ShardsError> {
        let mut found = Vec::new();
        self.read_degrees(block, into, &mut found, None)?;
        self.check_bad_rows(block, found, skip)
    }

    fn bad_rows(&self, block: u32) -> Result<Vec<u32>, ShardsError> {
        let (mut rows, mut found) = (BlockRows::default(), Vec::new());
        for view in 0..self.stored_views {
            self.read_block(block, view, &mut rows, &mut found, None)?;
        }
        let bad: std::collections::BTreeSet<u32> =
            found.iter().filter_map(|value| u32::try_from(value.row).ok()).collect();
        Ok(bad.into_iter().collect())
    }
}

/// The error for shards whose rows need coordinates, but only `some` of them have any.
fn without_coordinates(location: &str, some: u64) -> ShardsError {
    let reason = match some {
        0 => "the shards have no coordinates, so only `predict` can use them; training and evaluation need the places \
              of the photos"
            .to_owned(),
        _ => format!(
            "only {some} rows have coordinates; set shards.on_bad_rows = \"skip\" to train or evaluate with these rows \
             (`predict` uses all rows)"
        ),
    };
    ShardsError::bad(Spot::file(location), reason)
}

/// The largest number of rows that is accepted for a column chunk of `bytes` bytes. The limit assumes that a row takes
/// at least one bit, and that a codec expands a byte to at most [`REPETITION_MAX`] bytes. Identical rows can be even
/// smaller, so [`ROWS_ANYHOW`] rows are always accepted; the memory for so many rows is negligible.
fn rows_held(compression: Compression, bytes: i64) -> i64 {
    let per_byte = if compression == Compression::UNCOMPRESSED { 8 } else { 8 * REPETITION_MAX };
    bytes.saturating_mul(per_byte).max(ROWS_ANYHOW)
}
