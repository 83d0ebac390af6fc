//! Tables of identifiers and coordinates: the same column names are accepted in every file format.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, Float64Array, RecordBatch, StringArray};
use locdiff_core::exit_code::HasExitCode;
use locdiff_core::geo::{Degrees, Place};
use locdiff_core::tables::{self, ColumnNames, ID_NAMES, LATITUDE_NAMES, LONGITUDE_NAMES, TableReader};
use parquet::arrow::ArrowWriter;
use tch::Tensor;

fn places() -> Vec<Place> {
    let place =
        |latitude, longitude| Place::new(Degrees(latitude), Degrees(longitude)).expect("the coordinates are valid");
    vec![place(10.5, -20.25), place(-33.75, 151.5)]
}

fn csv(folder: &Path, names: [&str; 3]) -> PathBuf {
    let path = folder.join("t.csv");
    std::fs::write(&path, format!("{},{},{}\na,10.5,-20.25\nb,-33.75,151.5\n", names[0], names[1], names[2]))
        .expect("the file can be written");
    path
}

fn parquet(folder: &Path, names: [&str; 3]) -> PathBuf {
    let columns: [(&str, ArrayRef); 3] = [
        (names[0], Arc::new(StringArray::from(vec!["a", "b"]))),
        (names[1], Arc::new(Float64Array::from(vec![10.5, -33.75]))),
        (names[2], Arc::new(Float64Array::from(vec![-20.25, 151.5]))),
    ];
    let batch = RecordBatch::try_from_iter(columns).expect("the columns have equal lengths");
    let path = folder.join("t.parquet");
    let mut writer = ArrowWriter::try_new(File::create(&path).expect("the file can be created"), batch.schema(), None)
        .expect("the schema is valid");
    writer.write(&batch).expect("the file can be written");
    writer.close().expect("the file can be written");
    path
}

#[test]
fn every_accepted_column_name_is_found_in_every_file_format() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let most = ID_NAMES.len().max(LATITUDE_NAMES.len()).max(LONGITUDE_NAMES.len());
    for number in 0..most {
        let nth = |names: &[&'static str]| names[number % names.len()];
        let lower = [ID_NAMES, LATITUDE_NAMES, LONGITUDE_NAMES].map(nth);
        let upper = lower.map(str::to_uppercase);
        for names in [lower, std::array::from_fn(|column| upper[column].as_str())] {
            for path in [csv(scratch.path(), names), parquet(scratch.path(), names)] {
                let table =
                    tables::read(&path).unwrap_or_else(|error| panic!("the columns {names:?} were not found: {error}"));
                assert_eq!(
                    table.ids.as_deref(),
                    Some(&["a".to_owned(), "b".to_owned()][..]),
                    "wrong identifiers with the columns {names:?}"
                );
                assert_eq!(
                    (&table.places, tables::read_places(&path).expect("the coordinates are valid")),
                    (&places(), places())
                );
            }
        }
    }
    let npy = scratch.path().join("t.NPY");
    Tensor::from_slice(&[10.5_f64, -20.25, -33.75, 151.5])
        .view([2, 2])
        .write_npy(&npy)
        .expect("the file can be written");
    let table = tables::read(&npy).expect("the table is valid");
    assert_eq!((table.ids, table.places), (None, places()));
}

#[test]
fn readme_lists_the_accepted_column_names() {
    let readme =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).expect("the file can be read");
    let columns = [("id", ID_NAMES), ("latitude", LATITUDE_NAMES), ("longitude", LONGITUDE_NAMES)];
    for (column, names) in columns.into_iter().chain([("embedding", tables::EMBEDDING_NAMES)]) {
        let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        let line = format!("| {column} | {} |", names.join(", "));
        assert!(readme.contains(&line), "README.md lacks: {line}");
    }
}

#[test]
fn explicit_column_name_overrides_the_accepted_names() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let path = scratch.path().join("t.csv");
    std::fs::write(&path, "id,who,lat,latitude,north,lon\na,b,1,2,3,4\n").expect("the file can be written");
    let open = |id, latitude| {
        let names = ColumnNames { id: Some(id), latitude: Some(latitude), longitude: Some("lon") };
        let mut reader = TableReader::open(&path, names, true)?;
        let row = reader.next().expect("the table has a row").expect("the row is valid");
        Ok::<_, tables::TableError>((row.id, row.place.expect("the row has coordinates").latitude().0))
    };
    assert_eq!(open("id", "lat").expect("the table is valid"), (Some("a".to_owned()), 1.0));
    assert_eq!(open("who", "north").expect("the table is valid"), (Some("b".to_owned()), 3.0));
    assert_eq!(open("nobody", "latitude").expect("the table is valid"), (None, 2.0));
    let error = open("id", "south").expect_err("the table has no column `south`");
    let text = error.to_string();
    assert!(
        text.contains("no column `south` for latitude; found: id, who, lat, latitude, north, lon"),
        "wrong error: {text}"
    );
    assert_eq!(error.exit_code().code(), 20);
    let error = tables::read(&path).expect_err("two columns match").to_string();
    assert!(error.contains("2 columns could be `lat`, wanted one"), "wrong error: {error}");
}
