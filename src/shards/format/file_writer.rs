//! Writes one Parquet file of a folder of shards, row group by row group.
//!
//! Invariant: checksums are computed from the bytes in memory that are written, never from bytes that are read back
//! from the file. To make this possible, each row group is encoded completely in memory.
//!
//! The `parquet` crate handles every float16 as a separate object, which takes 60 ns per number. So the crate encodes
//! the embeddings of the first row group only. Later row groups with the same number of rows reuse the page headers and
//! levels of that row group as a [`Template`] and only replace the values. The bytes are the same as those that the
//! crate would write (test `templates_change_no_byte`).

use std::fs::File;
use std::hash::Hasher as _;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, FixedSizeListArray, Float16Array, Float64Array, StringArray};
use arrow_schema::{DataType, Field, Schema};
use bytes::Bytes;
use half::f16;
use locdiff_core::tables::PlacesPresent;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_writer::{ArrowRowGroupWriterFactory, compute_leaves};
use parquet::basic::{Compression, Encoding};
use parquet::column::writer::ColumnCloseResult;
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::ColumnPath;
use twox_hash::XxHash3_64;

use super::checksum::Checksum;
use super::columns::{ELEMENT_BYTES, view_column};
use super::manifest::{ManifestFile, ManifestRowGroup};
use crate::shards::error::ShardsError;

/// Page size limit. A column chunk is much smaller (1.5 MiB for 1024 rows of width 768), so it is always one page.
const PAGE_BYTES: usize = 1 << 30;

/// Rows to write. All columns have the same number of rows.
#[derive(Debug, Clone, Default)]
pub struct WriterRows {
    /// Identifiers.
    pub ids: Vec<String>,
    /// Latitudes, degrees, -90 to 90. With [`PlacesPresent::Some`], NaN if the row has no coordinates; with
    /// [`PlacesPresent::None`], empty.
    pub latitudes: Vec<f64>,
    /// Longitudes, degrees, -180 to 180; NaN or empty like the latitudes.
    pub longitudes: Vec<f64>,
    /// For each view, the embeddings of all rows, one after the other.
    pub views: Vec<Vec<f16>>,
}

impl WriterRows {
    /// Starts with no rows, for the given number of views.
    pub fn new(views: usize) -> Self {
        Self { views: vec![Vec::new(); views], ..Self::default() }
    }

    pub(super) fn rows(&self) -> usize {
        self.ids.len()
    }

    pub(super) fn extend(&mut self, rows: &Self, range: Range<usize>, width: usize) {
        self.ids.extend_from_slice(&rows.ids[range.clone()]);
        if !rows.latitudes.is_empty() {
            self.latitudes.extend_from_slice(&rows.latitudes[range.clone()]);
            self.longitudes.extend_from_slice(&rows.longitudes[range.clone()]);
        }
        for (to, from) in self.views.iter_mut().zip(&rows.views) {
            to.extend_from_slice(&from[range.start * width..range.end * width]);
        }
    }

    /// Moves identifiers and coordinates out of the group as Arrow arrays.
    fn take_front(&mut self, places: PlacesPresent) -> Vec<ArrayRef> {
        let mut front: Vec<ArrayRef> = vec![Arc::new(StringArray::from_iter_values(self.ids.drain(..)))];
        let degrees = |values: &mut Vec<f64>| -> ArrayRef {
            let values = std::mem::take(values);
            match places {
                PlacesPresent::Some => Arc::new(
                    values.into_iter().map(|degrees| (!degrees.is_nan()).then_some(degrees)).collect::<Float64Array>(),
                ),
                _ => Arc::new(Float64Array::from(values)),
            }
        };
        if places != PlacesPresent::None {
            front.extend([degrees(&mut self.latitudes), degrees(&mut self.longitudes)]);
        }
        front
    }

    /// Moves a view out of the group as an Arrow array.
    fn take_view(&mut self, view: usize, width: i32) -> Result<ArrayRef, ParquetError> {
        let values = Arc::new(Float16Array::from(std::mem::take(&mut self.views[view])));
        Ok(Arc::new(FixedSizeListArray::try_new(item(), width, values, None)?))
    }
}

/// The page headers, levels and metadata of the embedding chunks of a row group: all bytes except the values. They are
/// the same for every row group with the same number of rows.
#[derive(Debug, Clone)]
pub(super) struct Template {
    rows: usize,
    views: Vec<ChunkTemplate>,
}

#[derive(Debug, Clone)]
struct ChunkTemplate {
    /// Metadata of the chunk, from the `parquet` crate.
    close: ColumnCloseResult,
    /// The bytes before the values: page header and levels.
    front: Vec<u8>,
}

impl ChunkTemplate {
    /// Builds a chunk with the given values and leaves `values` empty.
    fn fill(&self, values: &mut Vec<f16>) -> Bytes {
        let mut bytes = Vec::with_capacity(self.front.len() + values.len() * ELEMENT_BYTES);
        bytes.extend_from_slice(&self.front);
        bytes.extend(values.drain(..).flat_map(f16::to_le_bytes));
        bytes.into()
    }
}

fn item() -> Arc<Field> {
    Arc::new(Field::new("element", DataType::Float16, false))
}

/// The columns of coordinates.
const COORDINATES: [&str; 2] = ["lat", "lon"];

/// A Parquet file that is being written.
pub(super) struct ShardFileWriter {
    path: PathBuf,
    name: String,
    width: i32,
    places: PlacesPresent,
    /// Number of columns before the views: `id`, and `lat` and `lon` unless no row has coordinates.
    front_columns: usize,
    schema: Arc<Schema>,
    writer: SerializedFileWriter<Vec<u8>>,
    factory: ArrowRowGroupWriterFactory,
    file: File,
    hasher: XxHash3_64,
    bytes: u64,
    pub(super) rows: u64,
    pub(super) row_groups: Vec<ManifestRowGroup>,
}

impl ShardFileWriter {
    pub(super) fn create(
        folder: &Path,
        name: String,
        (width, views): (u32, u32),
        places: PlacesPresent,
    ) -> Result<Self, ShardsError> {
        let path = folder.join(&name);
        let width = i32::try_from(width)
            .map_err(|_| ShardsError::Argument(format!("embeddings have width {width}, wanted a width below 2^31")))?;
        let file = File::create_new(&path).map_err(|error| ShardsError::io(&path, error))?;
        let mut fields = vec![Field::new("id", DataType::Utf8, false)];
        if places != PlacesPresent::None {
            fields.extend(COORDINATES.map(|name| Field::new(name, DataType::Float64, places == PlacesPresent::Some)));
        }
        let front_columns = fields.len();
        let list = DataType::FixedSizeList(item(), width);
        fields.extend((0..views).map(|view| Field::new(view_column("embedding", view as usize), list.clone(), false)));
        let schema = Arc::new(Schema::new(fields));
        let (writer, factory) = ArrowWriter::try_new(Vec::new(), Arc::clone(&schema), Some(properties()))
            .and_then(ArrowWriter::into_serialized_writer)
            .map_err(|error| write_error(&path, error))?;
        let (hasher, row_groups) = (XxHash3_64::new(), Vec::new());
        let (bytes, rows) = (0, 0);
        Ok(Self {
            path,
            name,
            width,
            places,
            front_columns,
            schema,
            writer,
            factory,
            file,
            hasher,
            bytes,
            rows,
            row_groups,
        })
    }

    /// Writes the rows as one row group. Uses `template` if it has the same number of rows. Otherwise replaces it
    /// with a template for this number of rows.
    pub(super) fn write(&mut self, group: &mut WriterRows, template: &mut Option<Template>) -> Result<(), ShardsError> {
        let rows = group.rows();
        let matching = template.take_if(|template| template.rows == rows);
        let closed = self.encode(group, matching.as_ref()).map_err(|error| write_error(&self.path, error))?;
        self.writer.flush().map_err(|error| ShardsError::io(&self.path, error))?;
        let bytes = std::mem::take(self.writer.inner_mut());
        *template = Some(match matching {
            Some(matching) => matching,
            None => Template { rows, views: self.templates(&bytes, rows, closed) },
        });
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

    /// Encodes all columns of a row group. With a template, the chunk of a view consists of the template's bytes and
    /// the values of the view, and an empty list is returned. Without a template, the `parquet` crate encodes the
    /// views, and their metadata is returned.
    fn encode(
        &mut self,
        group: &mut WriterRows,
        template: Option<&Template>,
    ) -> Result<Vec<ColumnCloseResult>, ParquetError> {
        let writers = self.factory.create_column_writers(self.row_groups.len())?;
        let mut row_group = self.writer.next_row_group()?;
        let (front, mut closed) = (group.take_front(self.places), Vec::new());
        for (column, (mut writer, field)) in writers.into_iter().zip(self.schema.fields()).enumerate() {
            let array = match (column.checked_sub(self.front_columns), template) {
                (None, _) => Arc::clone(&front[column]),
                (Some(view), None) => group.take_view(view, self.width)?,
                (Some(view), Some(template)) => {
                    let chunk = &template.views[view];
                    row_group.append_column(&chunk.fill(&mut group.views[view]), chunk.close.clone())?;
                    continue;
                }
            };
            for leaf in compute_leaves(field, &array)? {
                writer.write(&leaf)?;
            }
            let chunk = writer.close()?;
            closed.extend((column >= self.front_columns).then(|| chunk.close().clone()));
            chunk.append_to_row_group(&mut row_group)?;
        }
        row_group.close()?;
        Ok(closed)
    }

    /// Makes one template per view from the row group that was written last. `bytes` holds that row group.
    fn templates(&self, bytes: &[u8], rows: usize, closed: Vec<ColumnCloseResult>) -> Vec<ChunkTemplate> {
        let written = self.writer.flushed_row_groups().last();
        let columns = written.map(|row_group| &row_group.columns()[self.front_columns..]).unwrap_or_default();
        let front = |(close, column): (ColumnCloseResult, &ColumnChunkMetaData)| {
            let (start, length) = column.byte_range();
            let front_bytes = length as usize - rows * self.width as usize * ELEMENT_BYTES;
            ChunkTemplate { close, front: bytes[(start - self.bytes) as usize..][..front_bytes].to_vec() }
        };
        closed.into_iter().zip(columns).map(front).collect()
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), ShardsError> {
        self.hasher.write(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|error| ShardsError::io(&self.path, error))
    }

    /// Writes the footer and syncs the file to disk.
    pub(super) fn finish(mut self) -> Result<ManifestFile, ShardsError> {
        self.writer.finish().map_err(|error| write_error(&self.path, error))?;
        let footer = std::mem::take(self.writer.inner_mut());
        let footer_xxh3 = Checksum::of(&footer);
        self.put(&footer)?;
        self.file.sync_all().map_err(|error| ShardsError::io(&self.path, error))?;
        let xxh3 = Checksum(self.hasher.finish());
        let (name, bytes, rows) = (self.name, self.bytes, self.rows);
        Ok(ManifestFile { name, bytes, rows, xxh3, footer_xxh3, row_groups: self.row_groups })
    }
}

/// The settings of the `parquet` crate: uncompressed, PLAIN, without dictionaries. Only the coordinate columns get
/// minima and maxima, for programs that filter rows by place.
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
    for column in COORDINATES {
        properties = properties.set_column_statistics_enabled(ColumnPath::from(column), EnabledStatistics::Chunk);
    }
    properties.build()
}

/// Wraps an error of the `parquet` crate.
fn write_error(path: &Path, error: ParquetError) -> ShardsError {
    ShardsError::io(path, io::Error::other(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes `rows` rows with two views of three numbers each. The values depend on `first`, so that they differ
    /// between groups.
    fn group(first: usize, rows: usize) -> WriterRows {
        let value = |at: usize, view: usize| f16::from_f64((first * 100 + view * 1000 + at) as f64 / 8.0);
        WriterRows {
            ids: (0..rows).map(|row| format!("{}", first + row)).collect(),
            latitudes: (0..rows).map(|row| row as f64).collect(),
            longitudes: (0..rows).map(|row| -(row as f64)).collect(),
            views: (0..2).map(|view| (0..rows * 3).map(|at| value(at, view)).collect()).collect(),
        }
    }

    #[test]
    fn templates_change_no_byte() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let sizes = [(0, 5), (5, 5), (10, 2), (12, 2), (14, 5), (19, 5)];
        let write = |name: &str, forget: bool| {
            let mut file = ShardFileWriter::create(folder.path(), name.to_owned(), (3, 2), PlacesPresent::All)
                .expect("the file can be created");
            let mut template = None;
            for (first, rows) in sizes {
                file.write(&mut group(first, rows), &mut template).expect("the row group can be written");
                assert_eq!(template.as_ref().map(|template| template.rows), Some(rows));
                if forget {
                    template = None;
                }
            }
            let listed = file.finish().expect("the footer can be written");
            (
                std::fs::read(folder.path().join(name)).expect("the file was just written"),
                ManifestFile { name: String::new(), ..listed },
            )
        };
        assert_eq!(write("templates", false), write("crate", true));
    }
}
