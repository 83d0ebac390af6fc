//! One Parquet file of a folder of shards, row group by row group.
//!
//! Invariant: a checksum is of the bytes on their way to the disk, never of bytes that were read back. Each row group passes
//! through memory whole, which is what a row group is sized for.

use std::fs::File;
use std::hash::Hasher as _;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, FixedSizeListArray, Float16Array, Float64Array, RecordBatch, StringArray};
use arrow_schema::{DataType, Field, Schema};
use half::f16;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, Encoding};
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;
use twox_hash::XxHash3_64;

use super::checksum::Checksum;
use super::error::ShardsError;
use super::manifest::{ManifestFile, ManifestRowGroup};
use super::writer::{WriterRows, view_column};

/// Larger than any row group: a column chunk is one page.
const PAGE_BYTES: usize = 1 << 30;

/// Rows that wait for their row group to be full.
#[derive(Debug)]
pub(super) struct Group {
    ids: Vec<String>,
    latitudes: Vec<f64>,
    longitudes: Vec<f64>,
    views: Vec<Vec<f16>>,
}

impl Group {
    pub(super) fn new(views: usize) -> Self {
        Self { ids: Vec::new(), latitudes: Vec::new(), longitudes: Vec::new(), views: vec![Vec::new(); views] }
    }

    pub(super) fn rows(&self) -> usize {
        self.ids.len()
    }

    pub(super) fn extend(&mut self, rows: &WriterRows<'_>, range: Range<usize>, width: usize) {
        self.ids.extend_from_slice(&rows.ids[range.clone()]);
        self.latitudes.extend_from_slice(&rows.latitudes[range.clone()]);
        self.longitudes.extend_from_slice(&rows.longitudes[range.clone()]);
        for (to, from) in self.views.iter_mut().zip(rows.views) {
            to.extend_from_slice(&from[range.start * width..range.end * width]);
        }
    }

    /// The rows as Arrow has them; the group is empty afterwards.
    fn take(&mut self, schema: &Arc<Schema>, width: i32) -> Result<RecordBatch, ParquetError> {
        let mut columns: Vec<ArrayRef> = vec![
            Arc::new(StringArray::from_iter_values(self.ids.drain(..))),
            Arc::new(Float64Array::from(std::mem::take(&mut self.latitudes))),
            Arc::new(Float64Array::from(std::mem::take(&mut self.longitudes))),
        ];
        for view in &mut self.views {
            let values = Arc::new(Float16Array::from(std::mem::take(view)));
            columns.push(Arc::new(FixedSizeListArray::try_new(item(), width, values, None)?));
        }
        Ok(RecordBatch::try_new(Arc::clone(schema), columns)?)
    }
}

fn item() -> Arc<Field> {
    Arc::new(Field::new("element", DataType::Float16, false))
}

/// A file on its way.
pub(super) struct FileWriter {
    path: PathBuf,
    name: String,
    width: i32,
    schema: Arc<Schema>,
    writer: ArrowWriter<Vec<u8>>,
    file: File,
    hasher: XxHash3_64,
    bytes: u64,
    rows: u64,
    row_groups: Vec<ManifestRowGroup>,
}

impl FileWriter {
    pub(super) fn create(folder: &Path, name: String, width: u32, views: u32) -> Result<Self, ShardsError> {
        let path = folder.join(&name);
        let width = i32::try_from(width)
            .map_err(|_| ShardsError::Argument(format!("embeddings of width {width} cannot be written")))?;
        let file = File::create_new(&path).map_err(|error| ShardsError::io(&path, error))?;
        let mut fields = vec![
            Field::new("id", DataType::Utf8, false),
            Field::new("lat", DataType::Float64, false),
            Field::new("lon", DataType::Float64, false),
        ];
        let list = DataType::FixedSizeList(item(), width);
        fields.extend((0..views).map(|view| Field::new(view_column("embedding", view as usize), list.clone(), false)));
        let schema = Arc::new(Schema::new(fields));
        let writer = ArrowWriter::try_new(Vec::new(), Arc::clone(&schema), Some(properties()))
            .map_err(|error| refused(&path, error))?;
        let (hasher, row_groups) = (XxHash3_64::new(), Vec::new());
        Ok(Self { path, name, width, schema, writer, file, hasher, bytes: 0, rows: 0, row_groups })
    }

    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    pub(super) fn row_groups(&self) -> usize {
        self.row_groups.len()
    }

    /// Writes the waiting rows as one row group.
    pub(super) fn write(&mut self, group: &mut Group) -> Result<(), ShardsError> {
        let rows = group.rows();
        let batch = group.take(&self.schema, self.width).map_err(|error| refused(&self.path, error))?;
        let flushed = self.writer.write(&batch).and_then(|()| self.writer.flush());
        flushed.map_err(|error| refused(&self.path, error))?;
        self.writer.sync().map_err(|error| ShardsError::io(&self.path, error))?;
        let bytes = std::mem::take(self.writer.inner_mut());
        let written = self.writer.flushed_row_groups().last();
        let columns = written.map(|row_group| row_group.columns()).unwrap_or_default();
        let mut xxh3 = std::collections::BTreeMap::new();
        for column in columns {
            let (start, length) = column.byte_range();
            let start = (start - self.bytes) as usize;
            let name = column.column_path().parts().first().cloned().unwrap_or_default();
            xxh3.insert(name, Checksum::of(&bytes[start..start + length as usize]));
        }
        self.row_groups.push(ManifestRowGroup { rows: rows as u32, xxh3 });
        self.rows += rows as u64;
        self.put(&bytes)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), ShardsError> {
        self.hasher.write(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|error| ShardsError::io(&self.path, error))
    }

    /// Writes the footer and makes the file last.
    pub(super) fn finish(mut self) -> Result<ManifestFile, ShardsError> {
        self.writer.finish().map_err(|error| refused(&self.path, error))?;
        let footer = std::mem::take(self.writer.inner_mut());
        let footer_xxh3 = Checksum::of(&footer);
        self.put(&footer)?;
        self.file.sync_all().map_err(|error| ShardsError::io(&self.path, error))?;
        let xxh3 = Checksum::from(&self.hasher);
        let (name, bytes, rows) = (self.name, self.bytes, self.rows);
        Ok(ManifestFile { name, bytes, rows, xxh3, footer_xxh3, row_groups: self.row_groups })
    }
}

/// Uncompressed, plain, without dictionaries; minima and maxima for coordinates only, where other programs filter by them.
fn properties() -> WriterProperties {
    let mut properties = WriterProperties::builder()
        .set_created_by(format!("locdiff {}", env!("CARGO_PKG_VERSION")))
        .set_compression(Compression::UNCOMPRESSED)
        .set_encoding(Encoding::PLAIN)
        .set_dictionary_enabled(false)
        .set_statistics_enabled(EnabledStatistics::None)
        .set_offset_index_disabled(true)
        .set_data_page_size_limit(PAGE_BYTES)
        .set_data_page_row_count_limit(usize::MAX)
        .set_max_row_group_row_count(None);
    for column in ["lat", "lon"] {
        properties = properties.set_column_statistics_enabled(ColumnPath::from(column), EnabledStatistics::Chunk);
    }
    properties.build()
}

/// What the `parquet` crate would not write.
fn refused(path: &Path, error: ParquetError) -> ShardsError {
    ShardsError::io(path, io::Error::other(error))
}
