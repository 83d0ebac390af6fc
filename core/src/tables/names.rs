//! The accepted names for columns of ids, coordinates and embeddings. They are the same for all files.
//!
//! Column names are compared with the accepted names without regard to case. If several columns could hold ids, the
//! column whose name comes first in [`ID_NAMES`] is used. If several columns of a table could hold latitudes, or
//! several could hold longitudes, this is an error, because any choice would be a guess.

use std::path::Path;

use super::error::TableError;

/// Accepted names of the id column, in order of preference.
pub const ID_NAMES: &[&str] = &[
    "id",
    "image_id",
    "img_id",
    "image_path",
    "path",
    "photo_id",
    "filename",
    "file_name",
    "file",
    "name",
    "key",
    "image",
    "img",
];

/// Accepted names of the latitude column (degrees).
pub const LATITUDE_NAMES: &[&str] = &["lat", "latitude"];

/// Accepted names of the longitude column (degrees).
pub const LONGITUDE_NAMES: &[&str] = &["lon", "lng", "long", "longitude"];

/// Accepted names of the column that names the author of a photo, in order of preference.
pub const AUTHOR_NAMES: &[&str] = &["author", "user", "userid", "user_id", "owner"];

/// Accepted names of the embedding column of Parquet files that are used as shards, in order of preference.
pub const EMBEDDING_NAMES: &[&str] = &[
    "embedding",
    "embeddings",
    "clip",
    "clip_embedding",
    "image_embedding",
    "image_features",
    "features",
    "feature",
    "vector",
    "emb",
];

/// Column names from the configuration, such as `shards.id_column`. A configured name must match exactly, with one
/// exception: if it is the default (the first of the accepted names) and no column has exactly this name, any accepted
/// name matches. If a field is `None`, any accepted name matches.
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
    /// Latitude and longitude; `None` if places are not read.
    pub(super) place: Option<[usize; 2]>,
}

impl Columns {
    /// Finds the columns in the header of a file. Looks for the id column only if `with_ids` is true, and for the
    /// columns of places only if `with_places` is true.
    pub(super) fn find(
        path: &Path,
        header: &[String],
        names: ColumnNames<'_>,
        (with_ids, with_places): (bool, bool),
    ) -> Result<Self, TableError> {
        let one = |what: &str, accepted: &[&str], given: Option<&str>| match columns_named(header, accepted, given)[..]
        {
            [column] => Ok(column),
            [] => Err(missing(path, header, what, accepted, given)),
            ref several => {
                let reason = format!("{} columns could be `{}`, wanted one", several.len(), accepted[0]);
                Err(TableError::file(path, format!("columns are {header:?}: {reason}")))
            }
        };
        let ids = if with_ids { columns_named(header, ID_NAMES, names.id) } else { Vec::new() };
        let place = || {
            let latitude = one("latitude", LATITUDE_NAMES, names.latitude)?;
            Ok([latitude, one("longitude", LONGITUDE_NAMES, names.longitude)?])
        };
        Ok(Self { id: ids.first().copied(), place: with_places.then(place).transpose()? })
    }

    /// Whether the column at this position is not read.
    pub(super) fn is_unused(&self, column: usize) -> bool {
        !self.used().any(|used| used == column)
    }

    /// The columns that are read.
    pub(super) fn used(&self) -> impl Iterator<Item = usize> {
        self.place.into_iter().flatten().chain(self.id)
    }
}

/// Positions of the matching columns of `header`.
///
/// - If `given` is `None`: the columns with any accepted name, ignoring case, in the order of `accepted`.
/// - If `given` is a name: the columns with exactly this name. If no column has this name, and `given` is the first
///   accepted name, the result is the same as for `None`.
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
