//! Tests of the files that users provide: predictions, true places and gallery places. Valid files are read. For an
//! invalid file, the error names the file, the row and the reason.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::types::Int32Type;
use arrow_array::{
    ArrayRef, BooleanArray, DictionaryArray, Float32Array, Float64Array, Int64Array, RecordBatch, StringArray,
};
use locdiff_core::exit_code::HasExitCode;
use locdiff_core::geo::{Degrees, Place};
use locdiff_core::metrics::{Bootstrap, THRESHOLDS_KM};
use locdiff_core::predictions::{MatchedBy, Truth, score_predictions};
use locdiff_core::tables;
use parquet::arrow::ArrowWriter;

const FEW: Bootstrap = Bootstrap { seed: 1, resamples: 50 };
const TRUTH: &str = "path,lat,lon\na.jpg,10,20\nb.jpg,-5.5,179.9\nc.jpg,0,0\nd.jpg,48.8,2.3\ne.jpg,-90,0\n";

fn file(folder: &Path, name: &str, text: &[u8]) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).expect("the file can be written");
    path
}

fn parquet(folder: &Path, name: &str, columns: Vec<(&str, ArrayRef)>) -> PathBuf {
    let path = folder.join(name);
    let batch =
        RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, column)| (name, column, true)));
    let batch = batch.expect("the columns have equal lengths");
    let mut writer = ArrowWriter::try_new(File::create(&path).expect("the file can be created"), batch.schema(), None)
        .expect("a writer can be created");
    writer.write(&batch).expect("the file can be written");
    writer.close().expect("the file can be closed");
    path
}

#[test]
fn predictions_are_scored_in_any_order_and_format() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let truth = Truth::read(&file(scratch.path(), "truth.csv", TRUTH.as_bytes())).expect("the file is valid");
    // Prediction a is exact. Prediction b is 22 km off, across the date line. Prediction c is 111 km off. Prediction d
    // is the antipode of the true place. Prediction e has a wrong longitude but is exact, because its true place is the
    // south pole.
    let text = "\u{feff}ID,score,Longitude,LATITUDE\nb.jpg,1,-179.9,-5.5\na.jpg,1,20,10\ne.jpg,1,77,-90\nd.jpg,1,-177.7,-48.8\nc.jpg,1,0,1\n";
    let csv = file(scratch.path(), "mine.csv", text.as_bytes());
    let names: ArrayRef = Arc::new(StringArray::from(vec!["b.jpg", "a.jpg", "e.jpg", "d.jpg", "c.jpg"]));
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("path", names),
        ("lat", Arc::new(Float64Array::from(vec![-5.5, 10.0, -90.0, -48.8, 1.0]))),
        ("lng", Arc::new(Float64Array::from(vec![-179.9, 20.0, 77.0, -177.7, 0.0]))),
    ];
    let parquet = parquet(scratch.path(), "mine.parquet", columns);
    let ordered = file(scratch.path(), "ordered.csv", b"lat,lon\n10,20\n-5.5,-179.9\n1,0\n-48.8,-177.7\n-90,77\n");
    for (path, how) in [(&csv, MatchedBy::Id), (&parquet, MatchedBy::Id), (&ordered, MatchedBy::Order)] {
        let found = score_predictions(path, &truth, &THRESHOLDS_KM, &FEW).expect("the inputs are valid");
        let percent: Vec<f64> = found.rating.scores.within.iter().map(|within| within.percent.value).collect();
        assert_eq!((percent, found.matched_by), (vec![40.0, 60.0, 80.0, 80.0, 80.0], how), "{}", path.display());
        assert!((found.rating.scores.median_km.value - 22.1).abs() < 0.1, "{:?}", found.rating.scores.median_km);
        assert!(found.rating.density.is_some() && found.rating.coverage.is_some());
        let json = serde_json::to_value(&found.rating).expect("the value is JSON");
        assert_eq!((&json["rows"], &json["acc_25km"]), (&5.into(), &60.0.into()));
    }
}

#[test]
fn predictions_that_do_not_match_the_truth_are_refused() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let truth = Truth::read(&file(scratch.path(), "truth.csv", TRUTH.as_bytes())).expect("the file is valid");
    let rows = "id,lat,lon\na.jpg,1,1\nb.jpg,1,1\nc.jpg,1,1\nd.jpg,1,1\ne.jpg,1,1\n";
    let without = |row: &str| rows.replace(row, "");
    for (text, reason) in [
        (without("c.jpg,1,1\n"), "1 of 5 rows in"),
        ("id,lat,lon\na.jpg,1,1\n".to_owned(), "4 of 5 rows in"),
        (format!("{rows}x.jpg,1,1\n"), "1 of its 6 rows are not in"),
        (format!("{rows}b.jpg,1,1\n"), "rows 1 and 5 both have the id `b.jpg`"),
        (rows.replace("c.jpg,1", "c.jpg,nan"), "row 2: latitude is NaN, wanted -90 to 90"),
        (rows.replace("c.jpg,1,1", "c.jpg,1,"), "row 2: `lon` is ``, wanted a number"),
        (rows.replace("c.jpg,1,1", "c.jpg,1,east"), "row 2: `lon` is `east`, wanted a number"),
        (rows.replace("c.jpg,1,1", "c.jpg,1,181"), "row 2: longitude is 181, wanted -180 to 180"),
        (rows.replace("c.jpg,1,1", "c.jpg,-91,1"), "row 2: latitude is -91, wanted -90 to 90"),
        (rows.replace("c.jpg,1,1", "c.jpg,inf,1"), "row 2: latitude is inf"),
        (rows.replace("c.jpg,1,1", "c.jpg,1"), "row 2:"),
        (rows.replace("c.jpg,1,1", ",1,1"), "row 2: id is empty"),
        ("lat,lon\n1,1\n1,1\n".to_owned(), "2 rows without ids"),
        ("id,lat,lon\n".to_owned(), "has no rows"),
        (String::new(), "no column for latitude; found: none; accepted: lat, latitude"),
        ("id,x,lon\na.jpg,1,1\n".to_owned(), "no column for latitude; found: id, x, lon; accepted"),
        ("id,lat,latitude,lon\na.jpg,1,1,1\n".to_owned(), "2 columns could be `lat`, wanted one"),
    ] {
        let path = file(scratch.path(), "mine.csv", text.as_bytes());
        let error = score_predictions(&path, &truth, &THRESHOLDS_KM, &FEW).expect_err("the input is invalid");
        assert!(error.to_string().contains(reason) && error.to_string().contains("mine.csv"), "{reason}: {error}");
        assert_eq!(error.exit_code().code(), 20, "{error}");
    }
    let error = score_predictions(&scratch.path().join("none.csv"), &truth, &THRESHOLDS_KM, &FEW)
        .expect_err("the input is invalid");
    assert_eq!(error.exit_code().code(), 16, "{error}");
    let path = file(scratch.path(), "text.csv", b"id,lat,lon\n\xff\xfe,1,1\n");
    assert!(score_predictions(&path, &truth, &THRESHOLDS_KM, &FEW).is_err(), "invalid UTF-8 was accepted");
}

#[test]
fn invalid_truth_files_are_refused() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let refusal = |text: &str| {
        let error = Truth::read(&file(scratch.path(), "truth.csv", text.as_bytes())).expect_err("the input is invalid");
        (error.exit_code().code(), error.to_string())
    };
    assert!(refusal("lat,lon\n1,1\n").1.contains("no id column; accepted names: id, image_id"));
    assert!(refusal("path,lat,lon\na,1,1\na,2,2\n").1.contains("rows 0 and 1 both have the id `a`"));
    let (code, text) = refusal("path,lat,lon\n");
    assert!(code == 20 && text.contains("has no rows"), "{code}: {text}");
}

#[test]
fn tables_are_read_in_common_variants() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let place =
        |latitude, longitude| Place::new(Degrees(latitude), Degrees(longitude)).expect("the coordinates are valid");
    let want = [place(37.09024, -95.712891), place(-90.0, -180.0)];
    // The first text has the header of GeoCLIP's gallery, the second has spaces and Windows line endings.
    for text in ["LAT,LON\n37.09024,-95.712891\n-90,180\n", " Lat , Long \r\n37.09024, -95.712891\r\n-90,180\r\n"] {
        let table = tables::read(&file(scratch.path(), "gallery.csv", text.as_bytes())).expect("the file is valid");
        assert_eq!((table.places, table.ids), (want.to_vec(), None));
    }
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("id", Arc::new(Int64Array::from(vec![7, 8]))),
        ("LAT", Arc::new(Float32Array::from(vec![12.5, -90.0]))),
        ("LON", Arc::new(Float32Array::from(vec![-0.25, 0.0]))),
    ];
    let table = tables::read(&parquet(scratch.path(), "gallery.PARQUET", columns)).expect("the file is valid");
    assert_eq!(table.ids.expect("the table has an id column"), ["7", "8"]);
    assert_eq!(table.places[0], place(12.5, -0.25));
}

#[test]
fn dictionary_ids_are_read_and_galleries_need_no_ids() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let coordinates = || -> ArrayRef { Arc::new(Float64Array::from(vec![1.0, 2.0])) };
    let columns = |ids: ArrayRef| vec![("name", ids), ("lat", coordinates()), ("lon", coordinates())];
    let dictionary: DictionaryArray<Int32Type> = ["b.jpg", "a.jpg"].into_iter().collect();
    let path = parquet(scratch.path(), "dictionary.parquet", columns(Arc::new(dictionary)));
    assert_eq!(
        tables::read(&path).expect("the file is valid").ids.expect("the table has an id column"),
        ["b.jpg", "a.jpg"]
    );
    let nulls: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), None]));
    let booleans: ArrayRef = Arc::new(BooleanArray::from(vec![true, false]));
    for (name, ids) in [("nulls.parquet", nulls), ("booleans.parquet", booleans)] {
        let path = parquet(scratch.path(), name, columns(ids));
        assert!(tables::read(&path).is_err(), "{name}: invalid ids were accepted");
        assert_eq!(tables::read_places(&path).expect("the table has valid places").len(), 2, "{name}");
    }
    let path = file(scratch.path(), "gallery.csv", b"id,lat,lon\n,1,2\n,3,4\n");
    assert!(tables::read(&path).is_err() && tables::read_places(&path).expect("the table has valid places").len() == 2);
}

#[test]
fn unknown_text_column_is_refused_instead_of_matching_by_order() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let truth =
        Truth::read(&file(scratch.path(), "truth.csv", b"id,lat,lon\na,1,2\nb,3,4\n")).expect("the file is valid");
    let numbers = || -> ArrayRef { Arc::new(Float64Array::from(vec![1.0, 2.0])) };
    let names: ArrayRef = Arc::new(StringArray::from(vec!["b", "a"]));
    let columns = vec![("lat", numbers()), ("photograph", names), ("lon", numbers()), ("score", numbers())];
    let wrong = [
        file(scratch.path(), "mine.csv", b"photograph,lat,lon,score\nb,1,2,0.5\na,3,4,0.5\n"),
        parquet(scratch.path(), "mine.parquet", columns),
    ];
    for path in wrong {
        let error = score_predictions(&path, &truth, &THRESHOLDS_KM, &FEW).expect_err("the input is invalid");
        let text = error.to_string();
        assert!(error.exit_code().code() == 20 && text.contains("text columns (`photograph`)"), "{text}");
        assert!(text.contains("filename") && text.contains("mine."), "{text}");
    }
    let path = file(scratch.path(), "numbers.csv", b"score,lat,lon\n0.5,1,2\n,3,4\n");
    let found = score_predictions(&path, &truth, &THRESHOLDS_KM, &FEW).expect("the inputs are valid");
    assert_eq!(found.matched_by, MatchedBy::Order);
}

#[test]
fn malformed_parquet_tables_are_refused() {
    let scratch = tempfile::tempdir().expect("a temporary folder can be created");
    let floats = |values: Vec<Option<f64>>| -> ArrayRef { Arc::new(Float64Array::from(values)) };
    let (good, ids): (ArrayRef, ArrayRef) =
        (floats(vec![Some(1.0); 2]), Arc::new(StringArray::from(vec![Some("a"), None])));
    let cases: [(Vec<(&str, ArrayRef)>, &str); 5] = [
        (vec![("lat", floats(vec![Some(1.0), None])), ("lon", good.clone())], "row 1: `lat` is null"),
        (vec![("lat", floats(vec![Some(1.0), Some(f64::NAN)])), ("lon", good.clone())], "row 1: latitude is NaN"),
        (vec![("lat", Arc::new(Int64Array::from(vec![1, 2]))), ("lon", good.clone())], "column `lat` is Int64"),
        (vec![("lat", good.clone()), ("lon", good.clone()), ("id", ids)], "row 1: `id` is null"),
        (vec![("lat", good.clone())], "no column for longitude; found: lat; accepted: lon, lng, long, longitude"),
    ];
    for (columns, reason) in cases {
        let path = parquet(scratch.path(), "gallery.parquet", columns);
        let error = tables::read(&path).expect_err("the input is invalid");
        assert!(error.to_string().contains(reason) && error.exit_code().code() == 20, "{reason}: {error}");
    }
    let columns = vec![("lat", good.clone()), ("lon", good)];
    let whole = std::fs::read(parquet(scratch.path(), "gallery.parquet", columns)).expect("the file is valid");
    for cut in [0, 3, whole.len() / 2, whole.len() - 1] {
        let error =
            tables::read(&file(scratch.path(), "cut.parquet", &whole[..cut])).expect_err("the file is truncated");
        assert_eq!(error.exit_code().code(), 22, "{error}");
    }
}
