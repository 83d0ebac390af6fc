//! `manifest.json`: lists the contents of a folder of shards, with a checksum for every file and every column chunk.
//!
//! Invariant: a manifest returned by [`Manifest::parse`] has consistent row counts, a correct fingerprint and a
//! supported schema version, and names only files in its own folder. `shards/README.md` specifies the format.

use std::collections::BTreeMap;
use std::hash::Hasher as _;
use std::path::Path;

pub use locdiff_core::protocol::ImageHead;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::checksum::Checksum;
use super::statistics::{Statistics, digits};
use crate::shards::error::{ShardsError, Spot};

/// The newest schema version that this program can read. It is the version of shards in which rows lack coordinates.
pub const SCHEMA_VERSION: u32 = 2;

/// The schema version of shards in which all rows have coordinates.
pub(super) const SCHEMA_VERSION_WITH_COORDINATES: u32 = 1;

/// File name of the manifest.
pub const MANIFEST_NAME: &str = "manifest.json";

/// The manifest of a folder of shards.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the format.
    pub schema_version: u32,
    /// xxh3 of all other fields.
    pub fingerprint: Checksum,
    /// Number of rows in all files together.
    pub rows: u64,
    /// Number of rows that have coordinates; `None` if all rows have some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows_with_coordinates: Option<u64>,
    /// Numbers per embedding.
    pub width: u32,
    /// Embeddings per row.
    pub views: u32,
    /// Description of where the rows came from.
    pub source: String,
    /// The retrieval head that can use the embeddings.
    pub image_head: ImageHead,
    /// Mean of every dimension over the rows of view 0.
    pub mean: Vec<f64>,
    /// Standard deviation of every dimension over the rows of view 0.
    pub standard_deviation: Vec<f64>,
    /// The files, in row order.
    pub files: Vec<ManifestFile>,
}

/// One Parquet file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestFile {
    /// File name within the folder.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Number of rows.
    pub rows: u64,
    /// xxh3 of the whole file.
    pub xxh3: Checksum,
    /// xxh3 of the footer: all bytes after the last column chunk.
    pub footer_xxh3: Checksum,
    /// Row groups, in order.
    pub row_groups: Vec<ManifestRowGroup>,
}

/// One row group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestRowGroup {
    /// Number of rows.
    pub rows: u32,
    /// xxh3 of every column chunk, by column name.
    pub xxh3: BTreeMap<String, Checksum>,
}

impl Manifest {
    /// Mean and standard deviation of every dimension.
    pub fn statistics(&self) -> Statistics {
        let (mean, standard_deviation) = (self.mean.clone(), self.standard_deviation.clone());
        Statistics { rows: self.rows, mean, standard_deviation }
    }

    /// Computes the xxh3 of all fields except the fingerprint. Statistics are hashed with nine significant digits.
    pub fn compute_fingerprint(&self) -> Checksum {
        let mut hasher = XxHash3_64::new();
        let mut text = |part: &str| {
            hasher.write(&(part.len() as u64).to_le_bytes());
            hasher.write(part.as_bytes());
        };
        for number in [u64::from(self.schema_version), self.rows, self.width.into(), self.views.into()] {
            text(&number.to_string());
        }
        if let Some(rows) = self.rows_with_coordinates {
            text(&format!("{rows} rows with coordinates"));
        }
        text(&self.source);
        text(&format!("{:?}", self.image_head));
        self.mean.iter().chain(&self.standard_deviation).for_each(|value| text(&digits(*value)));
        for file in &self.files {
            text(&file.name);
            text(&format!("{} {} {} {}", file.bytes, file.rows, file.xxh3, file.footer_xxh3));
            for row_group in &file.row_groups {
                text(&row_group.rows.to_string());
                for (column, checksum) in &row_group.xxh3 {
                    text(column);
                    text(&checksum.to_string());
                }
            }
        }
        Checksum(hasher.finish())
    }

    /// Serializes the manifest to JSON.
    pub fn to_json(&self) -> Result<Vec<u8>, ShardsError> {
        let text = serde_json::to_vec_pretty(self);
        text.map_err(|error| ShardsError::Argument(format!("cannot write the manifest as JSON: {error}")))
    }

    /// Parses and checks a manifest. `location` is the name of the manifest in error messages.
    pub fn parse(text: &[u8], location: &str) -> Result<Self, ShardsError> {
        let corrupt = |reason: String| ShardsError::corrupt(Spot::file(location), reason);
        let not_a_manifest = |error| corrupt(format!("is not a manifest: {error}"));
        #[derive(Deserialize)]
        struct VersionOnly {
            schema_version: u32,
        }
        let version: VersionOnly = serde_json::from_slice(text).map_err(not_a_manifest)?;
        if version.schema_version == 0 || version.schema_version > SCHEMA_VERSION {
            let reason = format!(
                "schema version {}, but this program reads up to {SCHEMA_VERSION}; \
                 use the version of this program that wrote the shards",
                version.schema_version
            );
            return Err(ShardsError::bad(Spot::file(location), reason));
        }
        let manifest: Self = serde_json::from_slice(text).map_err(not_a_manifest)?;
        manifest.check().map_err(corrupt)?;
        Ok(manifest)
    }

    /// Checks that the fields are consistent.
    fn check(&self) -> Result<(), String> {
        let computed = self.compute_fingerprint();
        if computed != self.fingerprint {
            return Err(format!(
                "its fields have the fingerprint {computed}, but it states {}: the manifest was edited",
                self.fingerprint
            ));
        }
        let width = self.width as usize;
        if width == 0 || self.views == 0 || self.mean.len() != width || self.standard_deviation.len() != width {
            return Err(format!(
                "width {width}, {} views, {} means and {} standard deviations, wanted at least one view, \
                 a width above 0, and one mean and one standard deviation per dimension",
                self.views,
                self.mean.len(),
                self.standard_deviation.len()
            ));
        }
        for file in &self.files {
            let is_plain_name = Path::new(&file.name).file_name().is_some_and(|name| name == file.name.as_str());
            if !is_plain_name {
                return Err(format!("it lists {:?}, wanted a file name without a path", file.name));
            }
            let rows: u64 = file.row_groups.iter().map(|row_group| u64::from(row_group.rows)).sum();
            if rows != file.rows {
                return Err(format!("the row groups of {} have {rows} rows, wanted {}", file.name, file.rows));
            }
        }
        let rows: u64 = self.files.iter().map(|file| file.rows).sum();
        if rows != self.rows {
            return Err(format!("its files have {rows} rows, wanted {}", self.rows));
        }
        if let Some(some) = self.rows_with_coordinates.filter(|some| *some > rows) {
            return Err(format!("{some} rows have coordinates, but it has {rows} rows"));
        }
        Ok(())
    }
}
