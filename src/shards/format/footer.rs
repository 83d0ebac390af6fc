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

/// The word for embeddings in error messages and in the name of the configuration field `embedding_column`.
const EMBEDDING: &str = "embedding";

/// Whether the rows of a data set must have coordinates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coordinates {
    /// Every usable row has valid coordinates.
    Needed,
    /// Coordinates are read as far as there are some according to the manifest. A row without coordinates has NaN.
    Stored,
    /// Coordinates are not read, and may be missing.
    Ignored,
}

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
    /// Latitude and longitude. `None` if the coordinates are ignored.
    pub(crate) coordinates: Option<[Column; 2]>,
    pub(crate) views: Vec<Column>,
    /// The identifier column. Its `number` is unused.
    pub(crate) id: Option<Column>,
    /// Whether the identifier column was found by a common name, and not by the configured name.
    pub(crate) is_id_guessed: bool,
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
    /// The columns that are read, in this order: latitude and longitude unless they are ignored, then one column per
    /// view.
    pub(crate) fn columns(&self) -> impl Iterator<Item = &Column> {
        self.coordinates.iter().flatten().chain(&self.views)
    }

    /// Parses a raw footer and finds the columns by their configured names.
    pub(crate) fn parse(
        name: String,
        bytes: u64,
        raw: &[u8],
        names: &ShardsConfig,
        coordinates: Coordinates,
    ) -> Result<Self, ShardsError> {
        let unreadable = |error| ShardsError::corrupt(Spot::file(&name), format!("its footer cannot be read: {error}"));
        let metadata = ParquetMetaDataReader::decode_metadata(&raw[..raw.len() - END_BYTES]).map_err(unreadable)?;
        // Ignore the Arrow schema in the footer. Without it, all kinds of lists have the same type.
        let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
        let metadata = ArrowReaderMetadata::try_new(Arc::new(metadata), options).map_err(unreadable)?;
        let header = metadata.schema().fields().iter().map(|field| field.name().clone()).collect();
        let columns = FileColumns { file: &name, header, metadata: &metadata };
        let coordinates = match coordinates {
            Coordinates::Needed | Coordinates::Stored => Some([
                columns.find("latitude", tables::LATITUDE_NAMES, &names.latitude_column)?,
                columns.find("longitude", tables::LONGITUDE_NAMES, &names.longitude_column)?,
            ]),
            Coordinates::Ignored => None,
        };
        let mut views = vec![columns.find(EMBEDDING, tables::EMBEDDING_NAMES, &names.embedding_column)?];
        let view = |number: usize| view_column(&views[0].name, number);
        let further = (1..).map_while(|number| columns.header.iter().position(|name| *name == view(number)));
        let further = further.map(|root| columns.column(root, true)).collect::<Result<Vec<_>, _>>()?;
        views.extend(further);
        let id = columns.id(&names.id_column);
        let is_id_guessed = id.as_ref().is_some_and(|id| id.name != names.id_column);
        Ok(Self { bytes, coordinates, views, id, is_id_guessed, metadata: metadata.clone(), name })
    }
}

/// The top-level columns of a file.
struct FileColumns<'a> {
    file: &'a str,
    header: Vec<String>,
    metadata: &'a ArrowReaderMetadata,
}

impl FileColumns<'_> {
    /// Finds the column named `given`, the value of `shards.{what}_column`. If `given` is the default name and no
    /// column has this name, looks for the names in `accepted`, in their order, and takes the first column with a
    /// suitable type.
    fn find(&self, what: &str, accepted: &[&str], given: &str) -> Result<Column, ShardsError> {
        let is_list = what == EMBEDDING;
        let found = tables::columns_named(&self.header, accepted, Some(given));
        let usable = found.iter().find_map(|root| self.column(*root, is_list).ok());
        match (usable, found.first()) {
            (Some(column), _) => Ok(column),
            (None, Some(root)) => self.column(*root, is_list),
            (None, None) => Err(self.missing(what, accepted, given)),
        }
    }

    /// The column with index `root`. The column must hold lists of floats if `is_list` is true, and numbers otherwise.
    fn column(&self, root: usize, is_list: bool) -> Result<Column, ShardsError> {
        let (name, got) = (&self.header[root], self.kind(root));
        let number = if is_list { list_element(got) } else { number_type(got) };
        let Some((number, leaf)) = number.zip(self.leaf(root)) else {
            let want = if is_list { "a list of float16, float32 or float64" } else { "a float, int32 or int64" };
            return Err(ShardsError::bad(Spot::file(self.file).column(name), format!("is {got}, wanted {want}")));
        };
        Ok(Column { name: name.clone(), root, leaf, number })
    }

    /// The identifier column: the column with the name `given`. If `given` is the default name and no column has this
    /// name, looks for the accepted names, in upper or lower case and in their order, and takes the first column that
    /// holds text or integers. Columns of other types are not taken, because columns with names such as `image` or
    /// `file` may hold the photos themselves.
    fn id(&self, given: &str) -> Option<Column> {
        let is_text = |kind: &DataType| matches!(kind, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View);
        let is_suitable = |root: &usize| {
            let kind = self.kind(*root);
            self.header[*root] == given || is_text(kind) || kind.is_integer()
        };
        let root = tables::columns_named(&self.header, tables::ID_NAMES, Some(given)).into_iter().find(is_suitable)?;
        Some(Column { name: self.header[root].clone(), root, leaf: self.leaf(root)?, number: Number::Float64 })
    }

    fn kind(&self, root: usize) -> &DataType {
        self.metadata.schema().field(root).data_type()
    }

    fn leaf(&self, root: usize) -> Option<usize> {
        let schema = self.metadata.parquet_schema();
        (0..schema.num_columns()).find(|&leaf| schema.get_column_root_idx(leaf) == root)
    }

    fn missing(&self, what: &str, accepted: &[&str], given: &str) -> ShardsError {
        let (found, spot) = (self.header.join(", "), Spot::file(self.file));
        if given != accepted[0] {
            let reason = format!("not found; the file has {found}; set shards.{what}_column to one of them");
            return ShardsError::bad(spot.column(given), reason);
        }
        ShardsError::bad(spot, format!("no column for the {what}; found: {found}; name one in shards.{what}_column"))
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
