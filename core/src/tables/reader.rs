//! Reads a table of ids and coordinates row by row. The table is a CSV file, a Parquet file, or a `.npy` file with two
//! columns (latitude and longitude).
//!
//! In a Parquet file, coordinates must be Float32 or Float64, and ids may have any type that [`ids::id`] accepts.
//! Dictionary-encoded columns are decoded.
//!
//! In all formats, the reader returns [`TableError::Row`] for an invalid row, and the next call reads the next row. Any
//! other error concerns the whole file.

use std::fs::File;
use std::path::{Path, PathBuf};

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Float64Type};
use arrow_array::{Array, RecordBatch};
use arrow_schema::DataType;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};

use serde::{Deserialize, Serialize};

use super::error::TableError;
use super::ids;
use super::matrix::Matrix;
use super::names::{ColumnNames, Columns};
use crate::geo::{Degrees, Place};

/// Number of Parquet rows decoded at once.
const BATCH_ROWS: usize = 8192;
/// Number of `.npy` rows read at once.
const PIECE_ROWS: u64 = 65_536;

/// One row of a table.
#[derive(Debug, Clone, PartialEq)]
pub struct TableRow {
    /// The id, if ids were requested and the table has an id column.
    pub id: Option<String>,
    /// The coordinates. With [`PlacesPresent::All`], each row has some.
    pub place: Option<Place>,
}

/// Which rows of a table have coordinates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlacesPresent {
    /// All rows. A row without coordinates is an error.
    All,
    /// Some rows. In the other rows, both coordinates are empty, null or NaN.
    Some,
    /// No row. The table needs no columns of coordinates, and existing ones are ignored.
    None,
}

impl std::str::FromStr for PlacesPresent {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "all" => Ok(Self::All),
            "some" => Ok(Self::Some),
            "none" => Ok(Self::None),
            _ => Err("wanted all, some or none"),
        }
    }
}

/// The format of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TableFormat {
    Csv,
    Parquet,
    Npy,
}

impl TableFormat {
    /// The extension, in upper or lower case, decides the format: `.parquet` is Parquet, `.npy` is NumPy, and anything
    /// else is CSV.
    pub(super) fn of(path: &Path) -> Self {
        let has_extension = |wanted: &str| path.extension().is_some_and(|found| found.eq_ignore_ascii_case(wanted));
        if has_extension("npy") {
            Self::Npy
        } else if has_extension("parquet") {
            Self::Parquet
        } else {
            Self::Csv
        }
    }
}

/// An open table.
pub struct TableReader {
    path: PathBuf,
    header: Vec<String>,
    columns: Columns,
    places: PlacesPresent,
    /// Whether each column holds text. For CSV, the rows read so far decide this; for Parquet, the type of the column.
    is_text: Vec<bool>,
    rows: RowSource,
    /// Number of the next row.
    next: usize,
}

enum RowSource {
    Csv(Box<csv::StringRecordsIntoIter<File>>),
    Parquet { batches: Box<ParquetRecordBatchReader>, batch: Option<RecordBatch>, row: usize },
    Npy { matrix: Matrix, piece: Vec<f64> },
}

impl TableReader {
    /// Opens a table in which all rows have coordinates. Ids are read only if `with_ids` is true.
    pub fn open(path: &Path, names: ColumnNames<'_>, with_ids: bool) -> Result<Self, TableError> {
        Self::open_with(PlacesPresent::All, path, names, with_ids)
    }

    /// Like [`Self::open`], but rows may lack coordinates.
    pub fn open_with(
        places: PlacesPresent,
        path: &Path,
        names: ColumnNames<'_>,
        with_ids: bool,
    ) -> Result<Self, TableError> {
        let (format, wanted) = (TableFormat::of(path), (with_ids, places != PlacesPresent::None));
        if format == TableFormat::Npy {
            return Ok(Self { places, ..open_npy(path)? });
        }
        let file = File::open(path).map_err(|error| TableError::io(path, &error))?;
        if format == TableFormat::Parquet {
            return Ok(Self { places, ..open_parquet(path, file, names, wanted)? });
        }
        let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(file);
        let header = reader.headers().map_err(|error| TableError::csv(path, None, &error))?;
        let header: Vec<String> =
            header.iter().map(|name| name.trim_start_matches('\u{feff}').trim().to_owned()).collect();
        let columns = Columns::find(path, &header, names, wanted)?;
        let (rows, is_text) = (RowSource::Csv(Box::new(reader.into_records())), vec![false; header.len()]);
        Ok(Self { path: path.to_owned(), header, columns, places, is_text, rows, next: 0 })
    }

    /// The names of the columns.
    pub fn header(&self) -> &[String] {
        &self.header
    }

    /// Whether ids were requested and the table has an id column.
    pub fn has_ids(&self) -> bool {
        self.columns.id.is_some()
    }

    /// Names of the text columns that are not read. In a CSV file, a column counts as text if any of its cells read so
    /// far is not a number.
    pub fn other_text(&self) -> Vec<String> {
        let other = (0..self.header.len()).filter(|column| self.is_text[*column] && self.columns.is_unused(*column));
        other.map(|column| self.header[column].clone()).collect()
    }

    /// Reads the next row; `None` at the end. The inner error says why the row is invalid.
    fn read(&mut self) -> Result<Option<Result<TableRow, String>>, TableError> {
        let (header, columns, places) = (&self.header, self.columns, self.places);
        Ok(Some(match &mut self.rows {
            RowSource::Csv(records) => {
                let Some(record) = records.next() else { return Ok(None) };
                let record = record.map_err(|error| TableError::csv(&self.path, Some(self.next), &error))?;
                let is_text_cell = |text: &str| !text.is_empty() && text.parse::<f64>().is_err();
                self.is_text.iter_mut().zip(&record).for_each(|(is_text, text)| *is_text |= is_text_cell(text));
                csv_row(&record, header, columns, places)
            }
            RowSource::Parquet { batches, batch, row } => {
                while batch.as_ref().is_none_or(|batch| *row == batch.num_rows()) {
                    let Some(next) = batches.next() else { return Ok(None) };
                    *batch = Some(next.map_err(|error| bad_parquet(&self.path, &error))?);
                    *row = 0;
                }
                *row += 1;
                let batch = batch.as_ref().ok_or_else(|| "no rows".to_owned());
                batch.and_then(|batch| parquet_row(batch, *row - 1, header, columns, places))
            }
            RowSource::Npy { matrix, piece } => {
                let row = self.next as u64;
                if row == matrix.rows() {
                    return Ok(None);
                }
                if row.is_multiple_of(PIECE_ROWS) {
                    *piece = matrix.read_f64(row, PIECE_ROWS.min(matrix.rows() - row) as usize)?;
                }
                let at = (row % PIECE_ROWS) as usize * 2;
                place([Some(piece[at]), Some(piece[at + 1])], places).map(|place| TableRow { id: None, place })
            }
        }))
    }
}

impl Iterator for TableReader {
    type Item = Result<TableRow, TableError>;

    fn next(&mut self) -> Option<Self::Item> {
        let row = self.read().transpose()?;
        let number = self.next;
        self.next += 1;
        Some(row.and_then(|row| row.map_err(|reason| TableError::row(&self.path, number, reason))))
    }
}

fn open_npy(path: &Path) -> Result<TableReader, TableError> {
    let matrix = Matrix::open(path)?;
    if matrix.width() != 2 {
        let reason = format!("shape is {} x {}, wanted N x 2 (latitude, longitude)", matrix.rows(), matrix.width());
        return Err(TableError::file(path, reason));
    }
    let header = vec!["latitude".to_owned(), "longitude".to_owned()];
    let (columns, places) = (Columns { id: None, place: Some([0, 1]) }, PlacesPresent::All);
    let rows = RowSource::Npy { matrix, piece: Vec::new() };
    Ok(TableReader { path: path.to_owned(), header, columns, places, is_text: vec![false; 2], rows, next: 0 })
}

fn open_parquet(
    path: &Path,
    file: File,
    names: ColumnNames<'_>,
    wanted: (bool, bool),
) -> Result<TableReader, TableError> {
    // Skip the Arrow metadata, so that text columns are read as plain text even if the writer used dictionaries.
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    let builder = ParquetRecordBatchReaderBuilder::try_new_with_options(file, options);
    let builder = builder.map_err(|error| bad_parquet(path, &error))?;
    let fields = builder.schema().fields();
    let header: Vec<String> = fields.iter().map(|field| field.name().clone()).collect();
    let columns = Columns::find(path, &header, names, wanted)?;
    for column in columns.place.into_iter().flatten() {
        let kind = fields[column].data_type();
        if !matches!(kind, DataType::Float32 | DataType::Float64) {
            let reason = format!("column `{}` is {kind}, wanted Float32 or Float64", header[column]);
            return Err(TableError::file(path, reason));
        }
    }
    let is_text = fields.iter().map(|field| *field.data_type() == DataType::Utf8).collect();
    let mask = ProjectionMask::roots(builder.parquet_schema(), columns.used());
    let batches = builder.with_projection(mask).with_batch_size(BATCH_ROWS).build();
    let batches = Box::new(batches.map_err(|error| bad_parquet(path, &error))?);
    let (rows, places) = (RowSource::Parquet { batches, batch: None, row: 0 }, PlacesPresent::All);
    Ok(TableReader { path: path.to_owned(), header, columns, places, is_text, rows, next: 0 })
}

pub(super) fn bad_parquet(path: &Path, error: &dyn std::fmt::Display) -> TableError {
    TableError::damaged(path, format!("not a complete Parquet file: {error}"))
}

fn csv_row(
    record: &csv::StringRecord,
    header: &[String],
    columns: Columns,
    places: PlacesPresent,
) -> Result<TableRow, String> {
    let number = |column: usize| match &record[column] {
        "" if places == PlacesPresent::Some => Ok(None),
        text => text.parse().map(Some).map_err(|_| format!("`{}` is `{text}`, wanted a number", header[column])),
    };
    let of = |[latitude, longitude]: [usize; 2]| place([number(latitude)?, number(longitude)?], places);
    let place = columns.place.map_or(Ok(None), of)?;
    Ok(TableRow { id: columns.id.map(|column| record[column].to_owned()), place })
}

fn parquet_row(
    batch: &RecordBatch,
    row: usize,
    header: &[String],
    columns: Columns,
    places: PlacesPresent,
) -> Result<TableRow, String> {
    let array =
        |column: usize| batch.column_by_name(&header[column]).ok_or_else(|| format!("no column `{}`", header[column]));
    let number = |column: usize| {
        array(column).and_then(|array| match array.data_type() {
            _ if array.is_null(row) && places == PlacesPresent::Some => Ok(None),
            _ if array.is_null(row) => Err(format!("`{}` is null, wanted a number", header[column])),
            DataType::Float32 => Ok(Some(f64::from(array.as_primitive::<Float32Type>().value(row)))),
            _ => Ok(Some(array.as_primitive::<Float64Type>().value(row))),
        })
    };
    let id = |column: usize| ids::id(array(column)?, row).map_err(|reason| format!("`{}` {reason}", header[column]));
    let of = |[latitude, longitude]: [usize; 2]| place([number(latitude)?, number(longitude)?], places);
    let place = columns.place.map_or(Ok(None), of)?;
    Ok(TableRow { id: columns.id.map(id).transpose()?, place })
}

/// Builds a place from a latitude and a longitude, or says which of them is missing or out of range. `None` if both are
/// missing and may be missing.
fn place(degrees: [Option<f64>; 2], places: PlacesPresent) -> Result<Option<Place>, String> {
    if places == PlacesPresent::None {
        return Ok(None);
    }
    let is_missing = |degrees: Option<f64>| places == PlacesPresent::Some && degrees.is_none_or(f64::is_nan);
    match degrees.map(is_missing) {
        [true, true] => return Ok(None),
        [false, false] => {}
        [true, false] => return Err("it has a longitude but no latitude, wanted both or neither".to_owned()),
        [false, true] => return Err("it has a latitude but no longitude, wanted both or neither".to_owned()),
    }
    let [latitude, longitude] = degrees.map(|degrees| degrees.unwrap_or(f64::NAN));
    for (what, value, limit) in [("latitude", latitude, 90.0), ("longitude", longitude, 180.0)] {
        // The test is not `value < -limit || value > limit`, because that test would accept NaN.
        if !(-limit..=limit).contains(&value) {
            return Err(format!("{what} is {value}, wanted -{limit} to {limit}"));
        }
    }
    Place::new(Degrees(latitude), Degrees(longitude)).map(Some).map_err(|error| error.to_string())
}
