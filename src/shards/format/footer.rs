//! The footer of a Parquet file: which columns it has, where their chunks are.

use std::sync::Arc;

use arrow_schema::DataType;
use bytes::Bytes;
use locdiff_core::config::ShardsConfig;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use parquet::file::metadata::{FooterTail, ParquetMetaDataReader};

use super::decode::Number;
use super::error::{ShardsError, Spot};
use super::source::ByteSource;
use super::writer::view_column;

/// Bytes at the end of a file that are read at once: nearly every footer is in them.
const TAIL_BYTES: u64 = 64 << 10;

/// Length and magic number at the very end.
const END_BYTES: usize = 8;

/// How the columns are called.
#[derive(Debug, Clone)]
pub(super) struct ColumnNames {
    pub(super) id: String,
    pub(super) latitude: String,
    pub(super) longitude: String,
    pub(super) embedding: String,
}

impl ColumnNames {
    /// Those of the format.
    pub(super) fn own() -> Self {
        let name = str::to_owned;
        Self { id: name("id"), latitude: name("lat"), longitude: name("lon"), embedding: name("embedding") }
    }

    pub(super) fn of(config: &ShardsConfig) -> Self {
        Self {
            id: config.id_column.clone(),
            latitude: config.latitude_column.clone(),
            longitude: config.longitude_column.clone(),
            embedding: config.embedding_column.clone(),
        }
    }
}

/// A column that is read.
#[derive(Debug, Clone)]
pub(super) struct Column {
    pub(super) name: String,
    /// Its number among the columns of the top level.
    pub(super) root: usize,
    /// Its number among the leaves, which have the chunks.
    pub(super) leaf: usize,
    pub(super) number: Number,
}

/// What is known of a file.
#[derive(Debug, Clone)]
pub(super) struct Footer {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) metadata: ArrowReaderMetadata,
    pub(super) latitude: Column,
    pub(super) longitude: Column,
    pub(super) views: Vec<Column>,
    /// Number of the column of identifiers among those of the top level, and among the leaves.
    pub(super) id: Option<(usize, usize)>,
}

/// Reads the raw footer of a file.
pub(super) fn read_raw(source: &dyn ByteSource, file: usize) -> Result<(u64, Bytes), ShardsError> {
    let name = source.name(file);
    let bytes = source.len(file)?;
    let tail_bytes = bytes.min(TAIL_BYTES);
    let mut tail = vec![0; tail_bytes as usize];
    source.read_at(file, bytes - tail_bytes, &mut tail)?;
    let end = tail.last_chunk::<END_BYTES>().and_then(|end| FooterTail::try_new(end).ok());
    let Some(end) = end.filter(|_| bytes > END_BYTES as u64 + 4) else {
        return Err(no_footer(source, file, bytes));
    };
    if end.is_encrypted_footer() {
        return Err(bad(&name, None, "is encrypted, expected plain Parquet".into()));
    }
    let length = end.metadata_length() + END_BYTES;
    if length as u64 > bytes - 4 {
        return Err(corrupt(&name, format!("its footer would be {length} bytes, the file has {bytes}")));
    }
    if length <= tail.len() {
        tail.drain(..tail.len() - length);
    } else {
        tail.resize(length, 0);
        source.read_at(file, bytes - length as u64, &mut tail)?;
    }
    Ok((bytes, tail.into()))
}

/// A Parquet file that was cut short begins as one but does not end as one.
fn no_footer(source: &dyn ByteSource, file: usize, bytes: u64) -> ShardsError {
    let mut magic = [0; 4];
    let begins = bytes >= 4 && source.read_at(file, 0, &mut magic).is_ok() && magic == *b"PAR1";
    let name = source.name(file);
    if begins {
        return corrupt(
            &name,
            format!("begins as Parquet but has no footer at its end, byte {bytes}: it was cut short"),
        );
    }
    bad(&name, None, "is no Parquet file".into())
}

impl Footer {
    /// The columns that training reads: latitudes, longitudes, each view.
    pub(super) fn columns(&self) -> impl Iterator<Item = &Column> {
        [&self.latitude, &self.longitude].into_iter().chain(&self.views)
    }

    /// Reads what the raw footer says, and finds the columns.
    pub(super) fn parse(name: String, bytes: u64, raw: &[u8], names: &ColumnNames) -> Result<Self, ShardsError> {
        let unreadable = |error| corrupt(&name, format!("its footer cannot be read: {error}"));
        let metadata = ParquetMetaDataReader::decode_metadata(&raw[..raw.len() - END_BYTES]).map_err(unreadable)?;
        // Lists are lists, whatever the writer called them in Arrow's own schema.
        let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
        let metadata = ArrowReaderMetadata::try_new(Arc::new(metadata), options).map_err(unreadable)?;
        let find = |wanted: &str| metadata.schema().fields().iter().position(|field| field.name() == wanted);
        let leaf = |root: usize| {
            let schema = metadata.parquet_schema();
            (0..schema.num_columns()).find(|&leaf| schema.get_column_root_idx(leaf) == root)
        };
        let column = |wanted: &str, is_list: bool| {
            let root = find(wanted).ok_or_else(|| missing(&name, wanted, &metadata))?;
            let got = metadata.schema().field(root).data_type();
            let number = if is_list { list_of(got) } else { coordinate(got) };
            let want = if is_list { "a list of float16, float32 or float64" } else { "a floating-point number" };
            let leaf = leaf(root).filter(|_| number.is_some());
            let (Some(number), Some(leaf)) = (number, leaf) else {
                return Err(bad(&name, Some(wanted), format!("is {got}, expected {want}")));
            };
            Ok(Column { name: wanted.to_owned(), root, leaf, number })
        };
        let (latitude, longitude) = (column(&names.latitude, false)?, column(&names.longitude, false)?);
        let mut views = vec![column(&names.embedding, true)?];
        while find(&view_column(&names.embedding, views.len())).is_some() {
            views.push(column(&view_column(&names.embedding, views.len()), true)?);
        }
        let id = find(&names.id).and_then(|root| Some((root, leaf(root)?)));
        Ok(Self { bytes, latitude, longitude, views, id, metadata: metadata.clone(), name })
    }
}

fn list_of(kind: &DataType) -> Option<Number> {
    match kind {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => match item.data_type() {
            DataType::Float16 => Some(Number::Float16),
            DataType::Float32 => Some(Number::Float32),
            DataType::Float64 => Some(Number::Float64),
            _ => None,
        },
        _ => None,
    }
}

fn coordinate(kind: &DataType) -> Option<Number> {
    match kind {
        DataType::Float16 => Some(Number::Float16),
        DataType::Float32 => Some(Number::Float32),
        DataType::Float64 => Some(Number::Float64),
        DataType::Int32 => Some(Number::Int32),
        DataType::Int64 => Some(Number::Int64),
        _ => None,
    }
}

fn missing(name: &str, wanted: &str, metadata: &ArrowReaderMetadata) -> ShardsError {
    let there: Vec<&str> = metadata.schema().fields().iter().map(|field| field.name().as_str()).collect();
    let reason =
        format!("is not there, only {}; `shards.*_column` in the configuration names columns", there.join(", "));
    bad(name, Some(wanted), reason)
}

pub(super) fn bad(file: &str, column: Option<&str>, reason: String) -> ShardsError {
    let spot = Spot { file: file.to_owned(), row_group: None, column: column.map(str::to_owned), row: None };
    ShardsError::Bad { spot: Box::new(spot), reason }
}

pub(super) fn corrupt(file: &str, reason: String) -> ShardsError {
    let spot = Spot { file: file.to_owned(), row_group: None, column: None, row: None };
    ShardsError::Corrupt { spot: Box::new(spot), reason }
}
