//! What columns of ids and coordinates may be called: one list for every file that is read.
//!
//! Names are compared without regard to case. Of several columns that could hold ids the first of [`ID_NAMES`] counts; two that
//! could hold latitudes are an error, for nobody can know which is meant.

use std::path::Path;

use super::error::TableError;

/// Names of a column of ids, the likeliest first.
pub const ID_NAMES: &[&str] =
    &["id", "path", "image_id", "img_id", "image", "img", "filename", "file_name", "file", "name"];

/// Names of a column of latitudes, degrees.
pub const LATITUDE_NAMES: &[&str] = &["lat", "latitude"];

/// Names of a column of longitudes, degrees.
pub const LONGITUDE_NAMES: &[&str] = &["lon", "lng", "long", "longitude"];

/// Names that somebody has given to columns, such as `shards.id_column`. A column of exactly this name is the one; a name that is
/// the first of its list stands for the whole list where there is no such column. None: any name of the list.
#[derive(Debug, Clone, Copy, Default)]
pub struct ColumnNames<'a> {
    /// Of ids.
    pub id: Option<&'a str>,
    /// Of latitudes.
    pub latitude: Option<&'a str>,
    /// Of longitudes.
    pub longitude: Option<&'a str>,
}

/// Where the columns stand.
#[derive(Debug, Clone, Copy)]
pub(super) struct Columns {
    pub(super) id: Option<usize>,
    pub(super) latitude: usize,
    pub(super) longitude: usize,
}

impl Columns {
    /// Finds them in the header of a file; ids only where they are wanted.
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

    /// Is it none of those that are read?
    pub(super) fn is_other(&self, column: usize) -> bool {
        !self.used().any(|used| used == column)
    }

    /// Those that are read.
    pub(super) fn used(&self) -> impl Iterator<Item = usize> {
        [Some(self.latitude), Some(self.longitude), self.id].into_iter().flatten()
    }
}

/// Columns that could be meant, in the order of the names: those called exactly `given`; where there are none, or nothing was
/// given but the first of `accepted`, those called by any accepted name.
pub fn columns_named(header: &[String], accepted: &[&str], given: Option<&str>) -> Vec<usize> {
    let columns = |is_it: &dyn Fn(&str) -> bool| -> Vec<usize> {
        (0..header.len()).filter(|column| is_it(&header[*column])).collect()
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
