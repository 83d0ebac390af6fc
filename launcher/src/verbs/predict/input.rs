//! The embeddings to predict from.

use std::hash::Hasher as _;
use std::io::BufReader;
use std::path::Path;

use locdiff_core::files::measure;
use locdiff_core::tables::{CopiedRows, copy_embeddings, copy_lines, needs_copy};
use serde_json::{Value, json};
use twox_hash::XxHash3_64;

use crate::error::LaunchError;
use crate::verbs::locations::require_shards;

/// The name of stdin on the command line.
const STDIN: &str = "-";

/// The input of a prediction.
pub(super) struct Input {
    /// Where the workers read the embeddings.
    pub(super) location: String,
    /// Changes if the input changes, as far as the sizes and times of its files show.
    pub(super) identity: Value,
    /// Rows that were left out when the input was copied.
    pub(super) bad_rows: u64,
    /// Whether the input was copied.
    pub(super) is_copy: bool,
}

impl Input {
    /// Opens the input `named`. Other files than shards and Parquet are copied to a Parquet file in `folder`.
    pub(super) fn open(named: &str, folder: &Path) -> Result<Self, LaunchError> {
        if named != STDIN && !needs_copy(Path::new(named)) {
            require_shards("INPUT", named)?;
            let identity = json!([named, files_digest(Path::new(named))]);
            return Ok(Self { location: named.to_owned(), identity, bad_rows: 0, is_copy: false });
        }
        let to = folder.join("input.parquet");
        let copied = if named == STDIN {
            copy_lines(&mut BufReader::new(std::io::stdin()), Path::new("stdin"), &to)
        } else {
            copy_embeddings(Path::new(named), &to)
        };
        let CopiedRows { bad, reasons, .. } = copied.map_err(LaunchError::reported)?;
        if bad > 0 {
            tracing::warn!("{bad} rows are left out; {}{}", reasons.join("; "), if bad > 3 { "; ..." } else { "" });
        }
        let identity = json!([named, measure(&to)?.xxh3]);
        Ok(Self { location: to.display().to_string(), identity, bad_rows: bad, is_copy: true })
    }
}

/// A digest of the names, sizes and times of the files at `path`, which may be a file or a folder.
fn files_digest(path: &Path) -> String {
    let mut hash = XxHash3_64::new();
    let mut found: Vec<_> = match std::fs::read_dir(path) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
        Err(_) => vec![path.to_owned()],
    };
    found.sort();
    for file in found {
        hash.write(file.as_os_str().as_encoded_bytes());
        if let Ok(facts) = std::fs::metadata(&file) {
            hash.write(&facts.len().to_le_bytes());
            hash.write(format!("{:?}", facts.modified().ok()).as_bytes());
        }
    }
    format!("{:016x}", hash.finish())
}
