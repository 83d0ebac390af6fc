//! Tables in Parquet: floating-point coordinates, ids as text (dictionaries too) or integers, no nulls in either.

use std::fs::File;
use std::path::Path;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Float64Type, Int32Type, Int64Type, UInt32Type, UInt64Type};
use arrow_array::{Array, RecordBatch};
use arrow_schema::DataType;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReaderBuilder};

use super::error::TableError;
use super::{Columns, Table, named, place};

/// Rows that are decoded at once.
const BATCH_ROWS: usize = 8192;

pub(super) fn read(path: &Path, file: File, with_ids: bool) -> Result<Table, TableError> {
    let damaged =
        |error: &dyn std::fmt::Display| TableError::Damaged { path: path.to_owned(), reason: error.to_string() };
    // Text is text, whether the writer had it in a dictionary or not.
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    let builder =
        ParquetRecordBatchReaderBuilder::try_new_with_options(file, options).map_err(|error| damaged(&error))?;
    let schema = builder.schema().clone();
    let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
    let columns = Columns::find(path, &names, with_ids)?;
    for column in [columns.latitude, columns.longitude] {
        let kind = schema.field(column).data_type();
        if !matches!(kind, DataType::Float32 | DataType::Float64) {
            let reason = format!("column `{}` is {kind}, wanted Float32 or Float64", names[column]);
            return Err(TableError::file(path, reason));
        }
    }
    let is_text = |column: &usize| *schema.field(*column).data_type() == DataType::Utf8;
    let other = (0..names.len()).filter(|column| columns.is_other(*column)).filter(is_text);
    let other_text = other.map(|column| names[column].to_owned()).collect();
    let roots = [Some(columns.latitude), Some(columns.longitude), columns.id].into_iter().flatten();
    let mask = ProjectionMask::roots(builder.parquet_schema(), roots);
    let batches = builder.with_projection(mask).with_batch_size(BATCH_ROWS).build();
    let mut table = Table { ids: columns.id.map(|_| Vec::new()), other_text, places: Vec::new() };
    for batch in batches.map_err(|error| damaged(&error))? {
        let batch = batch.map_err(|error| damaged(&error))?;
        for row in 0..batch.num_rows() {
            let number = table.places.len();
            read_row(&batch, row, &columns, &names, &mut table)
                .map_err(|reason| TableError::row(path, number, reason))?;
        }
    }
    Ok(table)
}

fn read_row(
    batch: &RecordBatch,
    row: usize,
    columns: &Columns,
    names: &[&str],
    table: &mut Table,
) -> Result<(), String> {
    let array = |column: usize| {
        let found = batch.column_by_name(names[column]).ok_or_else(|| format!("no column `{}`", names[column]))?;
        if found.is_null(row) { Err(format!("`{}` is null", names[column])) } else { Ok(found) }
    };
    let degrees = |column: usize| {
        array(column).map(|array| match array.data_type() {
            DataType::Float32 => f64::from(array.as_primitive::<Float32Type>().value(row)),
            _ => array.as_primitive::<Float64Type>().value(row),
        })
    };
    if let (Some(ids), Some(column)) = (&mut table.ids, columns.id) {
        ids.push(named(&text(array(column)?, row).map_err(|reason| format!("`{}` {reason}", names[column]))?)?);
    }
    table.places.push(place(degrees(columns.latitude)?, degrees(columns.longitude)?)?);
    Ok(())
}

fn text(column: &dyn Array, row: usize) -> Result<String, String> {
    Ok(match column.data_type() {
        DataType::Utf8 => column.as_string::<i32>().value(row).to_owned(),
        DataType::Int32 => column.as_primitive::<Int32Type>().value(row).to_string(),
        DataType::Int64 => column.as_primitive::<Int64Type>().value(row).to_string(),
        DataType::UInt32 => column.as_primitive::<UInt32Type>().value(row).to_string(),
        DataType::UInt64 => column.as_primitive::<UInt64Type>().value(row).to_string(),
        other => return Err(format!("is {other}, wanted text or integers")),
    })
}
