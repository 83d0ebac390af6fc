//! Reads a whole table into memory.

use std::path::Path;

use super::error::TableError;
use super::names::ColumnNames;
use super::reader::TableReader;
use crate::geo::Place;

/// A table in memory: the places of all rows, and their ids if ids were requested and the table has an id column.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    /// The id of each row; `None` if ids were not requested or the table has no id column.
    pub ids: Option<Vec<String>>,
    /// Names of the text columns that are not read. If `ids` is `None`, one of them may hold the ids under an unknown
    /// name.
    pub other_text: Vec<String>,
    /// The place of each row.
    pub places: Vec<Place>,
}

/// Reads the ids and places of a table. A table without rows, an invalid row and an empty id are errors.
pub fn read(path: &Path) -> Result<Table, TableError> {
    read_columns(path, true)
}

/// Reads only the places of a table, such as a gallery. Ids are ignored.
pub fn read_places(path: &Path) -> Result<Vec<Place>, TableError> {
    Ok(read_columns(path, false)?.places)
}

fn read_columns(path: &Path, with_ids: bool) -> Result<Table, TableError> {
    let mut reader = TableReader::open(path, ColumnNames::default(), with_ids)?;
    let (mut ids, mut places) = (Vec::new(), Vec::new());
    for (row, number) in reader.by_ref().zip(0..) {
        let row = row?;
        places.extend(row.place);
        if row.id.as_ref().is_some_and(String::is_empty) {
            return Err(TableError::row(path, number, "id is empty"));
        }
        ids.extend(row.id);
    }
    if places.is_empty() {
        return Err(TableError::file(path, "has no rows"));
    }
    Ok(Table { ids: reader.has_ids().then_some(ids), other_text: reader.other_text(), places })
}
