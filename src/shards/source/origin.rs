//! Finds out where rows came from. This also works if the location names only some files of a folder of shards.
//!
//! Files given by path or glob count as data without a manifest, even if their folder has a manifest. That manifest may
//! list more files, so its statistics, fingerprint and checksums are not used. Its source and image head are used,
//! because they apply to every file that it lists.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::shards::format::{ImageHead, MANIFEST_NAME, Manifest};

/// Where rows came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// Description of the source.
    pub source: String,
    /// The retrieval head that can use the embeddings. If any file is simulated, the head of the first such file.
    /// Otherwise, `None` if the head is unknown or differs between files.
    pub image_head: ImageHead,
}

impl From<&Manifest> for Origin {
    fn from(manifest: &Manifest) -> Self {
        Self { source: manifest.source.clone(), image_head: manifest.image_head }
    }
}

impl Origin {
    /// Finds the origin of files in the manifests of their folders. `None` if no manifest lists any of the files.
    pub(super) fn from_manifests(paths: &[PathBuf]) -> Option<Self> {
        let mut folders: Vec<(PathBuf, Option<Manifest>)> = Vec::new();
        let origins: Vec<Option<Self>> = paths.iter().map(|path| of_file(path, &mut folders)).collect();
        let mut found: Vec<&Self> = origins.iter().flatten().collect();
        found.dedup();
        let first = found.first()?.image_head;
        // If any file is simulated, all data counts as simulated. Otherwise, the head is known only if it is the same
        // for all files.
        let is_head_of_all =
            origins.iter().all(|origin| origin.as_ref().is_some_and(|origin| origin.image_head == first));
        let simulated = found.iter().map(|origin| origin.image_head).find(|head| head.is_of_simulated());
        let image_head = simulated.unwrap_or(if is_head_of_all { first } else { ImageHead::None });
        let mut sources: Vec<&str> = found.iter().map(|origin| origin.source.as_str()).collect();
        sources.sort_unstable();
        sources.dedup();
        Some(Self { source: sources.join("; "), image_head })
    }
}

/// Finds the origin of a file in the manifest of its folder. If no manifest there lists the file, resolves the symlinks
/// in the path and looks in the folder to which they lead.
fn of_file(path: &Path, folders: &mut Vec<(PathBuf, Option<Manifest>)>) -> Option<Origin> {
    let bytes = fs::metadata(path).ok()?.len();
    [Some(path.to_owned()), fs::canonicalize(path).ok()].into_iter().flatten().find_map(|path| {
        let (folder, name) = (path.parent()?, path.file_name()?.to_str()?);
        let number = folders.iter().position(|(other, _)| other == folder).unwrap_or_else(|| {
            folders.push((folder.to_owned(), read(folder)));
            folders.len() - 1
        });
        let manifest = folders[number].1.as_ref()?;
        manifest.files.iter().any(|file| file.name == name && file.bytes == bytes).then(|| manifest.into())
    })
}

/// Reads the manifest of a folder. A damaged manifest, or a manifest.json that does not describe shards, is ignored,
/// because the user named files and not the folder.
fn read(folder: &Path) -> Option<Manifest> {
    let path = folder.join(MANIFEST_NAME);
    Manifest::parse(&fs::read(&path).ok()?, &path.display().to_string()).ok()
}
