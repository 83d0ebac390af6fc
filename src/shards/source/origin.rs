//! What is known of where rows came from, whether a folder of shards is named or the files in it.
//!
//! Files that are named one by one, by path or glob, are data without a manifest: neither checksums nor statistics nor the
//! fingerprint are taken from the one that lies beside them, which may list other files too. But where they came from and which
//! head fits them is true of every file that it lists.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::shards::format::{ImageHead, MANIFEST_NAME, Manifest};

/// Where rows came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// In words.
    pub source: String,
    /// What maps photos to the space of the embeddings.
    pub image_head: ImageHead,
}

impl From<&Manifest> for Origin {
    fn from(manifest: &Manifest) -> Self {
        Self { source: manifest.source.clone(), image_head: manifest.image_head }
    }
}

impl Origin {
    /// What the manifests beside these files say of them; none where no manifest lists any.
    pub(super) fn beside(paths: &[PathBuf]) -> Option<Self> {
        let mut folders: Vec<(PathBuf, Option<Manifest>)> = Vec::new();
        let origins: Vec<Option<Self>> = paths.iter().map(|path| of_file(path, &mut folders)).collect();
        let mut known: Vec<&Self> = origins.iter().flatten().collect();
        known.dedup();
        let first = known.first()?.image_head;
        // One simulated file makes simulated data; any other head must be that of all files.
        let is_head_of_all =
            origins.iter().all(|origin| origin.as_ref().is_some_and(|origin| origin.image_head == first));
        let image_head = match known.iter().any(|origin| origin.image_head == ImageHead::Linear) {
            true => ImageHead::Linear,
            false if is_head_of_all => first,
            false => ImageHead::None,
        };
        let mut sources: Vec<&str> = known.iter().map(|origin| origin.source.as_str()).collect();
        sources.sort_unstable();
        sources.dedup();
        Some(Self { source: sources.join("; "), image_head })
    }
}

/// What the manifest beside a file, or beside what it is a link to, says of it.
fn of_file(path: &Path, folders: &mut Vec<(PathBuf, Option<Manifest>)>) -> Option<Origin> {
    let bytes = fs::metadata(path).ok()?.len();
    [Some(path.to_owned()), fs::canonicalize(path).ok()].into_iter().flatten().find_map(|path| {
        let (folder, name) = (path.parent()?, path.file_name()?.to_str()?);
        let number = folders.iter().position(|(known, _)| known == folder).unwrap_or_else(|| {
            folders.push((folder.to_owned(), read(folder)));
            folders.len() - 1
        });
        let manifest = folders[number].1.as_ref()?;
        manifest.files.iter().any(|file| file.name == name && file.bytes == bytes).then(|| manifest.into())
    })
}

/// The folder's manifest. One that is not ours, or is damaged, says nothing of files that are named without it.
fn read(folder: &Path) -> Option<Manifest> {
    let path = folder.join(MANIFEST_NAME);
    Manifest::parse(&fs::read(&path).ok()?, &path.display().to_string()).ok()
}
