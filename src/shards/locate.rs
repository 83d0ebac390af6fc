//! From what the user wrote to files: a folder with a manifest, a folder of Parquet, a file, a glob.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::ShardsError;
use super::manifest::{MANIFEST_NAME, Manifest};
use super::source::{ByteSource, LocalFiles};

/// What a location holds.
pub(super) struct Found {
    pub(super) source: Arc<dyn ByteSource>,
    pub(super) manifest: Option<Manifest>,
}

/// Finds the files of a location. URLs get their own branch here.
pub(super) fn locate(location: &str) -> Result<Found, ShardsError> {
    if let Some((scheme, _)) = location.split_once("://") {
        return Err(ShardsError::Argument(format!("{location}: no way to read `{scheme}://`")));
    }
    local(location)
}

fn local(location: &str) -> Result<Found, ShardsError> {
    let path = Path::new(location);
    let missing = |reason: String| ShardsError::Missing { location: location.to_owned(), reason };
    let found = match fs::metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let paths = globbed(location)?;
            if paths.is_empty() {
                let is_glob = location.contains(['*', '?', '[']);
                return Err(missing(if is_glob { "the glob matches nothing" } else { "nothing is there" }.into()));
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
                return Err(missing(format!("its manifest lists {}, which is not there", absent.display())));
            }
            if paths.is_empty() {
                return Err(missing("its manifest lists no file".into()));
            }
            Ok(files(paths, Some(manifest)))
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

fn files(paths: Vec<PathBuf>, manifest: Option<Manifest>) -> Found {
    Found { source: Arc::new(LocalFiles::new(paths)), manifest }
}

/// The folder's Parquet files by name.
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

/// The files that a glob matches, by name.
fn globbed(pattern: &str) -> Result<Vec<PathBuf>, ShardsError> {
    let wrong = |error: glob::PatternError| ShardsError::Argument(format!("{pattern} is no glob: {error}"));
    let mut paths = Vec::new();
    for path in glob::glob(pattern).map_err(wrong)? {
        let path = path.map_err(|error| ShardsError::io(error.path().to_owned(), error.into()))?;
        if path.is_file() {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}
