//! Tables with coordinates, CSV or Parquet, as people have them: galleries, truths, predictions.
//!
//! Columns are found by their usual names, in any case: `lat` or `latitude`; `lon`, `lng`, `long` or `longitude`; for ids the
//! first of [`ID_NAMES`] that is there. Other columns are ignored; those of text are named, for a column of ids may be among them.
//!
//! Invariant: a table that was read has a place in every row, and, where ids were asked for and it has a column of them, an id in
//! every row. The first row that has not is an error that names file and row, from 0, the header not counted. Nothing is left
//! out, clamped or wrapped.

mod error;
mod parquet_file;

pub use error::TableError;

use std::fs::File;
use std::path::Path;

use crate::geo::{Degrees, Place};

const LATITUDE: &[&str] = &["lat", "latitude"];
const LONGITUDE: &[&str] = &["lon", "lng", "long", "longitude"];

/// What a column of ids is called, the first that is there.
pub const ID_NAMES: &[&str] =
    &["id", "path", "image_id", "img_id", "image", "img", "filename", "file_name", "file", "name"];

/// What was read.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    /// Names of the rows, where there is a column of them.
    pub ids: Option<Vec<String>>,
    /// Columns of text that are none of ids, by name.
    pub other_text: Vec<String>,
    /// The places, row by row.
    pub places: Vec<Place>,
}

/// Reads ids and places of a table: `.parquet` (in any case) as Parquet, anything else as CSV. It has at least one row.
pub fn read(path: &Path) -> Result<Table, TableError> {
    read_columns(path, true)
}

/// Reads the places of a table, such as a gallery: what its rows are called, and whether they are called anything, does not matter.
pub fn read_places(path: &Path) -> Result<Vec<Place>, TableError> {
    Ok(read_columns(path, false)?.places)
}

fn read_columns(path: &Path, with_ids: bool) -> Result<Table, TableError> {
    let file = File::open(path).map_err(|error| TableError::Io { path: path.to_owned(), error })?;
    let is_parquet = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("parquet"));
    let table = if is_parquet { parquet_file::read(path, file, with_ids)? } else { read_csv(path, file, with_ids)? };
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
    fn find(path: &Path, names: &[&str], with_ids: bool) -> Result<Self, TableError> {
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
        let id = ID_NAMES.iter().filter(|_| with_ids).flat_map(|wanted| matching(wanted)).next();
        Ok(Self { id, latitude: one(LATITUDE)?, longitude: one(LONGITUDE)? })
    }

    /// Is it none of those that are read?
    fn is_other(&self, column: usize) -> bool {
        ![Some(self.latitude), Some(self.longitude), self.id].contains(&Some(column))
    }
}

fn read_csv(path: &Path, file: File, with_ids: bool) -> Result<Table, TableError> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(file);
    let header = reader.headers().map_err(|error| TableError::csv(path, None, &error))?.clone();
    let columns = Columns::find(path, &header.iter().collect::<Vec<_>>(), with_ids)?;
    let mut table = Table { ids: columns.id.map(|_| Vec::new()), other_text: Vec::new(), places: Vec::new() };
    let mut is_text = vec![false; header.len()];
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
        let is_word = |text: &str| !text.is_empty() && text.parse::<f64>().is_err();
        is_text.iter_mut().zip(&record).for_each(|(is_text, text)| *is_text |= is_word(text));
    }
    let other = (0..header.len()).filter(|column| is_text[*column] && columns.is_other(*column));
    table.other_text = other.map(|column| header[column].to_owned()).collect();
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
