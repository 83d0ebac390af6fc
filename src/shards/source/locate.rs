//! Resolves a location to files. A location is a folder with a manifest, a folder of Parquet files, a file, a glob or a
//! URL.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use locdiff_core::config::ShardsConfig;

use super::bytes::ByteSource;
use super::local::LocalFiles;
use super::origin::Origin;
use super::s3::{self, S3Options};
use crate::shards::error::ShardsError;
use crate::shards::format::{MANIFEST_NAME, Manifest};

/// The files at a location.
pub(super) struct FoundFiles {
    pub(super) source: Arc<dyn ByteSource>,
    /// The text of the manifest. [`Manifest::parse`] has accepted it.
    pub(super) manifest_text: Option<Vec<u8>>,
    /// The origin of the rows. `None` if the origin is unknown, or if there is a manifest, which itself states the
    /// origin.
    pub(super) origin: Option<Origin>,
}

/// Finds the files at a location.
pub(super) fn locate(location: &str, config: &ShardsConfig) -> Result<FoundFiles, ShardsError> {
    match location.split_once("://") {
        Some(("s3", _)) => locate_s3(location, &S3Options::from_env(config)),
        // Do not print the whole URL: it may contain a password.
        Some((scheme, _)) => Err(ShardsError::Argument(format!(
            "cannot read shards from `{scheme}://`, wanted a folder, a file, a glob or s3://BUCKET/PREFIX"
        ))),
        None => local(location),
    }
}

/// Finds the objects of an `s3://` URL with the given options.
pub(super) fn locate_s3(location: &str, options: &S3Options) -> Result<FoundFiles, ShardsError> {
    let Some(rest) = location.strip_prefix("s3://") else {
        return Err(ShardsError::Argument("the location does not begin with s3://, wanted s3://BUCKET/PREFIX".into()));
    };
    let (source, manifest_text) = s3::open(rest, options)?;
    Ok(FoundFiles { source, manifest_text, origin: None })
}

fn local(location: &str) -> Result<FoundFiles, ShardsError> {
    let path = Path::new(location);
    let missing = |reason: String| ShardsError::Missing { location: location.to_owned(), reason };
    let found = match fs::metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let paths = glob_files(location)?;
            if paths.is_empty() {
                let is_glob = location.contains(['*', '?', '[']);
                return Err(missing(if is_glob { "the glob matches nothing" } else { "it does not exist" }.into()));
            }
            return Ok(files(paths, None));
        }
        Err(error) => return Err(ShardsError::io(path, error)),
    };
    if found.is_file() {
        return Ok(files(vec![path.to_owned()], None));
    }
    let manifest_path = path.join(MANIFEST_NAME);
    match fs::read(&manifest_path) {
        Ok(text) => {
            let manifest = Manifest::parse(&text, &manifest_path.display().to_string())?;
            let paths: Vec<PathBuf> = manifest.files.iter().map(|file| path.join(&file.name)).collect();
            if let Some(absent) = paths.iter().find(|path| !path.exists()) {
                return Err(missing(format!("its manifest lists {}, which does not exist", absent.display())));
            }
            if paths.is_empty() {
                return Err(missing("its manifest lists no files".into()));
            }
            Ok(files(paths, Some(text)))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let paths = parquet_files(path)?;
            if paths.is_empty() {
                return Err(missing("the folder has neither a manifest.json nor a *.parquet file".into()));
            }
            Ok(files(paths, None))
        }
        Err(error) => Err(ShardsError::io(manifest_path, error)),
    }
}

fn files(paths: Vec<PathBuf>, manifest_text: Option<Vec<u8>>) -> FoundFiles {
    let origin = if manifest_text.is_none() { Origin::from_manifests(&paths) } else { None };
    FoundFiles { source: Arc::new(LocalFiles::new(paths)), manifest_text, origin }
}

/// The Parquet files of a folder, sorted by name.
fn parquet_files(folder: &Path) -> Result<Vec<PathBuf>, ShardsError> {
    let io = |error| ShardsError::io(folder, error);
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|extension| extension == "parquet") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// The files that match a glob, sorted by name.
fn glob_files(pattern: &str) -> Result<Vec<PathBuf>, ShardsError> {
    let fail = |error: glob::PatternError| ShardsError::Argument(format!("{pattern} is not a valid glob: {error}"));
    let mut paths = Vec::new();
    for path in glob::glob(pattern).map_err(fail)? {
        let path = path.map_err(|error| ShardsError::io(error.path().to_owned(), error.into()))?;
        if path.is_file() {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}
