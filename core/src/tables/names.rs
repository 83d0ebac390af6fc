//! The accepted names for columns of ids and coordinates, the same for every kind of file.
//!
//! Names are compared without regard to case. If several columns could hold ids, the one that comes first in [`ID_NAMES`] is
//! used. Two columns that could hold latitudes (or longitudes) are an error, because the choice would be a guess.

use std::path::Path;

use super::error::TableError;

/// Accepted names of the id column, in order of preference.
pub const ID_NAMES: &[&str] =
    &["id", "path", "image_id", "img_id", "image", "img", "filename", "file_name", "file", "name"];

/// Accepted names of the latitude column (degrees).
pub const LATITUDE_NAMES: &[&str] = &["lat", "latitude"];

/// Accepted names of the longitude column (degrees).
pub const LONGITUDE_NAMES: &[&str] = &["lon", "lng", "long", "longitude"];

/// Column names from the configuration, such as `shards.id_column`. A configured name must match exactly, with one
/// exception: the first name of the accepted list, which is the default, stands for the whole list if no column matches it
/// exactly. `None` accepts any name of the list.
#[derive(Debug, Clone, Copy, Default)]
pub struct ColumnNames<'a> {
    /// Name of the id column.
    pub id: Option<&'a str>,
    /// Name of the latitude column.
    pub latitude: Option<&'a str>,
    /// Name of the longitude column.
    pub longitude: Option<&'a str>,
}

/// Positions of the columns that are read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Columns {
    pub(super) id: Option<usize>,
    pub(super) latitude: usize,
    pub(super) longitude: usize,
}

impl Columns {
    /// Finds the columns in the header of a file. Looks for ids only if `with_ids`.
    pub(super) fn find(
        path: &Path,
        header: &[String],
        names: ColumnNames<'_>,
        with_ids: bool,
    ) -> Result<Self, TableError> {
        let one = |what: &str, accepted: &[&str], given: Option<&str>| match columns_named(header, accepted, given)[..]
        {
            [column] => Ok(column),
            [] => Err(missing(path, header, what, accepted, given)),
            ref several => {
                let reason = format!("{} of them could be `{}`, wanted one", several.len(), accepted[0]);
                Err(TableError::file(path, format!("columns are {header:?}: {reason}")))
            }
        };
        let ids = if with_ids { columns_named(header, ID_NAMES, names.id) } else { Vec::new() };
        Ok(Self {
            id: ids.first().copied(),
            latitude: one("latitude", LATITUDE_NAMES, names.latitude)?,
            longitude: one("longitude", LONGITUDE_NAMES, names.longitude)?,
        })
    }

    /// Whether a column is not read.
    pub(super) fn is_unused(&self, column: usize) -> bool {
        !self.used().any(|used| used == column)
    }

    /// The columns that are read.
    pub(super) fn used(&self) -> impl Iterator<Item = usize> {
        [Some(self.latitude), Some(self.longitude), self.id].into_iter().flatten()
    }
}

/// The columns that match, in the order of the accepted names. With `given`, these are the columns of exactly that name. If
/// there are none and `given` is the first accepted name, or if nothing was given, they are the columns with any accepted
/// name.
pub fn columns_named(header: &[String], accepted: &[&str], given: Option<&str>) -> Vec<usize> {
    let columns = |matches: &dyn Fn(&str) -> bool| -> Vec<usize> {
        (0..header.len()).filter(|column| matches(&header[*column])).collect()
    };
    if let Some(given) = given {
        let exact = columns(&|name| name == given);
        if !exact.is_empty() || given != accepted[0] {
            return exact;
        }
    }
    accepted.iter().flat_map(|wanted| columns(&|name| name.eq_ignore_ascii_case(wanted))).collect()
}

fn missing(path: &Path, header: &[String], what: &str, accepted: &[&str], given: Option<&str>) -> TableError {
    let found = if header.is_empty() { "none".to_owned() } else { header.join(", ") };
    let reason = match given {
        Some(given) if given != accepted[0] => format!("no column `{given}` for {what}; found: {found}"),
        _ => format!("no column for {what}; found: {found}; accepted: {}", accepted.join(", ")),
    };
    TableError::file(path, reason)
}
