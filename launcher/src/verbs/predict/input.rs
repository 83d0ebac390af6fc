//! The embeddings to predict from.

use std::io::BufReader;
use std::path::Path;

use locdiff_core::config::ShardsConfig;
use locdiff_core::files::measure;
use locdiff_core::tables::{CopiedRows, copy_embeddings, copy_lines, needs_copy};
use serde_json::{Value, json};

use crate::error::LaunchError;
use crate::verbs::locations::require_shards;
use crate::verbs::paths::require_file;

/// The name of stdin on the command line.
const STDIN: &str = "-";

/// The input of a prediction.
pub(super) struct Input {
    /// Where the workers read the embeddings.
    pub(super) location: String,
    /// The name of the input. For a copied input, also the checksum of the copy; the version of other inputs comes from
    /// the workers.
    pub(super) identity: Value,
    /// Rows that were left out when the input was copied.
    pub(super) bad_rows: u64,
    /// Whether the input was copied.
    pub(super) is_copy: bool,
}

impl Input {
    /// Opens the input `named` for a model that takes embeddings of `width` numbers, if that is known. Other files than
    /// shards and Parquet are copied to a Parquet file in `folder`.
    pub(super) fn open(named: &str, folder: &Path, width: Option<usize>) -> Result<Self, LaunchError> {
        if named != STDIN && !needs_copy(Path::new(named)) {
            require_shards("INPUT", named)?;
            return Ok(Self { location: named.to_owned(), identity: json!(named), bad_rows: 0, is_copy: false });
        }
        let to = folder.join("input.parquet");
        let copied = if named == STDIN {
            copy_lines(&mut BufReader::new(std::io::stdin()), Path::new("stdin"), &to, width)
        } else {
            copy_embeddings(Path::new(named), &to, width)
        };
        // Only a failure looks at the path again: opening a pipe twice could lose its contents.
        let missing = || if named == STDIN { None } else { require_file("INPUT", Path::new(named)).err() };
        let CopiedRows { bad, reasons, .. } =
            copied.map_err(|error| missing().unwrap_or_else(|| LaunchError::reported(error)))?;
        if bad > 0 {
            tracing::warn!("{bad} rows are left out; {}{}", reasons.join("; "), if bad > 3 { "; ..." } else { "" });
        }
        let identity = json!([named, measure(&to)?.xxh3]);
        Ok(Self { location: to.display().to_string(), identity, bad_rows: bad, is_copy: true })
    }

    /// Sets the names of the columns that the workers read. A copy has the default names.
    pub(super) fn name_columns(&self, shards: &mut ShardsConfig) {
        if self.is_copy {
            let names = ShardsConfig::default();
            (shards.id_column, shards.embedding_column) = (names.id_column, names.embedding_column);
        }
    }
}
