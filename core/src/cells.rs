//! Writes the densities of predictions as Parquet: one row per HEALPix cell of each photo, in the nested scheme. The
//! cells of a photo have several orders, cover the Earth, and their probabilities add up to 1.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{Float32Builder, StringBuilder, UInt8Builder, UInt64Builder};
use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Schema};
use parquet::arrow::ArrowWriter;
use parquet::errors::ParquetError;

use crate::files::FileError;
use crate::geo::order_and_cell;

/// Rows of a Parquet row group, which is kept in memory until it is whole.
const GROUP_ROWS: usize = 1 << 18;

/// Writes densities to a file.
pub struct CellWriter {
    path: PathBuf,
    writer: ArrowWriter<File>,
    ids: StringBuilder,
    orders: UInt8Builder,
    cells: UInt64Builder,
    probabilities: Float32Builder,
    waiting: usize,
}

impl CellWriter {
    /// Creates the file `path`.
    pub fn create(path: &Path) -> Result<Self, FileError> {
        let file = File::create(path).map_err(FileError::at(path))?;
        let writer = ArrowWriter::try_new(file, schema(), None).map_err(failed(path))?;
        Ok(Self {
            path: path.to_owned(),
            writer,
            ids: StringBuilder::new(),
            orders: UInt8Builder::new(),
            cells: UInt64Builder::new(),
            probabilities: Float32Builder::new(),
            waiting: 0,
        })
    }

    /// Writes the cells of a photo. Each cell has its number in the scheme of [`crate::geo::unique_cell`], and its
    /// probability.
    pub fn write(&mut self, id: &str, cells: &[(u64, f32)]) -> Result<(), FileError> {
        for (unique, probability) in cells {
            let (order, cell) = order_and_cell(*unique);
            self.ids.append_value(id);
            self.orders.append_value(order as u8);
            self.cells.append_value(cell);
            self.probabilities.append_value(*probability);
        }
        self.waiting += cells.len();
        if self.waiting < GROUP_ROWS { Ok(()) } else { self.write_group().map_err(failed(&self.path)) }
    }

    /// Writes what is left.
    pub fn finish(mut self) -> Result<(), FileError> {
        self.write_group().and_then(|()| self.writer.close().map(drop)).map_err(failed(&self.path))
    }

    fn write_group(&mut self) -> Result<(), ParquetError> {
        let columns: Vec<ArrayRef> = vec![
            Arc::new(self.ids.finish()),
            Arc::new(self.orders.finish()),
            Arc::new(self.cells.finish()),
            Arc::new(self.probabilities.finish()),
        ];
        if std::mem::take(&mut self.waiting) == 0 {
            return Ok(());
        }
        self.writer.write(&RecordBatch::try_new(schema(), columns)?)?;
        self.writer.flush()
    }
}

fn schema() -> Arc<Schema> {
    let field = |name: &str, kind: DataType| Field::new(name, kind, false);
    Arc::new(Schema::new(vec![
        field("id", DataType::Utf8),
        field("order", DataType::UInt8),
        field("cell", DataType::UInt64),
        field("probability", DataType::Float32),
    ]))
}

fn failed(path: &Path) -> impl FnOnce(ParquetError) -> FileError + '_ {
    move |error| FileError { path: path.to_owned(), error: std::io::Error::other(error) }
}

#[cfg(test)]
mod tests {
    use arrow_array::cast::AsArray as _;
    use arrow_array::types::{UInt8Type, UInt64Type};
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

    use super::*;
    use crate::geo::unique_cell;

    #[test]
    fn cells_of_photos_are_read_back_and_photos_without_cells_leave_no_row() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let path = folder.path().join("density.parquet");
        let mut writer = CellWriter::create(&path).expect("the folder is writable");
        writer.write("none", &[]).expect("the disk has room");
        // More rows than a group has.
        let cells: Vec<(u64, f32)> = (0..300_000).map(|cell| (unique_cell(8, cell), 1e-6)).collect();
        writer.write("many", &cells).expect("the disk has room");
        writer.write("two", &[(unique_cell(0, 11), 0.25), (unique_cell(3, 767), 0.75)]).expect("the disk has room");
        writer.finish().expect("the disk has room");
        let file = File::open(&path).expect("the file was written");
        let reader = ParquetRecordBatchReaderBuilder::try_new(file).and_then(|builder| builder.build());
        let mut rows = Vec::new();
        for batch in reader.expect("the file is valid") {
            let batch = batch.expect("the file is valid");
            let (ids, orders) = (batch.column(0).as_string::<i32>(), batch.column(1).as_primitive::<UInt8Type>());
            let cells = batch.column(2).as_primitive::<UInt64Type>();
            rows.extend(
                (0..batch.num_rows()).map(|row| (ids.value(row).to_owned(), orders.value(row), cells.value(row))),
            );
        }
        assert_eq!(rows.len(), 300_002);
        assert_eq!(rows[299_999], ("many".to_owned(), 8, 299_999));
        assert_eq!(rows[300_000..], [("two".to_owned(), 0, 11), ("two".to_owned(), 3, 767)]);
    }
}
