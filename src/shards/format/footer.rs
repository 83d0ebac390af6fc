//! The footer of a Parquet file. It lists the columns and the places of their chunks.

use std::sync::Arc;

use arrow_schema::DataType;
use locdiff_core::config::ShardsConfig;
use locdiff_core::tables;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use parquet::file::metadata::{FooterTail, ParquetMetaDataReader};

use super::columns::view_column;
use super::decode::Number;
use crate::shards::error::{ShardsError, Spot};

/// Size of the last two fields of a file: the footer length and the magic number.
const END_BYTES: usize = 8;

/// A column of the file.
#[derive(Debug, Clone)]
pub(crate) struct Column {
    pub(crate) name: String,
    /// Index among the top-level columns.
    pub(crate) root: usize,
    /// Index among the leaf columns. Column chunks belong to leaf columns.
    pub(crate) leaf: usize,
    pub(crate) number: Number,
}

/// A parsed footer.
#[derive(Debug, Clone)]
pub(crate) struct Footer {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) metadata: ArrowReaderMetadata,
    pub(crate) latitude: Column,
    pub(crate) longitude: Column,
    pub(crate) views: Vec<Column>,
    /// The identifier column. Its `number` is unused.
    pub(crate) id: Option<Column>,
}

/// Computes the size of a file's footer. `bytes` is the size of the file, `tail` holds the last bytes of the file, and
/// `first` reads the first four bytes of the file.
pub(crate) fn footer_bytes(
    name: &str,
    bytes: u64,
    tail: &[u8],
    first: impl FnOnce() -> Option<[u8; 4]>,
) -> Result<usize, ShardsError> {
    let end = tail.last_chunk::<END_BYTES>().and_then(|end| FooterTail::try_new(end).ok());
    let Some(end) = end.filter(|_| bytes > END_BYTES as u64 + 4) else {
        if bytes < 4 || first() != Some(*b"PAR1") {
            return Err(ShardsError::bad(Spot::file(name), "is not a Parquet file"));
        }
        let reason =
            format!("the file starts like Parquet, but its {bytes} bytes do not end with a footer: it was cut short");
        return Err(ShardsError::corrupt(Spot::file(name), reason));
    };
    if end.is_encrypted_footer() {
        return Err(ShardsError::bad(Spot::file(name), "its footer is encrypted, wanted Parquet without encryption"));
    }
    let length = end.metadata_length() + END_BYTES;
    if length as u64 > bytes - 4 {
        let reason = format!("its footer should have {length} bytes, but the whole file has {bytes}");
        return Err(ShardsError::corrupt(Spot::file(name), reason));
    }
    Ok(length)
}

impl Footer {
    /// The columns that training reads, in this order: latitude, longitude, one column per view.
    pub(crate) fn columns(&self) -> impl Iterator<Item = &Column> {
        [&self.latitude, &self.longitude].into_iter().chain(&self.views)
    }

    /// Parses a raw footer and finds the columns by their configured names.
    pub(crate) fn parse(name: String, bytes: u64, raw: &[u8], names: &ShardsConfig) -> Result<Self, ShardsError> {
        let unreadable = |error| ShardsError::corrupt(Spot::file(&name), format!("its footer cannot be read: {error}"));
        let metadata = ParquetMetaDataReader::decode_metadata(&raw[..raw.len() - END_BYTES]).map_err(unreadable)?;
        // Ignore the Arrow schema in the footer. Without it, all kinds of lists have the same type.
        let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
        let metadata = ArrowReaderMetadata::try_new(Arc::new(metadata), options).map_err(unreadable)?;
        let header: Vec<String> = metadata.schema().fields().iter().map(|field| field.name().clone()).collect();
        let find = |wanted: &str| header.iter().position(|name| name == wanted);
        let leaf = |root: usize| {
            let schema = metadata.parquet_schema();
            (0..schema.num_columns()).find(|&leaf| schema.get_column_root_idx(leaf) == root)
        };
        let column = |wanted: &str, is_list: bool| {
            let root = find(wanted).ok_or_else(|| missing_column(&name, wanted, &header))?;
            let got = metadata.schema().field(root).data_type();
            let number = if is_list { list_element(got) } else { number_type(got) };
            let want = if is_list { "a list of float16, float32 or float64" } else { "a float or an integer" };
            let leaf = leaf(root).filter(|_| number.is_some());
            let (Some(number), Some(leaf)) = (number, leaf) else {
                return Err(ShardsError::bad(Spot::file(&name).column(wanted), format!("is {got}, wanted {want}")));
            };
            Ok(Column { name: wanted.to_owned(), root, leaf, number })
        };
        // If a coordinate column is configured by its default name and the file has no column of that name, a column
        // with another accepted name is used. The id column must have exactly the configured name, because columns such
        // as `image` or `file` often hold the photo itself.
        let named = |accepted: &[&str], given: &String| match tables::columns_named(&header, accepted, Some(given))[..]
        {
            [root] => column(&header[root], false),
            _ => column(given, false),
        };
        let latitude = named(tables::LATITUDE_NAMES, &names.latitude_column)?;
        let longitude = named(tables::LONGITUDE_NAMES, &names.longitude_column)?;
        let mut views = vec![column(&names.embedding_column, true)?];
        while find(&view_column(&names.embedding_column, views.len())).is_some() {
            views.push(column(&view_column(&names.embedding_column, views.len()), true)?);
        }
        let id_name = names.id_column.clone();
        let id = find(&id_name)
            .and_then(|root| Some(Column { name: id_name, root, leaf: leaf(root)?, number: Number::Float64 }));
        Ok(Self { bytes, latitude, longitude, views, id, metadata: metadata.clone(), name })
    }
}

fn list_element(kind: &DataType) -> Option<Number> {
    match kind {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            number_type(item.data_type()).filter(|number| !matches!(number, Number::Int32 | Number::Int64))
        }
        _ => None,
    }
}

fn number_type(kind: &DataType) -> Option<Number> {
    match kind {
        DataType::Float16 => Some(Number::Float16),
        DataType::Float32 => Some(Number::Float32),
        DataType::Float64 => Some(Number::Float64),
        DataType::Int32 => Some(Number::Int32),
        DataType::Int64 => Some(Number::Int64),
        _ => None,
    }
}

fn missing_column(name: &str, wanted: &str, header: &[String]) -> ShardsError {
    let reason = format!(
        "not found; the file has {}; set the name in `shards.*_column` of the configuration",
        header.join(", ")
    );
    ShardsError::bad(Spot::file(name).column(wanted), reason)
}
