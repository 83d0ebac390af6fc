//! Tables of ids and coordinates, CSV or Parquet, row by row.
//!
//! A row that cannot be read as one is handed out with its error: whether that ends the work is the caller's. What is wrong
//! with the file as a whole is an error of its own. Without a column of ids, row numbers serve.

use std::fs::File;
use std::path::{Path, PathBuf};

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Float64Type};
use arrow_array::{Array, RecordBatch};
use arrow_schema::DataType;
use locdiff_core::config::ShardsConfig;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};

use super::coordinates::{csv_error, parse};
use super::{ShardsError, Spot, ids};

/// Rows of a Parquet table that are decoded at once.
const BATCH_ROWS: usize = 8192;

/// One row.
pub(super) struct TableRow {
    /// Where it stands.
    pub(super) spot: Spot,
    /// Id, latitude and longitude, or why there are none.
    pub(super) usable: Result<(String, f64, f64), ShardsError>,
}

/// An open table.
pub(super) struct Table {
    path: PathBuf,
    names: [String; 3],
    next: u64,
    kind: Kind,
}

enum Kind {
    Csv { rows: Box<csv::StringRecordsIntoIter<File>>, columns: (Option<usize>, usize, usize) },
    Parquet { batches: Box<ParquetRecordBatchReader>, batch: Option<RecordBatch>, row: usize },
}

impl Table {
    /// Opens `.parquet` as Parquet and anything else as CSV.
    pub(super) fn open(path: &Path, config: &ShardsConfig) -> Result<Self, ShardsError> {
        let names = [&config.id_column, &config.latitude_column, &config.longitude_column].map(Clone::clone);
        let file = File::open(path).map_err(|error| ShardsError::io(path, error))?;
        let is_parquet = path.extension().is_some_and(|extension| extension == "parquet");
        let kind = if is_parquet { open_parquet(path, file, &names)? } else { open_csv(path, file, &names)? };
        Ok(Self { path: path.to_owned(), names, next: 0, kind })
    }

    /// The next row; none at the end.
    pub(super) fn next_row(&mut self) -> Result<Option<TableRow>, ShardsError> {
        let number = self.next;
        self.next += 1;
        let spot = Spot { row: Some(number), ..spot(&self.path) };
        let usable = match &mut self.kind {
            Kind::Csv { rows, columns } => match rows.next() {
                None => return Ok(None),
                Some(Err(error)) => Err(csv_error(&self.path, Some(number), &error)),
                Some(Ok(record)) => csv_row(&record, *columns, number).map_err(|reason| bad(&spot, reason)),
            },
            Kind::Parquet { batches, batch, row } => {
                while batch.as_ref().is_none_or(|batch| *row == batch.num_rows()) {
                    let Some(next) = batches.next() else { return Ok(None) };
                    *batch = Some(next.map_err(|error| corrupt(&self.path, &error))?);
                    *row = 0;
                }
                let batch = batch.as_ref().expect("the loop above ends with a batch");
                *row += 1;
                parquet_row(batch, &self.names, *row - 1, number).map_err(|reason| bad(&spot, reason))
            }
        };
        match usable {
            // The system's refusals are no matter of rows.
            Err(error @ ShardsError::Io { .. }) => Err(error),
            usable => Ok(Some(TableRow { spot, usable })),
        }
    }
}

fn spot(path: &Path) -> Spot {
    Spot { file: path.display().to_string(), row_group: None, column: None, row: None }
}

fn bad(spot: &Spot, reason: String) -> ShardsError {
    ShardsError::Bad { spot: Box::new(spot.clone()), reason }
}

fn corrupt(path: &Path, error: &dyn std::fmt::Display) -> ShardsError {
    ShardsError::Corrupt { spot: Box::new(spot(path)), reason: error.to_string() }
}

fn missing(path: &Path, name: &str, columns: &[&str]) -> ShardsError {
    bad(&spot(path), format!("columns are {columns:?}, wanted `{name}` among them"))
}

fn open_csv(path: &Path, file: File, names: &[String; 3]) -> Result<Kind, ShardsError> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(file);
    let header = reader.headers().map_err(|error| csv_error(path, None, &error))?.clone();
    let find = |name: &String| header.iter().position(|column| column == name);
    let need = |name: &String| find(name).ok_or_else(|| missing(path, name, &header.iter().collect::<Vec<_>>()));
    let columns = (find(&names[0]), need(&names[1])?, need(&names[2])?);
    Ok(Kind::Csv { rows: Box::new(reader.into_records()), columns })
}

fn csv_row(
    record: &csv::StringRecord,
    (id, latitude, longitude): (Option<usize>, usize, usize),
    number: u64,
) -> Result<(String, f64, f64), String> {
    let id = id.map_or_else(|| number.to_string(), |column| record[column].to_owned());
    Ok((id, parse(&record[latitude])?, parse(&record[longitude])?))
}

fn open_parquet(path: &Path, file: File, names: &[String; 3]) -> Result<Kind, ShardsError> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| corrupt(path, &error))?;
    let schema = builder.schema().clone();
    let columns: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
    for name in &names[1..] {
        let kind = schema.field_with_name(name).map_err(|_| missing(path, name, &columns))?.data_type();
        if !matches!(kind, DataType::Float32 | DataType::Float64) {
            let spot = Spot { column: Some(name.clone()), ..spot(path) };
            return Err(bad(&spot, format!("is {kind}, expected Float32 or Float64")));
        }
    }
    let roots = columns.iter().enumerate().filter(|(_, name)| names.iter().any(|own| own == *name));
    let mask = ProjectionMask::roots(builder.parquet_schema(), roots.map(|(index, _)| index));
    let batches = builder.with_projection(mask).with_batch_size(BATCH_ROWS).build();
    Ok(Kind::Parquet { batches: Box::new(batches.map_err(|error| corrupt(path, &error))?), batch: None, row: 0 })
}

fn parquet_row(
    batch: &RecordBatch,
    names: &[String; 3],
    row: usize,
    number: u64,
) -> Result<(String, f64, f64), String> {
    let coordinate = |name: &String| {
        let column = batch.column_by_name(name).ok_or_else(|| format!("no column `{name}`"))?;
        match column.data_type() {
            _ if column.is_null(row) => Err(format!("`{name}` is null, expected a number")),
            DataType::Float32 => Ok(f64::from(column.as_primitive::<Float32Type>().value(row))),
            _ => Ok(column.as_primitive::<Float64Type>().value(row)),
        }
    };
    let id = match batch.column_by_name(&names[0]) {
        None => number.to_string(),
        Some(column) => ids::id(column.as_ref(), row).map_err(|reason| format!("`{}` {reason}", names[0]))?,
    };
    Ok((id, coordinate(&names[1])?, coordinate(&names[2])?))
}
