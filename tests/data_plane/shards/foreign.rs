//! Parquet files that pyarrow, Polars and DuckDB have written give the same rows as shards that this program has
//! written. `tests/golden/shards/make_fixtures.py` made the files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::types::Float32Type;
use arrow_array::{ArrayRef, Float64Array, ListArray, RecordBatch, StringArray};
use locdiff::shards::{BlockRows, Blocks, Dataset};
use locdiff_core::config::ShardsConfig;
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::tables;
use parquet::arrow::ArrowWriter;

use crate::shards::support::{WIDTH, expected, problems, read_all, write};

fn golden(name: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/shards").join(name).display().to_string()
}

#[test]
fn files_of_every_engine_give_the_same_rows_as_our_shards() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let own = folder.path().join("own");
    let manifest = write(&own);
    let own = Dataset::open(&own.display().to_string(), &ShardsConfig::default()).expect("the shards are valid");
    let mut names: Vec<String> = std::fs::read_dir(golden(""))
        .expect("the folder exists")
        .map(|entry| entry.expect("the folder can be listed").file_name().into_string().expect("the name is UTF-8"))
        .filter(|name| name.ends_with(".parquet") && !name.starts_with("bad_"))
        .collect();
    names.sort();
    assert!(names.len() >= 12, "only {names:?} were found, wanted at least 12 files");
    for name in &names {
        let dataset = Dataset::open(&golden(name), &ShardsConfig::default())
            .unwrap_or_else(|error| panic!("{name} cannot be opened: {error}"));
        assert_eq!(
            (dataset.width(), dataset.views(), dataset.rows()),
            (WIDTH, 2, 64),
            "{name}: wrong width, views or rows"
        );
        for view in 0..2 {
            let got = read_all(&dataset, view).unwrap_or_else(|error| panic!("{name} cannot be read: {error}"));
            assert_eq!(got, expected(view as usize), "{name}: wrong rows in view {view}");
            assert_eq!(
                got,
                read_all(&own, view).expect("the blocks are valid"),
                "{name} and our shards differ in view {view}"
            );
        }
        let found = dataset.scan().expect("the blocks can be read").statistics;
        assert_eq!(found, manifest.statistics(), "{name}: scan and manifest differ");
        assert!(problems(&dataset).is_empty(), "{name}: verify found problems");
    }
}

#[test]
fn bad_rows_of_foreign_files_are_named_and_can_be_skipped() {
    let config = ShardsConfig::default();
    for (name, block, row, message) in [
        ("bad_null_list", 0, 5, "row group 0: column `embedding`: row 5: null, wanted a list of numbers"),
        ("bad_ragged_list", 0, 7, "row group 0: column `embedding`: row 7: a list of 3 numbers, wanted 8"),
        ("bad_null_number", 0, 9, "row group 0: column `embedding`: row 9: number 4 is null, wanted a number"),
        ("bad_beyond_float16", 0, 11, "row 11: number 2 is 70000, beyond float16's range of -65504 to 65504"),
        ("bad_latitude", 1, 6, "row group 1: column `lat`: row 6: latitude 91, wanted -90 to 90"),
    ] {
        let path = golden(&format!("{name}.parquet"));
        let dataset = Dataset::open(&path, &config).expect("the shards are valid");
        let error = read_all(&dataset, 0).expect_err(name);
        assert_eq!(error.exit_code(), ExitCode::BadData, "{name}: wrong exit code");
        assert!(
            error.to_string().contains(message) && error.to_string().starts_with(&path),
            "{name}: wrong error: {error}"
        );
        let problems = problems(&dataset);
        assert_eq!(problems.iter().map(|problem| problem.message.clone()).collect::<Vec<_>>(), [error.to_string()]);
        // A scan finds the bad row. If the row is skipped, `read_except` replaces its bad latitude or its whole bad
        // embedding by zeros and returns everything else unchanged.
        let scan = dataset.scan().expect("the blocks can be read");
        let found: Vec<(u32, u32)> = scan.bad_rows.iter().map(|bad| (bad.block, bad.row)).collect();
        assert_eq!(found, [(block, row)], "{name}: the scan found wrong rows");
        assert_eq!(scan.statistics.rows, 63, "{name}: the statistics include the bad row");
        assert_eq!(
            dataset.bad_rows(block).expect("the blocks can be read"),
            [row],
            "{name}: `bad_rows` found wrong rows"
        );
        let mut rows = BlockRows::default();
        dataset.read_except(block, 0, &[row + 1], &mut rows).expect_err("the bad row is not skipped");
        dataset.read_except(block, 0, &[row], &mut rows).expect("the bad row is skipped");
        let mut want = expected(0);
        let (first, at) = ((block * 24) as usize, row as usize);
        let mut want = BlockRows {
            latitudes: want.latitudes.split_off(first)[..rows.latitudes.len()].to_vec(),
            longitudes: want.longitudes.split_off(first)[..rows.longitudes.len()].to_vec(),
            embeddings: want.embeddings.split_off(first * WIDTH * 2)[..rows.embeddings.len()].to_vec(),
        };
        match name {
            "bad_latitude" => want.latitudes[at] = 0.0,
            _ => want.embeddings[at * WIDTH * 2..(at + 1) * WIDTH * 2].fill(0),
        }
        assert_eq!(rows, want, "{name}: wrong rows");
    }
    let error = Dataset::open(&golden("bad_no_rows.parquet"), &config).err().expect("a file without rows was accepted");
    assert_eq!(error.exit_code(), ExitCode::NoData);
    assert!(error.to_string().contains("files have no rows"), "wrong error: {error}");
}

#[test]
fn column_names_come_from_the_configuration() {
    let path = golden("pyarrow_f32_list_default.parquet");
    let named = ShardsConfig {
        embedding_column: "embedding_1".into(),
        latitude_column: "lon".into(),
        longitude_column: "lat".into(),
        ..ShardsConfig::default()
    };
    let dataset = Dataset::open(&path, &named).expect("the shards are valid");
    assert_eq!(dataset.views(), 1, "there is more than one view, although the file has no column embedding_1_1");
    let error = read_all(&dataset, 0).expect_err("longitudes are read as latitudes");
    assert!(error.to_string().contains("column `lon`: row 0: latitude -170"), "wrong error: {error}");
    for (config, message) in [
        (
            ShardsConfig { embedding_column: "clip".into(), ..ShardsConfig::default() },
            "column `clip`: not found; the file has id, lat, lon, embedding, embedding_1",
        ),
        (
            ShardsConfig { embedding_column: "lat".into(), ..ShardsConfig::default() },
            "column `lat`: is Float64, wanted a list of float16, float32 or float64",
        ),
        (
            ShardsConfig { latitude_column: "id".into(), ..ShardsConfig::default() },
            "column `id`: is Utf8, wanted a float, int32 or int64",
        ),
    ] {
        let error = Dataset::open(&path, &config).err().expect("the result is not an error");
        assert_eq!(error.exit_code(), ExitCode::BadData);
        assert!(error.to_string().contains(message), "wrong error: {error}");
    }
    // A glob opens many files as one data set.
    let many = Dataset::open(&golden("p*_f32_*.parquet"), &ShardsConfig::default()).expect("the glob is valid");
    assert!(many.file_count() >= 5 && many.rows() == 64 * many.file_count() as u64);
    let one = Dataset::open(&path, &ShardsConfig::default()).expect("the shards are valid");
    let again = Dataset::open(&path, &ShardsConfig::default()).expect("the shards are valid");
    assert_eq!(one.fingerprint(), again.fingerprint());
    assert_ne!(one.fingerprint(), many.fingerprint());
}

/// Writes a Parquet file with two rows. The columns in `texts` hold text, and those in `lists` hold embeddings. The
/// columns in `degrees`, at most three, hold latitudes, longitudes and other numbers, in this order.
fn write_named(path: &Path, texts: &[&str], degrees: &[&str], lists: &[&str]) {
    let text = || Arc::new(StringArray::from(vec!["a", "b"])) as ArrayRef;
    let values = [[47.0, -33.0], [8.0, 151.0], [1.0, 2.0]].map(|values| Arc::new(Float64Array::from(values.to_vec())));
    let embedding =
        ListArray::from_iter_primitive::<Float32Type, _, _>([[0.5, 1.0], [1.5, 2.0]].map(|row| Some(row.map(Some))));
    let texts = texts.iter().map(|name| (*name, text()));
    let degrees = degrees.iter().zip(values).map(|(name, values)| (*name, values as ArrayRef));
    let lists = lists.iter().map(|name| (*name, Arc::new(embedding.clone()) as ArrayRef));
    let batch = RecordBatch::try_from_iter(texts.chain(degrees).chain(lists)).expect("the columns have equal lengths");
    let file = std::fs::File::create(path).expect("the file can be created");
    let mut writer = ArrowWriter::try_new(file, batch.schema(), None).expect("the schema is valid");
    writer.write(&batch).expect("the file can be written");
    writer.close().expect("the file can be written");
}

#[test]
fn every_common_column_name_is_found_in_upper_and_lower_case() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let path = folder.path().join("foreign.parquet");
    let open = |config: &ShardsConfig| Dataset::open(&path.display().to_string(), config);
    let found = || open(&ShardsConfig::default()).expect("the columns are found").column_names();
    let lists = [tables::ID_NAMES, tables::LATITUDE_NAMES, tables::LONGITUDE_NAMES, tables::EMBEDDING_NAMES];
    let most = lists.iter().map(|names| names.len()).max().expect("there are lists");
    for number in 0..most {
        let lower = lists.map(|names| names[number % names.len()].to_owned());
        for names in [lower.clone(), lower.map(|name| name.to_uppercase())] {
            let [id, latitude, longitude, embedding] = names.each_ref().map(String::as_str);
            write_named(&path, &[id], &[latitude, longitude], &[embedding]);
            let want = [("embedding", embedding), ("id", id), ("latitude", latitude), ("longitude", longitude)];
            assert_eq!(found(), want.map(|(what, name)| (what.to_owned(), name.to_owned())).into());
        }
    }
    // If several columns have common names, the name that comes first in the list of common names is used. Columns of
    // the wrong type are skipped.
    write_named(&path, &["path", "clip", "image_id"], &["latitude", "long", "lng"], &["vector", "features", "file"]);
    let names: Vec<String> = found().into_values().collect();
    assert_eq!(names, ["features", "image_id", "latitude", "lng"]);
    let error = open(&ShardsConfig { embedding_column: "clap".into(), ..ShardsConfig::default() });
    let error = error.err().expect("a configured column that does not exist was accepted").to_string();
    assert!(error.contains("column `clap`: not found; the file has path, clip, image_id, latitude"), "{error}");
    write_named(&path, &["image_path"], &["lat", "lon"], &["numbers"]);
    let error = open(&ShardsConfig::default()).err().expect("no column holds embeddings");
    assert_eq!(error.exit_code(), ExitCode::BadData);
    let want = "no column for the embedding; found: image_path, lat, lon, numbers; name one in shards.embedding_column";
    assert!(error.to_string().ends_with(want), "{error}");
}

#[test]
fn common_names_of_coordinate_columns_are_found() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let path = folder.path().join("foreign.parquet");
    write_named(&path, &[], &["Latitude", "lng"], &["embedding"]);
    let location = path.display().to_string();
    let dataset = Dataset::open(&location, &ShardsConfig::default()).expect("the shards are valid");
    let mut rows = BlockRows::default();
    dataset.read(0, 0, &mut rows).expect("the blocks are valid");
    assert_eq!((rows.latitudes, rows.longitudes), (vec![47.0, -33.0], vec![8.0, 151.0]));
    let other = ShardsConfig { latitude_column: "northing".into(), ..ShardsConfig::default() };
    let error = Dataset::open(&location, &other)
        .err()
        .expect("another column was used instead of the configured one")
        .to_string();
    assert!(
        error.contains("column `northing`: not found; the file has Latitude, lng, embedding"),
        "wrong error: {error}"
    );
}
