//! `manifest.json`: what is in a folder of shards, with a checksum for every file and every column of every row group.
//!
//! Invariant: a manifest that was read agrees with itself (sums of rows, fingerprint), names only files of its own folder, and
//! is of a version that this program knows. Specified in `shards/README.md`.

use std::collections::BTreeMap;
use std::hash::Hasher as _;
use std::path::Path;

pub use locdiff_core::protocol::ImageHead;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::checksum::Checksum;
use super::statistics::{Statistics, digits};
use crate::shards::error::{ShardsError, Spot};

/// Version of the format that this program writes, and the newest that it reads.
pub const SCHEMA_VERSION: u32 = 1;

/// Name of the manifest in its folder.
pub const MANIFEST_NAME: &str = "manifest.json";

/// What is in a folder of shards.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the format.
    pub schema_version: u32,
    /// xxh3 of everything below.
    pub fingerprint: Checksum,
    /// Rows of all files.
    pub rows: u64,
    /// Numbers per embedding.
    pub width: u32,
    /// Embeddings per row.
    pub views: u32,
    /// Where the rows came from, in words.
    pub source: String,
    /// What maps photos to the space of the embeddings.
    pub image_head: ImageHead,
    /// Mean of every dimension over the rows of view 0.
    pub mean: Vec<f64>,
    /// Standard deviation of every dimension over the rows of view 0.
    pub standard_deviation: Vec<f64>,
    /// The files, in the order of the rows.
    pub files: Vec<ManifestFile>,
}

/// One Parquet file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestFile {
    /// Its name in the folder.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Its rows.
    pub rows: u64,
    /// xxh3 of the whole file.
    pub xxh3: Checksum,
    /// xxh3 of the footer: all bytes behind the last column chunk.
    pub footer_xxh3: Checksum,
    /// Its row groups, in order.
    pub row_groups: Vec<ManifestRowGroup>,
}

/// One row group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestRowGroup {
    /// Its rows.
    pub rows: u32,
    /// xxh3 of every column chunk, by the column's name.
    pub xxh3: BTreeMap<String, Checksum>,
}

impl Manifest {
    /// Mean and standard deviation.
    pub fn statistics(&self) -> Statistics {
        let (mean, standard_deviation) = (self.mean.clone(), self.standard_deviation.clone());
        Statistics { rows: self.rows, mean, standard_deviation }
    }

    /// xxh3 of everything but the fingerprint itself; statistics count with nine significant digits.
    pub fn compute_fingerprint(&self) -> Checksum {
        let mut hasher = XxHash3_64::new();
        let mut text = |part: &str| {
            hasher.write(&(part.len() as u64).to_le_bytes());
            hasher.write(part.as_bytes());
        };
        for number in [u64::from(self.schema_version), self.rows, self.width.into(), self.views.into()] {
            text(&number.to_string());
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

    /// The text of `manifest.json`.
    pub fn to_json(&self) -> Result<Vec<u8>, ShardsError> {
        let text = serde_json::to_vec_pretty(self);
        text.map_err(|error| ShardsError::Argument(format!("a manifest that is no JSON: {error}")))
    }

    /// Reads the text of the manifest that `location` names in messages.
    pub fn parse(text: &[u8], location: &str) -> Result<Self, ShardsError> {
        let corrupt = |reason: String| ShardsError::corrupt(Spot::file(location), reason);
        let no_manifest = |error| corrupt(format!("is no manifest: {error}"));
        #[derive(Deserialize)]
        struct Version {
            schema_version: u32,
        }
        let version: Version = serde_json::from_slice(text).map_err(no_manifest)?;
        if version.schema_version == 0 || version.schema_version > SCHEMA_VERSION {
            let reason = format!(
                "schema version {}, this program reads up to {SCHEMA_VERSION}; use the program that wrote it, or a newer one",
                version.schema_version
            );
            return Err(ShardsError::bad(Spot::file(location), reason));
        }
        let manifest: Self = serde_json::from_slice(text).map_err(no_manifest)?;
        manifest.check().map_err(corrupt)?;
        Ok(manifest)
    }

    /// Does it agree with itself?
    fn check(&self) -> Result<(), String> {
        let computed = self.compute_fingerprint();
        if computed != self.fingerprint {
            return Err(format!("its fingerprint is {computed}, expected {}: it was changed", self.fingerprint));
        }
        let width = self.width as usize;
        if width == 0 || self.views == 0 || self.mean.len() != width || self.standard_deviation.len() != width {
            return Err(format!(
                "width {width}, views {}, {} means and {} standard deviations do not fit together",
                self.views,
                self.mean.len(),
                self.standard_deviation.len()
            ));
        }
        for file in &self.files {
            let plain = Path::new(&file.name).file_name().is_some_and(|name| name == file.name.as_str());
            if !plain {
                return Err(format!("lists {:?}, which is no plain file name", file.name));
            }
            let rows: u64 = file.row_groups.iter().map(|row_group| u64::from(row_group.rows)).sum();
            if rows != file.rows {
                return Err(format!("{}: its row groups have {rows} rows, expected {}", file.name, file.rows));
            }
        }
        let rows: u64 = self.files.iter().map(|file| file.rows).sum();
        if rows != self.rows {
            return Err(format!("its files have {rows} rows, expected {}", self.rows));
        }
        Ok(())
    }
}
