//! Copies some rows of a table to a new file of the same format, with all columns.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use arrow_array::BooleanArray;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReaderBuilder, RowSelection};
use parquet::file::properties::WriterProperties;

use super::error::TableError;
use super::matrix::Matrix;
use super::reader::{TableFormat, bad_parquet};

/// Writes the rows of the table `from` for which `keep` is true to the file `to`, and syncs the file to disk. `keep`
/// has one entry per row.
pub fn copy_rows(from: &Path, keep: &[bool], to: &Path) -> Result<(), TableError> {
    let file = File::create(to).map_err(|error| TableError::io(to, &error))?;
    let written = file.try_clone().map_err(|error| TableError::io(to, &error))?;
    match TableFormat::of(from) {
        TableFormat::Csv => copy_csv(from, keep, (to, file)),
        TableFormat::Parquet => copy_parquet(from, keep, (to, file)),
        TableFormat::Npy => copy_npy(from, keep, (to, file)),
    }?;
    written.sync_all().map_err(|error| TableError::io(to, &error))
}

fn copy_csv(from: &Path, keep: &[bool], (to, file): (&Path, File)) -> Result<(), TableError> {
    let reader = csv::ReaderBuilder::new().has_headers(false).from_path(from);
    let mut reader = reader.map_err(|error| TableError::csv(from, None, &error))?;
    let mut writer = csv::Writer::from_writer(file);
    let keeps_header = [true];
    for (record, keep) in reader.byte_records().zip(keeps_header.iter().chain(keep)) {
        let record = record.map_err(|error| TableError::csv(from, None, &error))?;
        if *keep {
            writer.write_byte_record(&record).map_err(|error| TableError::csv(to, None, &error))?;
        }
    }
    writer.flush().map_err(|error| TableError::io(to, &error))
}

fn copy_parquet(from: &Path, keep: &[bool], (to, file): (&Path, File)) -> Result<(), TableError> {
    let source = File::open(from).map_err(|error| TableError::io(from, &error))?;
    let builder = ParquetRecordBatchReaderBuilder::try_new(source).map_err(|error| bad_parquet(from, &error))?;
    let failed = |error: parquet::errors::ParquetError| TableError::io(to, &std::io::Error::other(error));
    // Row groups as large as in the source, because a Parquet file can also be read as shards.
    let group_rows = builder.metadata().row_groups().iter().map(|group| group.num_rows() as usize).max();
    let properties =
        WriterProperties::builder().set_max_row_group_row_count(group_rows.filter(|rows| *rows > 0)).build();
    let mut writer = ArrowWriter::try_new(file, builder.schema().clone(), Some(properties)).map_err(failed)?;
    let selection = RowSelection::from_filters(&[BooleanArray::from(keep.to_vec())]);
    let batches = builder.with_row_selection(selection).build().map_err(|error| bad_parquet(from, &error))?;
    for batch in batches {
        writer.write(&batch.map_err(|error| bad_parquet(from, &error))?).map_err(failed)?;
    }
    writer.close().map(drop).map_err(failed)
}

fn copy_npy(from: &Path, keep: &[bool], (to, mut file): (&Path, File)) -> Result<(), TableError> {
    let bytes = Matrix::open(from)?.npy_of_rows(keep)?;
    file.write_all(&bytes).map_err(|error| TableError::io(to, &error))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;

    use arrow_array::{Float64Array, ListArray, RecordBatch, StringArray, types::Int32Type};

    use super::*;
    use crate::tables::read_places;

    /// Copies rows 0 and 2 of three rows.
    fn copied(folder: &Path, name: &str) -> PathBuf {
        let to = folder.join(format!("copy-{name}"));
        copy_rows(&folder.join(name), &[true, false, true], &to).expect("the table can be copied");
        to
    }

    #[test]
    fn all_columns_of_the_kept_rows_are_copied_in_every_format() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let at = |name: &str| folder.path().join(name);
        let text = "id,lat,lon,title\na,1,2,\"one, two\"\nb,3,4,\nc,5,6, x\n";
        std::fs::write(at("a.csv"), text).expect("the folder is writable");
        let csv = copied(folder.path(), "a.csv");
        let text = std::fs::read_to_string(csv).expect("the file was just written");
        assert_eq!(text, "id,lat,lon,title\na,1,2,\"one, two\"\nc,5,6, x\n");

        let numbers = |first: f64| Arc::new(Float64Array::from(vec![first, first + 2.0, first + 4.0])) as _;
        let tags = vec![Some(vec![Some(1)]), None, Some(vec![Some(2), None])];
        let batch = RecordBatch::try_from_iter([
            ("lat", numbers(1.0)),
            ("lon", numbers(2.0)),
            ("title", Arc::new(StringArray::from(vec![Some("x"), None, Some("z")])) as _),
            ("tags", Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(tags)) as _),
        ]);
        let batch = batch.expect("the columns have equal lengths");
        let file = File::create(at("a.parquet")).expect("the folder is writable");
        let mut writer = ArrowWriter::try_new(file, batch.schema(), None).expect("the schema is valid");
        writer.write(&batch).expect("the batch fits the schema");
        writer.close().expect("the file is writable");
        let file = File::open(copied(folder.path(), "a.parquet")).expect("the file was just written");
        let mut copy = ParquetRecordBatchReaderBuilder::try_new(file).expect("valid").build().expect("valid");
        let copy = copy.next().expect("the copy has rows").expect("the copy can be read");
        assert_eq!((copy.slice(0, 1), copy.slice(1, 1), copy.num_rows()), (batch.slice(0, 1), batch.slice(2, 1), 2));

        let mut npy = b"\x93NUMPY\x01\x00\x46\x00".to_vec();
        npy.extend(format!("{:<69}\n", "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }").bytes());
        npy.extend([1_f32, 2.0, 3.0, 4.0, 5.0, 6.0].iter().flat_map(|number| number.to_le_bytes()));
        std::fs::write(at("a.npy"), npy).expect("the folder is writable");
        let places = read_places(&copied(folder.path(), "a.npy")).expect("the copy is valid");
        let places: Vec<_> = places.iter().map(|place| (place.latitude().0, place.longitude().0)).collect();
        assert_eq!(places, [(1.0, 2.0), (5.0, 6.0)]);
    }
}
