//! Decodes a column chunk row by row with the Arrow reader of the `parquet` crate. This is slower than
//! [`super::decode`], but it supports all encodings and finds out which rows of a chunk are bad and why.

use std::collections::BTreeMap;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float16Type, Float32Type, Float64Type, Int32Type, Int64Type};
use arrow_array::{Array, ArrayRef};
use arrow_schema::DataType;
use half::f16;
use locdiff_core::tables;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ParquetRecordBatchReaderBuilder};
use parquet::errors::ParquetError;

use super::columns::ELEMENT_BYTES;
use super::decode::ChunkBytes;
use super::footer::Column;

/// Number of rows to decode at a time.
const BATCH_ROWS: usize = 1024;

/// A bad value. A row with a bad value cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BadValue {
    /// Name of the column.
    pub(crate) column: String,
    /// Row within the row group.
    pub(crate) row: usize,
    /// What was found and what was wanted.
    pub(crate) reason: String,
}

impl Column {
    /// Describes a bad value in this column.
    pub(crate) fn bad(&self, row: usize, reason: String) -> BadValue {
        BadValue { column: self.name.clone(), row, reason }
    }
}

/// A column chunk to decode.
pub(crate) struct CarefulChunk<'a> {
    pub(crate) bytes: ChunkBytes,
    pub(crate) metadata: &'a ArrowReaderMetadata,
    pub(crate) row_group: usize,
    pub(crate) column: &'a Column,
}

impl CarefulChunk<'_> {
    /// Decodes the column in pieces. For each piece, calls `take` with the index of its first row and the piece itself.
    /// Returns the number of rows.
    fn each(&self, mut take: impl FnMut(usize, &ArrayRef) -> Result<(), ParquetError>) -> Result<usize, ParquetError> {
        let mask = ProjectionMask::roots(self.metadata.parquet_schema(), [self.column.root]);
        let reader = ParquetRecordBatchReaderBuilder::new_with_metadata(self.bytes.clone(), self.metadata.clone())
            .with_row_groups(vec![self.row_group])
            .with_projection(mask)
            .with_batch_size(BATCH_ROWS)
            .build()?;
        let mut rows = 0;
        for batch in reader {
            let batch = batch?;
            take(rows, batch.column(0))?;
            rows += batch.num_rows();
        }
        Ok(rows)
    }

    /// Decodes embeddings to float16. A bad row is decoded as zeros and added to `bad`. Returns the number of rows.
    pub(crate) fn halves(
        &self,
        width: usize,
        into: &mut Vec<u8>,
        bad: &mut Vec<BadValue>,
    ) -> Result<usize, ParquetError> {
        self.each(|first, column| {
            for index in 0..column.len() {
                let begin = into.len();
                if let Err(reason) = list(column, index).and_then(|list| append(&list, width, into)) {
                    into.truncate(begin);
                    into.resize(begin + width * ELEMENT_BYTES, 0);
                    bad.push(self.column.bad(first + index, reason));
                }
            }
            Ok(())
        })
    }

    /// Decodes coordinates. A value that cannot be read is decoded as zero and added to `bad`. If `may_be_null` is true,
    /// null is decoded as NaN. Returns the number of rows.
    pub(crate) fn doubles(
        &self,
        may_be_null: bool,
        into: &mut Vec<f64>,
        bad: &mut Vec<BadValue>,
    ) -> Result<usize, ParquetError> {
        self.each(|first, column| {
            for index in 0..column.len() {
                if may_be_null && column.is_null(index) {
                    into.push(f64::NAN);
                    continue;
                }
                into.push(number(column, index).unwrap_or_else(|reason| {
                    bad.push(self.column.bad(first + index, reason));
                    0.0
                }));
            }
            Ok(())
        })
    }

    /// The most common list length, ignoring nulls and empty lists. If several lengths are equally common, returns the
    /// largest of them. Returns `None` if all lists are null or empty.
    pub(crate) fn commonest_width(&self) -> Result<Option<usize>, ParquetError> {
        let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
        self.each(|_, column| {
            let lengths = (0..column.len()).filter_map(|index| list(column, index).ok()).map(|list| list.len());
            lengths.filter(|length| *length > 0).for_each(|length| *counts.entry(length).or_default() += 1);
            Ok(())
        })?;
        Ok(counts.into_iter().max_by_key(|(_, count)| *count).map(|(length, _)| length))
    }

    /// Decodes identifiers. For a row without a valid identifier, the entry in `into` says what is wrong. Returns the
    /// number of rows.
    pub(crate) fn ids(&self, into: &mut Vec<Result<String, String>>) -> Result<usize, ParquetError> {
        self.each(|_, column| {
            into.extend((0..column.len()).map(|row| tables::id(column.as_ref(), row)));
            Ok(())
        })
    }
}

fn list(column: &ArrayRef, index: usize) -> Result<ArrayRef, String> {
    if column.is_null(index) {
        return Err("null, wanted a list of numbers".to_owned());
    }
    match column.data_type() {
        DataType::List(_) => Ok(column.as_list::<i32>().value(index)),
        DataType::LargeList(_) => Ok(column.as_list::<i64>().value(index)),
        DataType::FixedSizeList(..) => Ok(column.as_fixed_size_list().value(index)),
        other => Err(format!("a value of type {other}, wanted a list of numbers")),
    }
}

fn append(list: &ArrayRef, width: usize, into: &mut Vec<u8>) -> Result<(), String> {
    if list.len() != width {
        return Err(format!("a list of {} numbers, wanted {width}", list.len()));
    }
    for index in 0..width {
        let value = number(list, index).map_err(|reason| format!("number {index} is {reason}"))?;
        let rounded = f16::from_f64(value);
        if !value.is_finite() {
            return Err(format!("number {index} is {value}, wanted a finite number"));
        }
        if !rounded.is_finite() {
            return Err(format!("number {index} is {value}, beyond float16's range of -65504 to 65504"));
        }
        into.extend_from_slice(&rounded.to_le_bytes());
    }
    Ok(())
}

fn number(column: &ArrayRef, index: usize) -> Result<f64, String> {
    if column.is_null(index) {
        return Err("null, wanted a number".to_owned());
    }
    match column.data_type() {
        DataType::Float16 => Ok(column.as_primitive::<Float16Type>().value(index).to_f64()),
        DataType::Float32 => Ok(column.as_primitive::<Float32Type>().value(index).into()),
        DataType::Float64 => Ok(column.as_primitive::<Float64Type>().value(index)),
        DataType::Int32 => Ok(column.as_primitive::<Int32Type>().value(index).into()),
        DataType::Int64 => Ok(column.as_primitive::<Int64Type>().value(index) as f64),
        other => Err(format!("a value of type {other}, wanted a number")),
    }
}
