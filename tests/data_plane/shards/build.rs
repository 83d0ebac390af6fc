//! `shards build` copies the numbers of every kind of table and matrix unchanged into shards. An unusable row gives an
//! error that names the row, or is skipped.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, Float32Array, Float64Array, Int64Array, RecordBatch};
use half::f16;
use locdiff::shards::{Build, Coordinates, Dataset, Manifest, Mask, ShardsError, build, verify};
use locdiff_core::config::{OnBadRows, ShardsConfig};
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::tables::PlacesPresent;
use parquet::arrow::ArrowWriter;
use tch::{Kind, Tensor};

use crate::shards::read_back::{read_table, read_views};

const ROWS: usize = 5000;
const WIDTH: usize = 8;

fn value(row: usize, column: usize) -> f64 {
    f16::from_f64(((row * 31 + column * 7) % 1000) as f64 / 999.0 - 0.5).to_f64()
}

fn matrix(change: impl Fn(usize, usize, f64) -> f64) -> Vec<f64> {
    let cells = (0..ROWS).flat_map(|row| (0..WIDTH).map(move |column| (row, column)));
    cells.map(|(row, column)| change(row, column, value(row, column))).collect()
}

fn npy(path: &Path, values: &[f64]) {
    let values: Vec<f32> = values.iter().map(|value| *value as f32).collect();
    Tensor::from_slice(&values).view([-1, WIDTH as i64]).write_npy(path).expect("the file can be written");
}

fn latitude(row: usize) -> f64 {
    row as f64 / ROWS as f64 * 180.0 - 90.0
}

fn csv(path: &Path, id: bool, change: impl Fn(usize) -> Option<&'static str>) {
    let mut text = String::from(if id { "who,lon,lat\n" } else { "what,lon,lat\n" });
    for row in 0..ROWS {
        let line = change(row)
            .map_or_else(|| format!("row {row},{},{}", (row % 360) as f64 - 180.0, latitude(row)), str::to_owned);
        text.push_str(&line);
        text.push('\n');
    }
    std::fs::write(path, text).expect("the file can be written");
}

/// The latitude and longitude that must be read back for each of the [`ROWS`] rows.
fn table() -> impl Iterator<Item = (f64, f64)> {
    (0..ROWS).map(|row| (latitude(row), (row % 360) as f64 - 180.0))
}

fn view() -> Tensor {
    Tensor::from_slice(&matrix(|_, _, value| value)).view([-1, WIDTH as i64]).to_kind(Kind::Float)
}

struct Bench {
    scratch: tempfile::TempDir,
    config: ShardsConfig,
}

impl Bench {
    /// Makes a folder with a valid table (`t.csv`) and valid embeddings for the rows of this table (`a.npy`).
    fn new(on_bad_rows: OnBadRows) -> Self {
        let config = ShardsConfig { id_column: "who".into(), on_bad_rows, ..ShardsConfig::default() };
        let bench = Self { scratch: tempfile::tempdir().expect("a temporary folder can be created"), config };
        csv(&bench.path("t.csv"), true, |_| None);
        npy(&bench.path("a.npy"), &matrix(|_, _, value| value));
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn build(&self, table: &str, embeddings: &[&str], out: &str) -> Result<(Manifest, u64), ShardsError> {
        self.build_with(PlacesPresent::All, Some(table), embeddings, out)
    }

    fn build_with(
        &self,
        places: PlacesPresent,
        table: Option<&str>,
        embeddings: &[&str],
        out: &str,
    ) -> Result<(Manifest, u64), ShardsError> {
        let embeddings: Vec<PathBuf> = embeddings.iter().map(|name| self.path(name)).collect();
        let table = table.map(|table| self.path(table));
        let table = table.as_deref();
        let inputs = Build { table, places, embeddings: &embeddings, config: &self.config, overwrite: false };
        build(&inputs, &self.path(out))
    }

    /// Adds four tables and two matrices to the folder. Each table and each matrix has one bad row.
    fn add_bad_rows(&self) {
        csv(&self.path("91.csv"), true, |row| (row == 4321).then_some("x,0,91"));
        csv(&self.path("text.csv"), true, |row| (row == 7).then_some("x,east,1"));
        csv(&self.path("again.csv"), true, |row| (row == 4999).then_some("row 12,0,0"));
        csv(&self.path("ragged.csv"), true, |row| (row == 9).then_some("x,1"));
        let nan = matrix(|row, column, value| if (row, column) == (4999, 3) { f64::NAN } else { value });
        npy(&self.path("nan.npy"), &nan);
        npy(&self.path("big.npy"), &matrix(|row, _, value| if row == 2 { 65_520.0 } else { value }));
    }

    /// Adds the table as the Parquet file `t.parquet`, with integer identifiers and float32 longitudes.
    fn add_parquet(&self) {
        let columns: [(&str, ArrayRef); 3] = [
            ("who", Arc::new(Int64Array::from_iter_values(0..ROWS as i64))),
            ("lat", Arc::new(Float64Array::from_iter_values(table().map(|(latitude, _)| latitude)))),
            ("lon", Arc::new(Float32Array::from_iter_values(table().map(|(_, longitude)| longitude as f32)))),
        ];
        self.write_parquet("t.parquet", columns);
    }

    fn write_parquet<const N: usize>(&self, name: &str, columns: [(&str, ArrayRef); N]) {
        let batch = RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true)));
        let batch = batch.expect("the columns have equal lengths");
        let file = File::create(self.path(name)).expect("the file can be created");
        let mut writer = ArrowWriter::try_new(file, batch.schema(), None).expect("the schema is valid");
        writer.write(&batch).expect("the file can be written");
        writer.close().expect("the file can be written");
    }

    /// Asserts that a build fails with exit code `code` and a message that contains all `parts`, and that it leaves no
    /// folder.
    fn assert_refused(&self, table: &str, matrices: &[&str], code: ExitCode, parts: &[&str]) {
        let error = self.build(table, matrices, "never").expect_err(table);
        let text = error.to_string();
        assert!(
            error.exit_code() == code && parts.iter().all(|part| text.contains(part)),
            "{table} with {matrices:?} gave a wrong error: {text}"
        );
        assert!(!self.path("never").exists(), "{table}: the failed build left a folder");
    }
}

#[test]
fn built_shards_hold_the_input_rows() {
    let bench = Bench::new(OnBadRows::Error);
    let second = -Tensor::from_slice(&matrix(|_, _, value| value)).view([-1, WIDTH as i64]);
    let other = Tensor::zeros([3], (Kind::Float, tch::Device::Cpu));
    let half = [("anything", second.to_kind(Kind::Half))];
    Tensor::write_safetensors(&half, bench.path("b.safetensors")).expect("the file can be written");
    let named = [("embedding", second), ("other", other)];
    Tensor::write_safetensors(&named, bench.path("c.safetensors")).expect("the file can be written");
    let (manifest, skipped) =
        bench.build("t.csv", &["a.npy", "b.safetensors", "c.safetensors"], "out").expect("the inputs are valid");
    assert_eq!((manifest.rows, manifest.views, skipped), (ROWS as u64, 3, 0));
    let (views, want) = (read_views(&bench.path("out"), &manifest), view());
    assert!(views[0].equal(&want) && views[1].equal(&-&want) && views[2].equal(&-&want));
    let rows = read_table(&bench.path("out"), &manifest);
    let mut numbered = rows.iter().zip(table()).enumerate();
    let same = numbered.all(|(row, (got, want))| got.0 == format!("row {row}") && (got.1, got.2) == want);
    assert!(same && rows.len() == ROWS);
    let error = bench.build("t.csv", &["a.npy"], "out").expect_err("the folder already exists");
    assert_eq!(error.exit_code(), ExitCode::Exists);
}

#[test]
fn parquet_tables_and_tables_without_identifiers_are_read() {
    let bench = Bench::new(OnBadRows::Error);
    bench.add_parquet();
    csv(&bench.path("noid.csv"), false, |_| None);
    for (name, out) in [("t.parquet", "out2"), ("noid.csv", "out3")] {
        let (manifest, _) = bench.build(name, &["a.npy"], out).expect(name);
        let rows = read_table(&bench.path(out), &manifest);
        let mut numbered = rows.iter().zip(table()).enumerate();
        let same = numbered.all(|(row, (got, want))| got.0 == row.to_string() && (got.1, got.2) == want);
        assert!(same && rows.len() == ROWS, "{name}: the shards have wrong rows");
    }
}

/// Whether row `row` has coordinates in the tables of the next test.
fn is_placed(row: usize) -> bool {
    row % 4 != 1
}

#[test]
fn rows_may_lack_both_coordinates_if_asked_for() {
    let bench = Bench::new(OnBadRows::Error);
    csv(&bench.path("some.csv"), true, |row| (!is_placed(row)).then_some("gap x,,"));
    let text = std::fs::read_to_string(bench.path("some.csv")).expect("the file can be read");
    // Each line has another id.
    let numbered = text.lines().enumerate().map(|(line, text)| text.replace('x', &line.to_string()) + "\n");
    std::fs::write(bench.path("some.csv"), numbered.collect::<String>()).expect("the file can be written");
    // A null and NaN mean the same as an empty cell.
    let degrees = |degrees: fn((f64, f64)) -> f64, missing: Option<f64>| -> ArrayRef {
        let cells = table().enumerate().map(|(row, place)| if is_placed(row) { Some(degrees(place)) } else { missing });
        Arc::new(cells.collect::<Float64Array>())
    };
    bench.write_parquet(
        "some.parquet",
        [("lat", degrees(|place| place.0, None)), ("lon", degrees(|place| place.1, Some(f64::NAN)))],
    );
    for (name, out) in [("some.csv", "from-csv"), ("some.parquet", "from-parquet")] {
        let (manifest, _) = bench.build_with(PlacesPresent::Some, Some(name), &["a.npy"], out).expect(name);
        let rows = read_table(&bench.path(out), &manifest);
        assert_eq!(rows.len(), ROWS);
        for (row, (got, want)) in rows.iter().zip(table()).enumerate() {
            let is_right = if is_placed(row) { (got.1, got.2) == want } else { got.1.is_nan() && got.2.is_nan() };
            assert!(is_right, "{name}: row {row} has the coordinates {}, {}", got.1, got.2);
        }
        assert_eq!((manifest.schema_version, manifest.rows_with_coordinates), (2, Some(3750)));
    }
    let location = bench.path("from-csv").display().to_string();
    let stored = Dataset::open_with(Coordinates::Stored, &location, &bench.config).expect("the shards are valid");
    let (problems, mask) = verify(&stored, OnBadRows::Error).expect("the shards can be read");
    assert_eq!((problems.len(), mask.count()), (0, 0), "{problems:?}");
    let error = Dataset::open(&location, &bench.config).map(drop).expect_err("some rows have no coordinates");
    assert_eq!(error.exit_code(), ExitCode::BadData);
    let skips = ShardsConfig { on_bad_rows: OnBadRows::Skip, ..bench.config.clone() };
    let dataset = Dataset::open(&location, &skips).expect("the other rows have coordinates");
    let mask = Mask::for_config(&dataset, &skips).expect("the shards can be read");
    assert_eq!((mask.count(), mask.skipped(0)[..2].to_vec()), (1250, vec![1, 5]));

    for (line, part) in [("x,7,", "row 9: it has a longitude but no latitude"), ("x,,7", "it has a latitude but no")] {
        csv(&bench.path("half.csv"), true, |row| (row == 9).then_some(line));
        let error = bench.build_with(PlacesPresent::Some, Some("half.csv"), &["a.npy"], "never").expect_err(line);
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn embeddings_alone_make_shards_whose_ids_are_row_numbers() {
    let bench = Bench::new(OnBadRows::Error);
    let (manifest, _) = bench.build_with(PlacesPresent::None, None, &["a.npy"], "bare").expect("the matrix is valid");
    assert_eq!((manifest.schema_version, manifest.rows_with_coordinates), (2, Some(0)));
    let rows = read_table(&bench.path("bare"), &manifest);
    assert!(rows.len() == ROWS && rows.iter().enumerate().all(|(row, got)| got.0 == row.to_string()));
    assert!(read_views(&bench.path("bare"), &manifest)[0].equal(&view()));
    // The table has only ids.
    std::fs::write(bench.path("ids.csv"), (0..ROWS).fold("who\n".to_owned(), |text, row| format!("{text}p{row}\n")))
        .expect("the file can be written");
    let (manifest, _) = bench.build_with(PlacesPresent::None, Some("ids.csv"), &["a.npy"], "ids").expect("valid");
    assert_eq!(read_table(&bench.path("ids"), &manifest)[4321].0, "p4321");
    let location = bench.path("bare").display().to_string();
    let error = Dataset::open(&location, &bench.config).map(drop).expect_err("no row has coordinates").to_string();
    assert!(error.starts_with(&location) && error.contains("only `predict` can use them"), "{error}");
    let error = bench.build_with(PlacesPresent::All, None, &["a.npy"], "never").expect_err("there is no table");
    assert_eq!(error.exit_code(), ExitCode::Usage);
}

#[test]
fn alternative_column_names_are_found_and_other_names_refused() {
    let bench = Bench { config: ShardsConfig::default(), ..Bench::new(OnBadRows::Error) };
    let text = std::fs::read_to_string(bench.path("t.csv")).expect("the file can be read");
    std::fs::write(bench.path("names.csv"), text.replacen("who,lon,lat", "IMG_ID,Lng,Latitude", 1))
        .expect("the file can be written");
    let (manifest, _) = bench.build("names.csv", &["a.npy"], "out").expect("the inputs are valid");
    let rows = read_table(&bench.path("out"), &manifest);
    let mut numbered = rows.iter().zip(table()).enumerate();
    assert!(numbered.all(|(row, (got, want))| got.0 == format!("row {row}") && (got.1, got.2) == want));
    std::fs::write(bench.path("none.csv"), text.replacen("who,lon,lat", "who,lon,y", 1))
        .expect("the file can be written");
    let parts = ["none.csv: no column for latitude; found: who, lon, y; accepted: lat, latitude"];
    bench.assert_refused("none.csv", &["a.npy"], ExitCode::BadData, &parts);
}

#[test]
fn bad_input_is_named_and_leaves_no_folder() {
    let bench = Bench::new(OnBadRows::Error);
    bench.add_bad_rows();
    bench.add_parquet();
    std::fs::write(bench.path("short.csv"), "who,lat,lon\nx,1,2\n").expect("the file can be written");
    npy(&bench.path("few.npy"), &matrix(|_, _, value| value)[..80]);
    let two = [("x", view()), ("other", view())];
    Tensor::write_safetensors(&two, bench.path("two.safetensors")).expect("the file can be written");
    let bytes = std::fs::read(bench.path("a.npy")).expect("the file can be read");
    std::fs::write(bench.path("cut.npy"), &bytes[..bytes.len() - 1]).expect("the file can be written");
    let parquet = std::fs::read(bench.path("t.parquet")).expect("the file can be read");
    std::fs::write(bench.path("cut.parquet"), &parquet[..parquet.len() / 2]).expect("the file can be written");
    for (table, matrix, code, parts) in [
        ("91.csv", "a.npy", ExitCode::BadData, ["91.csv: row 4321", "latitude is 91, wanted -90 to 90"]),
        ("text.csv", "a.npy", ExitCode::BadData, ["text.csv: row 7", "`lon` is `east`"]),
        ("ragged.csv", "a.npy", ExitCode::BadData, ["ragged.csv: row 9", "2 field"]),
        ("again.csv", "a.npy", ExitCode::BadData, ["again.csv: row 4999", "\"row 12\", also in row 12"]),
        ("short.csv", "a.npy", ExitCode::BadData, ["short.csv: 1 rows", "a.npy has 5000"]),
        ("t.csv", "few.npy", ExitCode::BadData, ["t.csv: more than 10", "few.npy has 10"]),
        ("t.csv", "nan.npy", ExitCode::BadData, ["nan.npy: row 4999", "element 3 is NaN"]),
        ("t.csv", "big.npy", ExitCode::BadData, ["big.npy: row 2", "float16"]),
        ("t.csv", "two.safetensors", ExitCode::BadData, ["two.safetensors", "`embedding`"]),
        ("t.csv", "cut.npy", ExitCode::Corrupt, ["cut.npy", "cut short"]),
        ("cut.parquet", "a.npy", ExitCode::Corrupt, ["cut.parquet", ""]),
        ("t.csv", "t.csv", ExitCode::BadData, ["t.csv", ".safetensors"]),
        ("none.csv", "a.npy", ExitCode::Io, ["none.csv", ""]),
    ] {
        bench.assert_refused(table, &[matrix], code, &parts);
    }
    bench.assert_refused("t.csv", &["a.npy", "few.npy"], ExitCode::BadData, &["10 x 8 numbers, but"]);
}

#[test]
fn bad_rows_are_skipped_if_configured() {
    let bench = Bench::new(OnBadRows::Skip);
    bench.add_bad_rows();
    let want = view();
    for (table, matrix, row) in [("91.csv", "a.npy", 4321), ("ragged.csv", "a.npy", 9), ("t.csv", "big.npy", 2)] {
        let out = format!("skip-{table}");
        let (manifest, skipped) = bench.build(table, &[matrix], &out).expect(table);
        assert_eq!((manifest.rows, skipped), (ROWS as u64 - 1, 1), "{table}: wrong number of rows");
        let rows = read_table(&bench.path(&out), &manifest);
        assert_eq!(
            (rows[row - 1].1, rows[row].1),
            (latitude(row - 1), latitude(row + 1)),
            "{table}: wrong rows around the skipped row"
        );
        let got = read_views(&bench.path(&out), &manifest).remove(0);
        assert!(got.get(row as i64).equal(&want.get(row as i64 + 1)), "{table}: wrong embedding after the skipped row");
    }
}
