//! Reads shards only with the `parquet` crate, without the reader that is tested.

use std::fs::File;
use std::path::Path;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float16Type, Float64Type};
use arrow_array::{Array, RecordBatch};
use locdiff::shards::Manifest;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use tch::{Kind, Tensor};

fn batches(folder: &Path, manifest: &Manifest) -> Vec<RecordBatch> {
    let files =
        manifest.files.iter().map(|file| File::open(folder.join(&file.name)).expect("the manifest lists the file"));
    files
        .flat_map(|file| {
            ParquetRecordBatchReaderBuilder::try_new(file)
                .expect("the file is Parquet")
                .build()
                .expect("the file can be read")
        })
        .map(|batch| batch.expect("the file can be read"))
        .collect()
}

/// The embeddings of each view as an f32 matrix with one row per photo.
pub(crate) fn read_views(folder: &Path, manifest: &Manifest) -> Vec<Tensor> {
    let batches = batches(folder, manifest);
    let read = |view: u32| {
        let name = if view == 0 { "embedding".to_owned() } else { format!("embedding_{view}") };
        let mut values = Vec::new();
        for batch in &batches {
            let list = batch.column_by_name(&name).expect("each view has a column").as_fixed_size_list();
            values.extend(list.values().as_primitive::<Float16Type>().values().iter().map(|value| value.to_f32()));
        }
        Tensor::from_slice(&values).view([-1, manifest.width.into()]).to_kind(Kind::Float)
    };
    (0..manifest.views).map(read).collect()
}

/// The identifier, the latitude and the longitude of each row. NaN stands for a null or a missing column.
pub(crate) fn read_table(folder: &Path, manifest: &Manifest) -> Vec<(String, f64, f64)> {
    let mut rows = Vec::new();
    for batch in batches(folder, manifest) {
        let id = batch.column_by_name("id").expect("the file has this column").as_string::<i32>();
        for row in 0..batch.num_rows() {
            let number = |name: &str| {
                let column = batch.column_by_name(name).filter(|column| !column.is_null(row));
                column.map_or(f64::NAN, |column| column.as_primitive::<Float64Type>().value(row))
            };
            rows.push((id.value(row).to_owned(), number("lat"), number("lon")));
        }
    }
    rows
}
