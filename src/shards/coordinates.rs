//! Lists of places: a CSV with columns `lat` and `lon`, or an N x 2 `.npy`.
//!
//! Nothing is clamped or wrapped: the first row that is no place is an error that names it, from 0, the header not counted.

use std::path::Path;

use locdiff_core::geo::{Degrees, Place};

use super::checks;
use super::matrix::Matrix;
use super::{ShardsError, Spot};

/// Rows of a `.npy` that are read at once.
const PIECE_ROWS: u64 = 65_536;

/// A place, or why these numbers are none.
pub(super) fn place(latitude: f64, longitude: f64) -> Result<Place, String> {
    for (value, limit, what) in [(latitude, 90.0, "latitude"), (longitude, 180.0, "longitude")] {
        if !checks::is_within(value, limit) {
            return Err(checks::outside(value, limit, what));
        }
    }
    Place::new(Degrees(latitude), Degrees(longitude)).map_err(|error| error.to_string())
}

/// Reads all places of a file; there is at least one.
pub(super) fn read_coordinates(path: &Path) -> Result<Vec<Place>, ShardsError> {
    let is_npy = path.extension().is_some_and(|extension| extension == "npy");
    let places = if is_npy { read_npy(path)? } else { read_csv(path)? };
    if places.is_empty() {
        return Err(ShardsError::Bad { spot: Box::new(spot(path, None)), reason: "no places".to_owned() });
    }
    Ok(places)
}

fn spot(path: &Path, row: Option<u64>) -> Spot {
    Spot { file: path.display().to_string(), row_group: None, column: None, row }
}

fn read_npy(path: &Path) -> Result<Vec<Place>, ShardsError> {
    let mut matrix = Matrix::open(path)?;
    if matrix.width() != 2 {
        let reason = format!("{} x {} numbers, wanted N x 2: latitude, longitude", matrix.rows(), matrix.width());
        return Err(ShardsError::Bad { spot: Box::new(spot(path, None)), reason });
    }
    let mut places = Vec::new();
    for first in (0..matrix.rows()).step_by(PIECE_ROWS as usize) {
        let count = PIECE_ROWS.min(matrix.rows() - first) as usize;
        for (pair, row) in matrix.read_f64(first, count)?.chunks_exact(2).zip(first..) {
            let place = place(pair[0], pair[1]);
            places.push(place.map_err(|reason| ShardsError::Bad { spot: Box::new(spot(path, Some(row))), reason })?);
        }
    }
    Ok(places)
}

fn read_csv(path: &Path) -> Result<Vec<Place>, ShardsError> {
    let bad = |row, reason| ShardsError::Bad { spot: Box::new(spot(path, row)), reason };
    let mut reader = csv::ReaderBuilder::new()
        .trim(csv::Trim::All)
        .from_path(path)
        .map_err(|error| csv_error(path, None, &error))?;
    let header = reader.headers().map_err(|error| csv_error(path, None, &error))?.clone();
    let column = |names: [&str; 2]| {
        let found = header.iter().position(|name| names.iter().any(|wanted| name.eq_ignore_ascii_case(wanted)));
        found.ok_or_else(|| {
            let got: Vec<&str> = header.iter().collect();
            bad(None, format!("columns are {got:?}, wanted `{}` among them", names[0]))
        })
    };
    let (latitude, longitude) = (column(["lat", "latitude"])?, column(["lon", "longitude"])?);
    let mut places = Vec::new();
    for (record, row) in reader.records().zip(0..) {
        let record = record.map_err(|error| csv_error(path, Some(row), &error))?;
        let number = |column: usize| parse(&record[column]).map_err(|reason| bad(Some(row), reason));
        places.push(place(number(latitude)?, number(longitude)?).map_err(|reason| bad(Some(row), reason))?);
    }
    Ok(places)
}

/// A number, or what stands in its place.
pub(super) fn parse(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| format!("`{text}`, expected a number"))
}

/// The system's refusals apart from malformed text.
pub(super) fn csv_error(path: &Path, row: Option<u64>, error: &csv::Error) -> ShardsError {
    match error.kind() {
        csv::ErrorKind::Io(error) => ShardsError::io(path, std::io::Error::new(error.kind(), error.to_string())),
        _ => ShardsError::Bad { spot: Box::new(spot(path, row)), reason: error.to_string() },
    }
}
