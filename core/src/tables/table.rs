//! A whole table in memory.

use std::path::Path;

use super::error::TableError;
use super::names::ColumnNames;
use super::reader::TableReader;
use crate::geo::Place;

/// What was read: a place in every row, and, where ids were asked for and there is a column of them, an id in every row.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    /// Names of the rows, where there is a column of them.
    pub ids: Option<Vec<String>>,
    /// Columns of text that are none of ids, by name: one of them may hold ids after all.
    pub other_text: Vec<String>,
    /// The places, row by row.
    pub places: Vec<Place>,
}

/// Reads ids and places of a table. It has at least one row, and no id is empty.
pub fn read(path: &Path) -> Result<Table, TableError> {
    read_columns(path, true)
}

/// Reads the places of a table, such as a gallery: whether its rows have ids does not matter.
pub fn read_places(path: &Path) -> Result<Vec<Place>, TableError> {
    Ok(read_columns(path, false)?.places)
}

fn read_columns(path: &Path, with_ids: bool) -> Result<Table, TableError> {
    let mut reader = TableReader::open(path, ColumnNames::default(), with_ids)?;
    let (mut ids, mut places) = (Vec::new(), Vec::new());
    for (row, number) in reader.by_ref().zip(0..) {
        let row = row?;
        places.push(row.place);
        if row.id.as_ref().is_some_and(String::is_empty) {
            return Err(TableError::row(path, number, "its id is empty"));
        }
        ids.extend(row.id);
    }
    if places.is_empty() {
        return Err(TableError::file(path, "has no rows"));
    }
    Ok(Table { ids: reader.has_ids().then_some(ids), other_text: reader.other_text(), places })
}
