//! Tables with coordinates, CSV or Parquet, as people have them: galleries, truths, predictions.
//!
//! Columns are found by their usual names, in any case: `lat` or `latitude`; `lon`, `lng`, `long` or `longitude`; for ids the
//! first of `id`, `path`, `image`, `img_id` and `name` that is there. Other columns are ignored.
//!
//! Invariant: a table that was read has a place in every row, and an id in every row where it has a column of them. The first
//! row that has not is an error that names file and row, from 0, the header not counted. Nothing is left out, clamped or
//! wrapped.

mod error;
mod parquet_file;

pub use error::TableError;

use std::fs::File;
use std::path::Path;

use crate::geo::{Degrees, Place};

const LATITUDE: &[&str] = &["lat", "latitude"];
const LONGITUDE: &[&str] = &["lon", "lng", "long", "longitude"];
const ID: &[&str] = &["id", "path", "image", "img_id", "name"];

/// What was read.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    /// Names of the rows, where there is a column of them.
    pub ids: Option<Vec<String>>,
    /// The places, row by row.
    pub places: Vec<Place>,
}

/// Reads all of a table: `.parquet` (in any case) as Parquet, anything else as CSV. It has at least one row.
pub fn read(path: &Path) -> Result<Table, TableError> {
    let file = File::open(path).map_err(|error| TableError::Io { path: path.to_owned(), error })?;
    let is_parquet = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("parquet"));
    let table = if is_parquet { parquet_file::read(path, file)? } else { read_csv(path, file)? };
    if table.places.is_empty() {
        return Err(TableError::file(path, "has no rows"));
    }
    Ok(table)
}

/// Where the columns stand.
struct Columns {
    id: Option<usize>,
    latitude: usize,
    longitude: usize,
}

impl Columns {
    fn find(path: &Path, names: &[&str]) -> Result<Self, TableError> {
        let matching = |wanted: &str| -> Vec<usize> {
            let is_it = |name: &str| name.trim_start_matches('\u{feff}').trim().eq_ignore_ascii_case(wanted);
            names.iter().enumerate().filter(|(_, name)| is_it(name)).map(|(column, _)| column).collect()
        };
        let one = |known: &[&str]| {
            let found: Vec<usize> = known.iter().flat_map(|wanted| matching(wanted)).collect();
            match found[..] {
                [column] => Ok(column),
                [] => Err(TableError::file(path, format!("columns are {names:?}, wanted `{}` among them", known[0]))),
                _ => {
                    let reason = format!("columns are {names:?}: {} of them could be `{}`", found.len(), known[0]);
                    Err(TableError::file(path, format!("{reason}, wanted one")))
                }
            }
        };
        let id = ID.iter().flat_map(|wanted| matching(wanted)).next();
        Ok(Self { id, latitude: one(LATITUDE)?, longitude: one(LONGITUDE)? })
    }
}

fn read_csv(path: &Path, file: File) -> Result<Table, TableError> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(file);
    let header = reader.headers().map_err(|error| TableError::csv(path, None, &error))?.clone();
    let columns = Columns::find(path, &header.iter().collect::<Vec<_>>())?;
    let mut table = Table { ids: columns.id.map(|_| Vec::new()), places: Vec::new() };
    for (record, row) in reader.records().zip(0..) {
        let record = record.map_err(|error| TableError::csv(path, Some(row), &error))?;
        let number = |column: usize| {
            let text = &record[column];
            text.parse::<f64>()
                .map_err(|_| TableError::row(path, row, format!("`{}` is `{text}`, wanted a number", &header[column])))
        };
        let (latitude, longitude) = (number(columns.latitude)?, number(columns.longitude)?);
        table.places.push(place(latitude, longitude).map_err(|reason| TableError::row(path, row, reason))?);
        if let (Some(ids), Some(column)) = (&mut table.ids, columns.id) {
            ids.push(named(&record[column]).map_err(|reason| TableError::row(path, row, reason))?);
        }
    }
    Ok(table)
}

/// A name, which may not be empty.
fn named(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("its id is empty".to_owned()) } else { Ok(text.to_owned()) }
}

/// A place, or why these numbers are none.
fn place(latitude: f64, longitude: f64) -> Result<Place, String> {
    for (what, value, limit) in [("latitude", latitude, 90.0), ("longitude", longitude, 180.0)] {
        // NaN is nowhere.
        if !(-limit..=limit).contains(&value) {
            return Err(format!("{what} is {value}, wanted -{limit} to {limit}"));
        }
    }
    Place::new(Degrees(latitude), Degrees(longitude)).map_err(|error| error.to_string())
}
