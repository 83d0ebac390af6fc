//! Tests of the rows that inference locates: their division into blocks, their identifiers and their true places.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow_array::builder::{FixedSizeListBuilder, Float32Builder};
use arrow_array::{ArrayRef, Float64Array, RecordBatch, StringArray};
use locdiff::eval::truth::TruthFile;
use locdiff::infer::{BLOCK_IMAGES, Image, ImageBlock, ImageRows, InferError, block_images};
use locdiff::shards::{Dataset, Mask};
use locdiff_core::config::{OnBadRows, RunConfig};
use locdiff_core::exit_code::HasExitCode;
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use tch::Device;

fn latitude(image: &Image) -> f64 {
    image.true_place().expect("the row has coordinates").latitude().0
}

/// Writes a file with one row for each identifier. Row number `row` is at latitude `row % 80 + 1` and longitude
/// `row % 80 + 4`.
fn write(path: &Path, ids: Vec<Option<&str>>) {
    let mut embeddings = FixedSizeListBuilder::new(Float32Builder::new(), 2);
    let rows = 0..ids.len();
    for row in rows.clone() {
        embeddings.values().append_slice(&[row as f32, 1.0]);
        embeddings.append(true);
    }
    let degrees = |from: f64| rows.clone().map(|row| (row % 80) as f64 + from).collect::<Vec<_>>();
    let columns: [(&str, ArrayRef); 4] = [
        ("id", Arc::new(StringArray::from(ids))),
        ("lat", Arc::new(Float64Array::from(degrees(1.0)))),
        ("lon", Arc::new(Float64Array::from(degrees(4.0)))),
        ("embedding", Arc::new(embeddings.finish())),
    ];
    let batch = RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true)));
    let batch = batch.expect("the columns have equal lengths");
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(50)).build();
    let file = File::create(path).expect("the file can be created");
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).expect("a writer can be created");
    writer.write(&batch).expect("the file can be written");
    writer.close().expect("the file can be closed");
}

fn ids(rows: &ImageRows) -> Result<Vec<(u64, String)>, InferError> {
    let mut found = Vec::new();
    for block in rows.blocks(rows.share(0, 1)) {
        found.extend(block?.images.into_iter().map(|image| (image.row, image.id)));
    }
    Ok(found)
}

#[test]
fn row_without_an_id_is_refused_or_skipped() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let path = scratch.path().join("rows.parquet");
    write(&path, vec![Some("a"), None, Some("c")]);
    let location = path.display().to_string();
    let mut config = RunConfig::default();
    let error =
        ids(&ImageRows::open(&location, &config).expect("the data can be opened")).expect_err("the input is invalid");
    let text = error.to_string();
    assert!(error.exit_code().code() == 20 && text.contains("rows.parquet") && text.contains("row 1"), "{text}");
    assert!(text.contains("is null") && text.contains("shards.id_column"), "{text}");

    config.shards.on_bad_rows = OnBadRows::Skip;
    let rows = ImageRows::open(&location, &config).expect("the data can be opened");
    assert_eq!((rows.count, rows.mask.count()), (2, 1));
    assert_eq!(ids(&rows).expect("the file is valid"), [(0, "a".to_owned()), (2, "c".to_owned())]);

    // The error suggests setting `id_column` to a name that no column has. Rows are then identified by their index.
    config.shards.on_bad_rows = OnBadRows::Error;
    config.shards.id_column = "nowhere".to_owned();
    let found = ids(&ImageRows::open(&location, &config).expect("the data can be opened")).expect("the file is valid");
    assert_eq!(found, [(0, "0".to_owned()), (1, "1".to_owned()), (2, "2".to_owned())]);
}

#[test]
fn truth_applies_only_to_the_test_rows_and_must_match_them() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let path = scratch.path().join("rows.parquet");
    write(&path, vec![Some("a"), Some("b"), Some("c")]);
    let truth = scratch.path().join("truth.csv");
    std::fs::write(&truth, "id,lat,lon\nc,7,7\nb,7,7\na,7,7\nd,7,7\n").expect("the file can be written");
    let location = path.display().to_string();
    let mut config = RunConfig::default();
    config.eval.truth = truth.display().to_string();
    let rows = ImageRows::open(&location, &config).expect("the data can be opened");
    assert!(TruthFile::open(&location, &rows, &config).expect("these rows need no truth file").is_none());
    config.shards.test = location.clone();
    let error = TruthFile::open(&location, &rows, &config).expect_err("the input is invalid");
    assert!(error.exit_code().code() == 20 && error.to_string().contains("1 of its 4 rows are not in"), "{error}");

    let mut block = rows.blocks(rows.share(0, 1)).next().expect("the data has rows").expect("the file is valid");
    assert_eq!(latitude(&block.images[0]), 1.0);
    std::fs::write(&truth, "id,lat,lon\nc,7,7\nb,8,8\na,9,9\n").expect("the file can be written");
    let truth_file = TruthFile::open(&location, &rows, &config)
        .expect("the truth file matches the rows")
        .expect("`eval.truth` is set");
    truth_file.apply(&mut block).expect("the truth file has every row");
    assert_eq!(block.images.iter().map(latitude).collect::<Vec<_>>(), [9.0, 8.0, 7.0]);
    std::fs::write(&truth, "id,lat,lon\nc,7,7\nb,8,8\n").expect("the file can be written");
    let truth_file = TruthFile::open(&location, &rows, &config)
        .expect("every row of the truth file is in the data")
        .expect("`eval.truth` is set");
    let error = truth_file.apply(&mut block).expect_err("a row is missing");
    assert!(error.exit_code().code() == 20 && error.to_string().contains("no row \"a\""), "{error}");
}

#[test]
fn blocks_do_not_depend_on_the_number_of_workers() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let path = scratch.path().join("rows.parquet");
    let names: Vec<String> = (0..200).map(|row| format!("photo-{row}")).collect();
    // Row 70 has no identifier, so it is skipped.
    write(&path, names.iter().enumerate().map(|(row, name)| (row != 70).then_some(name.as_str())).collect());
    let location = path.display().to_string();
    let mut config = RunConfig::default();
    config.shards.on_bad_rows = OnBadRows::Skip;
    let rows = ImageRows::open(&location, &config).expect("the data can be opened");
    let read_all = |rows: &ImageRows, world: u32| -> Vec<ImageBlock> {
        let shares = (0..world).map(|rank| rows.share(rank, world));
        shares
            .flat_map(|share| rows.blocks(share).map(|block| block.expect("the file is valid")).collect::<Vec<_>>())
            .collect()
    };
    let blocks = read_all(&rows, 1);
    let sizes: Vec<_> = blocks.iter().map(|block| (block.first, block.images.len())).collect();
    assert_eq!(sizes, [(0, 64), (64, 64), (128, 64), (192, 7)]);
    for world in 2..7 {
        assert_eq!(read_all(&rows, world), blocks, "{world} workers and one worker read different blocks");
        assert!(rows.share(0, world).contains(&0), "rank 0 of {world} workers did not get the first block");
    }
    let numbers: Vec<u64> = blocks.iter().flat_map(|block| &block.images).map(|image| image.row).collect();
    assert_eq!(numbers, (0..200).filter(|row| *row != 70).collect::<Vec<u64>>());
    assert_eq!(blocks[3].embeddings(Device::Cpu).expect("the last block is padded").size(), [BLOCK_IMAGES as i64, 2]);

    // `ImageRows::first` takes the first 130 rows and identifies them by their numbers.
    let dataset = Dataset::open(&location, &config.shards).expect("the data can be opened");
    let first = ImageRows::first(130, dataset, Mask::none());
    let found = read_all(&first, 3);
    let named: Vec<_> =
        found.iter().flat_map(|block| &block.images).map(|image| (image.row, image.id.clone())).collect();
    assert_eq!((first.count, found.len()), (130, 3));
    assert_eq!(named, (0..130).map(|row| (row, row.to_string())).collect::<Vec<_>>());
}

#[test]
fn blocks_on_a_gpu_have_at_most_4096_chains() {
    let sizes = [1, 16, 17, 64, 4096].map(|samples| block_images(tch::Device::Cuda(0), samples));
    assert_eq!(sizes, [256, 256, 240, 64, 1]);
    assert_eq!(block_images(tch::Device::Cpu, 64), BLOCK_IMAGES);
}
