//! GeoCLIP on disk: a folder written by `geoclip import`, with a checksum for each file.
//!
//! ```text
//! geoclip.safetensors   the tensors of the wheel, f32: location.LocEnc{0,1,2}.*, image.{0,2}.*, logit_scale
//! gallery.csv           lat,lon: 100,000 places
//! LICENSE               GeoCLIP's licence (MIT)
//! manifest.json         format version, source of the weights, and length and xxh3 of the three files above
//! gallery-*.f32         cached embeddings of a gallery
//! ```
//!
//! Opening the folder verifies all checksums in the manifest, which takes 20 ms.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use locdiff_core::files::{FileError, Files, Written, measure, parent};
use locdiff_core::geo::Place;
use locdiff_core::tables;
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};
use twox_hash::XxHash3_64;

use super::error::GeoclipError;
use super::head::GeoclipHead;
use super::location::LocationEncoder;

const VERSION: u32 = 1;
pub(super) const WEIGHTS: &str = "geoclip.safetensors";
pub(super) const GALLERY: &str = "gallery.csv";
const LICENCE: &str = "LICENSE";
const MANIFEST: &str = "manifest.json";

/// The contents of `manifest.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GeoclipManifest {
    /// Version of the folder's format.
    pub version: u32,
    /// Origin of the weights.
    pub source: String,
    /// Length and checksum of each file, by file name.
    pub files: BTreeMap<String, Written>,
}

/// GeoCLIP's weights and gallery, whose checksums have been verified.
#[derive(Debug)]
pub struct Geoclip {
    folder: PathBuf,
    tensors: HashMap<String, Tensor>,
    places: Vec<Place>,
    checksum: u64,
}

impl Geoclip {
    /// Opens a folder and verifies its checksums.
    pub fn open(folder: &Path) -> Result<Self, GeoclipError> {
        let (_, checksum) = verified_manifest(folder)?;
        let places = tables::read_places(&folder.join(GALLERY))?;
        let weights = folder.join(WEIGHTS);
        let tensors = Tensor::read_safetensors(&weights).map_err(|error| GeoclipError::damaged(&weights, error))?;
        Ok(Self { folder: folder.to_owned(), tensors: tensors.into_iter().collect(), places, checksum })
    }

    /// The folder that was opened.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The places of GeoCLIP's gallery.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// A checksum of all files that the manifest lists.
    pub fn checksum(&self) -> u64 {
        self.checksum
    }

    /// The location encoder on `device`.
    pub fn location_encoder(&self, device: Device) -> Result<LocationEncoder, GeoclipError> {
        LocationEncoder::new(&self.tensors, device)
    }

    /// The image head on `device`.
    pub fn image_head(&self, device: Device) -> Result<GeoclipHead, GeoclipError> {
        GeoclipHead::new(&self.tensors, device)
    }
}

/// The manifest of a folder, and a checksum of all files that it lists. Fails if a file does not match the manifest.
pub(super) fn verified_manifest(folder: &Path) -> Result<(GeoclipManifest, u64), GeoclipError> {
    let manifest = read_manifest(folder)?;
    let mut summary = Vec::new();
    for (name, entry) in &manifest.files {
        summary.extend(verified_checksum(folder, name, entry)?.to_le_bytes());
    }
    Ok((manifest, XxHash3_64::oneshot(&summary)))
}

fn read_manifest(folder: &Path) -> Result<GeoclipManifest, GeoclipError> {
    let path = folder.join(MANIFEST);
    let text = std::fs::read(&path).map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => {
            GeoclipError::Missing { folder: folder.display().to_string(), reason: format!("{MANIFEST} is missing") }
        }
        _ => FileError::at(&path)(error).into(),
    })?;
    let manifest: GeoclipManifest =
        serde_json::from_slice(&text).map_err(|error| GeoclipError::damaged(&path, error))?;
    if manifest.version != VERSION {
        return Err(GeoclipError::damaged(&path, format!("version is {}, wanted {VERSION}", manifest.version)));
    }
    if let Some(name) = [WEIGHTS, GALLERY].into_iter().find(|name| !manifest.files.contains_key(*name)) {
        return Err(GeoclipError::damaged(&path, format!("the manifest does not list {name}")));
    }
    Ok(manifest)
}

/// The checksum of a file. Fails if the file does not match the manifest.
fn verified_checksum(folder: &Path, name: &str, entry: &Written) -> Result<u64, GeoclipError> {
    let path = folder.join(name);
    let got = measure(&path).map_err(|error| match error.error.kind() {
        ErrorKind::NotFound => {
            GeoclipError::Missing { folder: folder.display().to_string(), reason: format!("{name} is missing") }
        }
        _ => error.into(),
    })?;
    let advice = "; import again with `locdiff-launch geoclip import --overwrite`";
    if got.bytes != entry.bytes {
        let reason = format!("the file has {} bytes, but {MANIFEST} says {}{advice}", got.bytes, entry.bytes);
        return Err(GeoclipError::damaged(&path, reason));
    }
    match u64::from_str_radix(&got.xxh3, 16) {
        Ok(checksum) if got == *entry => Ok(checksum),
        _ => {
            let reason = format!("the xxh3 checksum is {}, but {MANIFEST} says {}{advice}", got.xxh3, entry.xxh3);
            Err(GeoclipError::damaged(&path, reason))
        }
    }
}

/// Writes a folder of GeoCLIP weights. The folder is written under a temporary name and then renamed, so `folder` is
/// never incomplete. Fails if `folder` exists, unless `overwrite` is set and the folder is empty or holds GeoCLIP
/// weights.
pub fn write_folder(
    folder: &Path,
    source: &str,
    tensors: &[(String, Tensor)],
    gallery_csv: &[u8],
    licence: &[u8],
    overwrite: bool,
) -> Result<GeoclipManifest, GeoclipError> {
    check_target(folder, overwrite)?;
    let (disk, parent) = (Files::real(), parent(folder));
    disk.create_folders(parent)?;
    let temporary = tempfile::Builder::new().prefix(".geoclip-").tempdir_in(parent).map_err(FileError::at(parent))?;
    let path = |name: &str| temporary.path().join(name);
    let weights = path(WEIGHTS);
    Tensor::write_safetensors(tensors, &weights)?;
    File::open(&weights).and_then(|file| file.sync_all()).map_err(FileError::at(&weights))?;
    let written = [
        (WEIGHTS, measure(&weights)?),
        (GALLERY, disk.write_new(&path(GALLERY), gallery_csv)?),
        (LICENCE, disk.write_new(&path(LICENCE), licence)?),
    ];
    let files = written.map(|(name, written)| (name.to_owned(), written)).into();
    let manifest = GeoclipManifest { version: VERSION, source: source.to_owned(), files };
    let text = serde_json::to_vec_pretty(&manifest).expect("strings and numbers are always valid JSON");
    disk.write_new(&path(MANIFEST), &text)?;
    disk.sync_folder(temporary.path())?;
    put_in_place(&disk, temporary, folder)?;
    Ok(manifest)
}

/// Checks that `folder` may be written. An existing folder is replaced only if `overwrite` is set, and only if the
/// folder is empty or holds GeoCLIP weights.
fn check_target(folder: &Path, overwrite: bool) -> Result<(), GeoclipError> {
    if folder.symlink_metadata().is_err() {
        return Ok(());
    }
    if !overwrite {
        return Err(GeoclipError::Exists(folder.to_owned()));
    }
    let is_empty = || std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none());
    let is_ours = |text: Vec<u8>| serde_json::from_slice::<GeoclipManifest>(&text).is_ok();
    if std::fs::read(folder.join(MANIFEST)).is_ok_and(is_ours) || is_empty() {
        return Ok(());
    }
    Err(GeoclipError::NotOurs(folder.to_owned()))
}

/// Moves an existing folder aside and renames the new folder to `folder`. If the rename fails, the existing folder is
/// moved back.
fn put_in_place(disk: &Files, temporary: tempfile::TempDir, folder: &Path) -> Result<(), GeoclipError> {
    let parent = parent(folder);
    let aside = tempfile::Builder::new().prefix(".geoclip-old-").tempdir_in(parent).map_err(FileError::at(parent))?;
    let old = aside.path().join("old");
    let existed = folder.symlink_metadata().is_ok();
    if existed {
        disk.rename(folder, &old)?;
    }
    if let Err(error) = disk.rename(temporary.path(), folder) {
        if existed && disk.rename(&old, folder).is_err() {
            // The existing folder cannot be moved back, so keep it under its temporary name.
            let _ = aside.keep();
        }
        return Err(error.into());
    }
    // The temporary folder has been renamed, so the guard must not remove it.
    let _ = temporary.keep();
    Ok(disk.sync_folder(parent)?)
}
