//! GeoCLIP on disk: a folder that an import wrote, whole, with a checksum for each of its files.
//!
//! ```text
//! geoclip.safetensors   location.LocEnc{0,1,2}.*, image.{0,2}.*, logit_scale: the wheel's tensors, f32
//! gallery.csv           lat,lon: 100,000 places
//! LICENSE               GeoCLIP's (MIT)
//! manifest.json         version, source, and bytes and xxh3 of each file above
//! gallery-*.f32         embeddings of the gallery, made at need
//! ```
//!
//! Checksums are compared every time that the folder is opened: it takes 20 ms.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use locdiff_core::files::Written;
use locdiff_core::geo::Place;
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};
use twox_hash::XxHash3_64;

use super::error::GeoclipError;
use super::gallery::read_places;
use super::head::ImageHead;
use super::location::LocationEncoder;

const VERSION: u32 = 1;
pub(super) const WEIGHTS: &str = "geoclip.safetensors";
pub(super) const GALLERY: &str = "gallery.csv";
const MANIFEST: &str = "manifest.json";

/// What is in the folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of this format.
    pub version: u32,
    /// Where it came from.
    pub source: String,
    /// Its files by name.
    pub files: BTreeMap<String, Written>,
}

/// Weights and gallery, checked.
#[derive(Debug)]
pub struct Geoclip {
    folder: PathBuf,
    tensors: HashMap<String, Tensor>,
    places: Vec<Place>,
    checksum: u64,
}

impl Geoclip {
    /// Opens and checks a folder.
    pub fn open(folder: &Path) -> Result<Self, GeoclipError> {
        let manifest = read_manifest(folder)?;
        let mut summary = Vec::new();
        for (name, entry) in &manifest.files {
            let bytes = read_checked(folder, name, entry)?;
            summary.extend(XxHash3_64::oneshot(&bytes).to_le_bytes());
        }
        let gallery = folder.join(GALLERY);
        let places = read_places(&gallery, &std::fs::read(&gallery).map_err(GeoclipError::io(&gallery))?)?;
        if places.is_empty() {
            return Err(GeoclipError::damaged(&gallery, "no places"));
        }
        let weights = folder.join(WEIGHTS);
        let tensors = Tensor::read_safetensors(&weights).map_err(|error| GeoclipError::damaged(&weights, error))?;
        Ok(Self {
            folder: folder.to_owned(),
            tensors: tensors.into_iter().collect(),
            places,
            checksum: XxHash3_64::oneshot(&summary),
        })
    }

    /// Where it lies.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The gallery's places.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// Equal for equal weights and galleries.
    pub fn checksum(&self) -> u64 {
        self.checksum
    }

    /// The location encoder on `device`.
    pub fn location_encoder(&self, device: Device) -> Result<LocationEncoder, GeoclipError> {
        LocationEncoder::new(&self.tensors, device)
    }

    /// The image head on `device`.
    pub fn image_head(&self, device: Device) -> Result<ImageHead, GeoclipError> {
        ImageHead::new(&self.tensors, device)
    }
}

fn read_manifest(folder: &Path) -> Result<Manifest, GeoclipError> {
    let path = folder.join(MANIFEST);
    let text = std::fs::read(&path).map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => {
            GeoclipError::Missing { folder: folder.display().to_string(), reason: format!("no {MANIFEST}") }
        }
        _ => GeoclipError::Io { path: path.clone(), error },
    })?;
    let manifest: Manifest = serde_json::from_slice(&text).map_err(|error| GeoclipError::damaged(&path, error))?;
    if manifest.version != VERSION {
        return Err(GeoclipError::damaged(&path, format!("version is {}, wanted {VERSION}", manifest.version)));
    }
    if let Some(name) = [WEIGHTS, GALLERY].into_iter().find(|name| !manifest.files.contains_key(*name)) {
        return Err(GeoclipError::damaged(&path, format!("does not list {name}")));
    }
    Ok(manifest)
}

fn read_checked(folder: &Path, name: &str, entry: &Written) -> Result<Vec<u8>, GeoclipError> {
    let path = folder.join(name);
    let bytes = std::fs::read(&path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            GeoclipError::Missing { folder: folder.display().to_string(), reason: format!("no {name}") }
        }
        _ => GeoclipError::Io { path: path.clone(), error },
    })?;
    let way_out = "; import it again with `locdiff-launch geoclip import --overwrite`";
    if bytes.len() as u64 != entry.bytes {
        let reason = format!("{} bytes, {MANIFEST} says {}{way_out}", bytes.len(), entry.bytes);
        return Err(GeoclipError::damaged(&path, reason));
    }
    let got = hex(&bytes);
    if got != entry.xxh3 {
        return Err(GeoclipError::damaged(&path, format!("xxh3 is {got}, {MANIFEST} says {}{way_out}", entry.xxh3)));
    }
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    format!("{:016x}", XxHash3_64::oneshot(bytes))
}

/// Writes a folder beside its final name and renames it: whole or not at all.
pub fn write_folder(
    folder: &Path,
    source: &str,
    tensors: &[(String, Tensor)],
    gallery_csv: &[u8],
    licence: &[u8],
    overwrite: bool,
) -> Result<Manifest, GeoclipError> {
    check_target(folder, overwrite)?;
    let parent = match folder.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(parent).map_err(GeoclipError::io(parent))?;
    let beside = tempfile::Builder::new().prefix(".geoclip-").tempdir_in(parent).map_err(GeoclipError::io(parent))?;
    let weights = beside.path().join(WEIGHTS);
    Tensor::write_safetensors(tensors, &weights)?;
    sync(&weights)?;
    write_synced(&beside.path().join(GALLERY), gallery_csv)?;
    write_synced(&beside.path().join("LICENSE"), licence)?;
    let mut files = BTreeMap::new();
    for name in [WEIGHTS, GALLERY, "LICENSE"] {
        let path = beside.path().join(name);
        let bytes = std::fs::read(&path).map_err(GeoclipError::io(&path))?;
        files.insert(name.to_owned(), Written { bytes: bytes.len() as u64, xxh3: hex(&bytes) });
    }
    let manifest = Manifest { version: VERSION, source: source.to_owned(), files };
    let text = serde_json::to_vec_pretty(&manifest).expect("a manifest of strings and numbers is JSON");
    write_synced(&beside.path().join(MANIFEST), &text)?;
    sync(beside.path())?;
    put_in_place(beside, folder, parent)?;
    Ok(manifest)
}

/// May a folder be made here? Only GeoCLIP's own, or an empty one, is ever replaced.
fn check_target(folder: &Path, overwrite: bool) -> Result<(), GeoclipError> {
    if folder.symlink_metadata().is_err() {
        return Ok(());
    }
    if !overwrite {
        return Err(GeoclipError::Exists { path: folder.to_owned() });
    }
    let is_empty = || std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none());
    let is_ours = |text: Vec<u8>| serde_json::from_slice::<Manifest>(&text).is_ok();
    if std::fs::read(folder.join(MANIFEST)).is_ok_and(is_ours) || is_empty() {
        return Ok(());
    }
    Err(GeoclipError::NotOurs { path: folder.to_owned() })
}

/// The old folder steps aside first; it comes back if the new one cannot take its place.
fn put_in_place(beside: tempfile::TempDir, folder: &Path, parent: &Path) -> Result<(), GeoclipError> {
    let io = |error| GeoclipError::Io { path: folder.to_owned(), error };
    let aside =
        tempfile::Builder::new().prefix(".geoclip-old-").tempdir_in(parent).map_err(GeoclipError::io(parent))?;
    let old = aside.path().join("old");
    let had = folder.symlink_metadata().is_ok();
    if had {
        std::fs::rename(folder, &old).map_err(io)?;
    }
    if let Err(error) = std::fs::rename(beside.path(), folder) {
        if had && std::fs::rename(&old, folder).is_err() {
            // It stays where it is, under its other name, and is not removed.
            let _ = aside.keep();
        }
        return Err(io(error));
    }
    // The folder has moved: nothing is left for the guard to remove.
    let _ = beside.keep();
    sync(parent)
}

/// Makes what was written to a file or folder last.
fn sync(path: &Path) -> Result<(), GeoclipError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(GeoclipError::io(path))
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), GeoclipError> {
    let mut file = File::create(path).map_err(GeoclipError::io(path))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(GeoclipError::io(path))
}
