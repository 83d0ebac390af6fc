//! Writes predictions as Parquet, CSV, GeoJSON or lines of JSON. Rows are written as they come, so memory does not grow
//! with their number.
//!
//! Places are rounded to eight digits (about a millimetre), like the answers of an evaluation, and radii to a metre.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{Float64Builder, ListBuilder, StringBuilder, StructBuilder};
use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Fields, Schema};
use parquet::arrow::ArrowWriter;
use serde_json::{Map, Value, json};

use crate::files::FileError;
use crate::protocol::{Alternative, PredictedRow};

/// Rows of a Parquet row group, which is kept in memory until it is whole.
const GROUP_ROWS: usize = 8192;
/// The extensions of files that can be written.
pub const EXTENSIONS: &str = ".parquet, .csv or .geojson";

/// The format of a file of predictions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerFormat {
    /// A Parquet file.
    Parquet,
    /// A CSV file. Lists are written as JSON.
    Csv,
    /// A GeoJSON file with one point per row.
    Geojson,
    /// One JSON object per line.
    Lines,
}

impl AnswerFormat {
    /// The format that the extension of `path` names, in upper or lower case.
    pub fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_ascii_lowercase().to_str()? {
            "parquet" => Some(Self::Parquet),
            "csv" => Some(Self::Csv),
            "geojson" => Some(Self::Geojson),
            _ => None,
        }
    }
}

/// A prediction as it is written.
#[derive(Debug, Clone, PartialEq)]
pub struct WrittenRow {
    /// The prediction.
    pub row: PredictedRow,
    /// The radii that hold the truth with 50 % and with 90 % probability, km. `None` without a calibration.
    pub radii_km: Option<[f64; 2]>,
}

/// How rows are written.
#[derive(Debug, Clone, Copy)]
pub struct RowStyle {
    format: AnswerFormat,
    with_samples: bool,
}

/// A row that is ready to be written.
#[derive(Debug)]
pub enum PreparedRow {
    /// The text of the row.
    Text(String),
    /// A row of a Parquet file.
    Values(WrittenRow),
}

impl RowStyle {
    /// Does the work on a row that does not depend on other rows. Several threads may prepare rows at the same time.
    pub fn prepare(self, row: WrittenRow) -> PreparedRow {
        PreparedRow::Text(match self.format {
            AnswerFormat::Parquet => return PreparedRow::Values(row),
            AnswerFormat::Csv => csv_line(&row, self.with_samples),
            AnswerFormat::Geojson => feature(&row, self.with_samples).to_string(),
            AnswerFormat::Lines => format!("{}\n", json_object(&row, self.with_samples)),
        })
    }
}

/// Writes predictions to a file or to a stream.
pub struct AnswerWriter {
    path: PathBuf,
    target: Sink,
    style: RowStyle,
    rows: u64,
}

enum Sink {
    Text(Box<dyn Write>),
    Parquet { writer: Box<ArrowWriter<File>>, waiting: Vec<WrittenRow> },
}

impl AnswerWriter {
    /// Creates the file `path`. Samples are written only if `with_samples` is true.
    pub fn create(path: &Path, format: AnswerFormat, with_samples: bool) -> Result<Self, FileError> {
        let file = File::create(path).map_err(FileError::at(path))?;
        let target = match format {
            AnswerFormat::Parquet => {
                let writer = ArrowWriter::try_new(file, schema(with_samples), None).map_err(failed(path))?;
                Sink::Parquet { writer: Box::new(writer), waiting: Vec::new() }
            }
            _ => Sink::Text(Box::new(BufWriter::new(file))),
        };
        Self { path: path.to_owned(), target, style: RowStyle { format, with_samples }, rows: 0 }.begun()
    }

    /// Writes one JSON object per line to `out`.
    pub fn lines(out: Box<dyn Write>, with_samples: bool) -> Self {
        let style = RowStyle { format: AnswerFormat::Lines, with_samples };
        Self { path: PathBuf::from("stdout"), target: Sink::Text(out), style, rows: 0 }
    }

    fn begun(mut self) -> Result<Self, FileError> {
        let samples = if self.style.with_samples { ",samples" } else { "" };
        match (&mut self.target, self.style.format) {
            (Sink::Text(out), AnswerFormat::Csv) => {
                writeln!(out, "id,lat,lon,radius_50_km,radius_90_km,weight,alternatives{samples}")
            }
            (Sink::Text(out), AnswerFormat::Geojson) => {
                writeln!(out, "{{\"type\":\"FeatureCollection\",\"features\":[")
            }
            _ => Ok(()),
        }
        .map_err(FileError::at(&self.path))?;
        Ok(self)
    }

    /// How this writer wants its rows.
    pub fn style(&self) -> RowStyle {
        self.style
    }

    /// Writes a row that was prepared in the style of this writer.
    pub fn write(&mut self, row: PreparedRow) -> Result<(), FileError> {
        let is_first = self.rows == 0;
        self.rows += 1;
        match (&mut self.target, row) {
            (Sink::Parquet { writer, waiting }, PreparedRow::Values(row)) => {
                waiting.push(row);
                if waiting.len() < GROUP_ROWS {
                    return Ok(());
                }
                write_group(writer, waiting, self.style.with_samples).map_err(failed(&self.path))
            }
            (Sink::Text(out), PreparedRow::Text(text)) => {
                let separator = if self.style.format == AnswerFormat::Geojson && !is_first { ",\n" } else { "" };
                let written = out.write_all(separator.as_bytes()).and_then(|()| out.write_all(text.as_bytes()));
                written.map_err(FileError::at(&self.path))
            }
            _ => {
                let error = std::io::Error::other("the row was prepared in another style: this is a bug");
                Err(FileError { path: self.path.clone(), error })
            }
        }
    }

    /// Writes what is left. Returns the number of rows.
    pub fn finish(self) -> Result<u64, FileError> {
        match self.target {
            Sink::Parquet { mut writer, mut waiting } => {
                write_group(&mut writer, &mut waiting, self.style.with_samples).map_err(failed(&self.path))?;
                writer.close().map_err(failed(&self.path))?;
            }
            Sink::Text(mut out) => {
                let end = if self.style.format == AnswerFormat::Geojson { "\n]}\n" } else { "" };
                out.write_all(end.as_bytes()).and_then(|()| out.flush()).map_err(FileError::at(&self.path))?;
            }
        }
        Ok(self.rows)
    }
}

fn failed(path: &Path) -> impl FnOnce(parquet::errors::ParquetError) -> FileError + '_ {
    move |error| FileError { path: path.to_owned(), error: std::io::Error::other(error) }
}

/// Degrees with eight digits after the point.
pub fn rounded(degrees: f64) -> f64 {
    (degrees * 1e8).round() / 1e8
}

/// Kilometres, to the metre.
fn metres(km: f64) -> f64 {
    (km * 1e3).round() / 1e3
}

fn alternatives(row: &PredictedRow) -> Value {
    let one = |alternative: &Alternative| {
        let [lat, lon] = alternative.place.map(rounded);
        json!({ "lat": lat, "lon": lon, "weight": alternative.weight })
    };
    row.alternatives.iter().map(one).collect()
}

fn samples(row: &PredictedRow) -> Value {
    row.samples.iter().map(|sample| json!(sample.map(rounded))).collect()
}

/// The values of a row besides its id and its place.
fn properties(WrittenRow { row, radii_km }: &WrittenRow, with_samples: bool) -> Map<String, Value> {
    let mut found = Map::new();
    let radius = |level: usize| radii_km.map_or(Value::Null, |radii| json!(metres(radii[level])));
    found.insert("radius_50_km".to_owned(), radius(0));
    found.insert("radius_90_km".to_owned(), radius(1));
    found.insert("weight".to_owned(), json!(row.weight));
    found.insert("alternatives".to_owned(), alternatives(row));
    if with_samples {
        found.insert("samples".to_owned(), samples(row));
    }
    found
}

/// A row as one JSON object. Samples are in it only if `with_samples` is true.
pub fn json_object(written: &WrittenRow, with_samples: bool) -> Value {
    let [lat, lon] = written.row.answer.map(rounded);
    let mut object = json!({ "id": written.row.id, "lat": lat, "lon": lon });
    if let Value::Object(fields) = &mut object {
        fields.extend(properties(written, with_samples));
    }
    object
}

/// A GeoJSON feature. GeoJSON has the longitude first (RFC 7946).
fn feature(written: &WrittenRow, with_samples: bool) -> Value {
    let [lat, lon] = written.row.answer.map(rounded);
    let mut fields = Map::new();
    fields.insert("id".to_owned(), json!(written.row.id));
    fields.extend(properties(written, with_samples));
    json!({ "type": "Feature", "geometry": { "type": "Point", "coordinates": [lon, lat] }, "properties": fields })
}

fn csv_line(written: &WrittenRow, with_samples: bool) -> String {
    let WrittenRow { row, radii_km } = written;
    let radius = |level: usize| radii_km.map_or_else(String::new, |radii| metres(radii[level]).to_string());
    let mut cells = vec![row.id.clone()];
    cells.extend(row.answer.map(|degrees| format!("{degrees:.8}")));
    cells.extend([radius(0), radius(1), row.weight.to_string(), alternatives(row).to_string()]);
    if with_samples {
        cells.push(samples(row).to_string());
    }
    let cells: Vec<String> = cells.iter().map(|cell| quoted(cell)).collect();
    cells.join(",") + "\n"
}

/// A CSV field, quoted if necessary.
pub fn quoted(text: &str) -> String {
    if text.contains(['"', ',', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
}

fn numbers(names: &[&str]) -> Fields {
    names.iter().map(|name| Field::new(*name, DataType::Float64, false)).collect()
}

const ALTERNATIVE_FIELDS: [&str; 3] = ["lat", "lon", "weight"];
const SAMPLE_FIELDS: [&str; 2] = ["lat", "lon"];

fn list(name: &str, fields: &[&str]) -> Field {
    Field::new(name, DataType::List(Arc::new(Field::new("item", DataType::Struct(numbers(fields)), false))), false)
}

fn schema(with_samples: bool) -> Arc<Schema> {
    let number = |name: &str, nullable: bool| Field::new(name, DataType::Float64, nullable);
    let mut fields = vec![Field::new("id", DataType::Utf8, false), number("lat", false), number("lon", false)];
    fields.extend([number("radius_50_km", true), number("radius_90_km", true), number("weight", false)]);
    fields.push(list("alternatives", &ALTERNATIVE_FIELDS));
    if with_samples {
        fields.push(list("samples", &SAMPLE_FIELDS));
    }
    Arc::new(Schema::new(fields))
}

/// A column of lists. Each list holds records of the numbers `fields`.
fn list_column<const N: usize>(fields: [&str; N], rows: impl Iterator<Item = Vec<[f64; N]>>) -> ArrayRef {
    let item = Field::new("item", DataType::Struct(numbers(&fields)), false);
    let mut lists = ListBuilder::new(StructBuilder::from_fields(numbers(&fields), 0)).with_field(item);
    for records in rows {
        for record in records {
            for (field, value) in record.into_iter().enumerate() {
                if let Some(builder) = lists.values().field_builder::<Float64Builder>(field) {
                    builder.append_value(value);
                }
            }
            lists.values().append(true);
        }
        lists.append(true);
    }
    Arc::new(lists.finish())
}

fn write_group(
    writer: &mut ArrowWriter<File>,
    waiting: &mut Vec<WrittenRow>,
    with_samples: bool,
) -> Result<(), parquet::errors::ParquetError> {
    let group = std::mem::take(waiting);
    if group.is_empty() {
        return Ok(());
    }
    let (mut ids, mut columns) = (StringBuilder::new(), [(); 5].map(|()| Float64Builder::new()));
    for WrittenRow { row, radii_km } in &group {
        ids.append_value(&row.id);
        let radius = |level: usize| radii_km.map(|radii| metres(radii[level]));
        let [lat, lon] = row.answer.map(rounded);
        let values = [Some(lat), Some(lon), radius(0), radius(1), Some(row.weight)];
        columns.iter_mut().zip(values).for_each(|(column, value)| column.append_option(value));
    }
    let mut arrays: Vec<ArrayRef> = vec![Arc::new(ids.finish())];
    arrays.extend(columns.iter_mut().map(|column| Arc::new(column.finish()) as ArrayRef));
    let alternative = |one: &Alternative| [rounded(one.place[0]), rounded(one.place[1]), one.weight];
    let of_row = |written: &WrittenRow| written.row.alternatives.iter().map(alternative).collect();
    arrays.push(list_column(ALTERNATIVE_FIELDS, group.iter().map(of_row)));
    if with_samples {
        let of_row = |written: &WrittenRow| written.row.samples.iter().map(|sample| sample.map(rounded)).collect();
        arrays.push(list_column(SAMPLE_FIELDS, group.iter().map(of_row)));
    }
    writer.write(&RecordBatch::try_new(schema(with_samples), arrays)?)?;
    writer.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::RowDensity;
    use crate::tables;

    fn row(index: u64, id: &str) -> WrittenRow {
        let alternatives = vec![Alternative { place: [1.5, -2.25], weight: 0.25 }];
        let row = PredictedRow {
            index,
            id: id.to_owned(),
            answer: [48.123_456_789_9, 2.5],
            spread_km: 1.0,
            weight: 0.75,
            alternatives,
            samples: vec![[1.0, 2.0], [3.0, 4.0]],
            truth: None,
            density: RowDensity::default(),
        };
        WrittenRow { row, radii_km: (index == 0).then_some([1.000_4, 20.0]) }
    }

    fn written(name: &str, with_samples: bool) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let path = folder.path().join(name);
        let format = AnswerFormat::of(&path).expect("the extension is known");
        let mut writer = AnswerWriter::create(&path, format, with_samples).expect("the folder is writable");
        let style = writer.style();
        for (index, id) in [(0, "a,b"), (1, "</script>\u{2028}")] {
            writer.write(style.prepare(row(index, id))).expect("the disk has room");
        }
        assert_eq!(writer.finish().expect("the disk has room"), 2);
        (folder, path)
    }

    #[test]
    fn csv_quotes_ids_and_leaves_unknown_radii_empty() {
        let (_folder, path) = written("out.csv", true);
        let text = std::fs::read_to_string(path).expect("the file was written");
        let lines: Vec<&str> = text.split('\n').collect();
        assert_eq!(lines[0], "id,lat,lon,radius_50_km,radius_90_km,weight,alternatives,samples");
        assert!(lines[1].starts_with("\"a,b\",48.12345679,2.50000000,1,20,0.75,\"[{\"\"lat\"\":1.5,"), "{}", lines[1]);
        assert!(lines[2].starts_with("</script>\u{2028},48.12345679,2.50000000,,,0.75,"), "{}", lines[2]);
    }

    #[test]
    fn geojson_is_valid_and_has_the_longitude_first() {
        let (_folder, path) = written("out.GeoJSON", false);
        let text = std::fs::read_to_string(path).expect("the file was written");
        let found: Value = serde_json::from_str(&text).expect("the file is valid JSON");
        let features = found["features"].as_array().expect("there is a list of features");
        assert_eq!(features.len(), 2);
        assert_eq!(features[0]["geometry"]["coordinates"], json!([2.5, 48.123_456_79]));
        assert_eq!(features[0]["properties"]["radius_90_km"], json!(20.0));
        assert_eq!(features[1]["properties"]["radius_90_km"], Value::Null);
        assert_eq!(features[1]["properties"].get("samples"), None);
    }

    #[test]
    fn parquet_can_be_read_as_a_table_of_places() {
        let (_folder, path) = written("out.parquet", true);
        let table = tables::read(&path).expect("the file is a table");
        assert_eq!(table.places.len(), 2);
        assert_eq!(table.places[0].latitude().0, 48.123_456_79);
        assert_eq!(table.ids.expect("the table has ids")[0], "a,b");
    }

    #[test]
    fn other_extensions_have_no_format() {
        assert_eq!(AnswerFormat::of(Path::new("a.txt")), None);
        assert_eq!(AnswerFormat::of(Path::new("parquet")), None);
    }
}
