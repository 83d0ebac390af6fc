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
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use locdiff_core::files::{FileError, Files, Written, measure, parent};
use locdiff_core::geo::Place;
use locdiff_core::tables;
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};
use twox_hash::XxHash3_64;

use super::error::GeoclipError;
use super::head::ImageHead;
use super::location::LocationEncoder;

const VERSION: u32 = 1;
pub(super) const WEIGHTS: &str = "geoclip.safetensors";
pub(super) const GALLERY: &str = "gallery.csv";
const LICENCE: &str = "LICENSE";
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
            summary.extend(checked(folder, name, entry)?.to_le_bytes());
        }
        let places = tables::read_places(&folder.join(GALLERY))?;
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
        _ => FileError::at(&path)(error).into(),
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

/// The checksum of a file that is as the manifest says.
fn checked(folder: &Path, name: &str, entry: &Written) -> Result<u64, GeoclipError> {
    let path = folder.join(name);
    let got = measure(&path).map_err(|error| match error.error.kind() {
        ErrorKind::NotFound => {
            GeoclipError::Missing { folder: folder.display().to_string(), reason: format!("no {name}") }
        }
        _ => error.into(),
    })?;
    let way_out = "; import it again with `locdiff-launch geoclip import --overwrite`";
    if got.bytes != entry.bytes {
        let reason = format!("{} bytes, {MANIFEST} says {}{way_out}", got.bytes, entry.bytes);
        return Err(GeoclipError::damaged(&path, reason));
    }
    match u64::from_str_radix(&got.xxh3, 16) {
        Ok(checksum) if got == *entry => Ok(checksum),
        _ => {
            let reason = format!("xxh3 is {}, {MANIFEST} says {}{way_out}", got.xxh3, entry.xxh3);
            Err(GeoclipError::damaged(&path, reason))
        }
    }
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
    let (disk, parent) = (Files::real(), parent(folder));
    disk.create_folders(parent)?;
    let beside = tempfile::Builder::new().prefix(".geoclip-").tempdir_in(parent).map_err(FileError::at(parent))?;
    let path = |name: &str| beside.path().join(name);
    let weights = path(WEIGHTS);
    Tensor::write_safetensors(tensors, &weights)?;
    File::open(&weights).and_then(|file| file.sync_all()).map_err(FileError::at(&weights))?;
    let written = [
        (WEIGHTS, measure(&weights)?),
        (GALLERY, disk.write_new(&path(GALLERY), gallery_csv)?),
        (LICENCE, disk.write_new(&path(LICENCE), licence)?),
    ];
    let files = written.map(|(name, written)| (name.to_owned(), written)).into();
    let manifest = Manifest { version: VERSION, source: source.to_owned(), files };
    let text = serde_json::to_vec_pretty(&manifest).expect("a manifest of strings and numbers is JSON");
    disk.write_new(&path(MANIFEST), &text)?;
    disk.sync_folder(beside.path())?;
    put_in_place(&disk, beside, folder)?;
    Ok(manifest)
}

/// May a folder be made here? Only GeoCLIP's own, or an empty one, is ever replaced.
fn check_target(folder: &Path, overwrite: bool) -> Result<(), GeoclipError> {
    if folder.symlink_metadata().is_err() {
        return Ok(());
    }
    if !overwrite {
        return Err(GeoclipError::Exists(folder.to_owned()));
    }
    let is_empty = || std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none());
    let is_ours = |text: Vec<u8>| serde_json::from_slice::<Manifest>(&text).is_ok();
    if std::fs::read(folder.join(MANIFEST)).is_ok_and(is_ours) || is_empty() {
        return Ok(());
    }
    Err(GeoclipError::NotOurs(folder.to_owned()))
}

/// The old folder steps aside first; it comes back if the new one cannot take its place.
fn put_in_place(disk: &Files, beside: tempfile::TempDir, folder: &Path) -> Result<(), GeoclipError> {
    let parent = parent(folder);
    let aside = tempfile::Builder::new().prefix(".geoclip-old-").tempdir_in(parent).map_err(FileError::at(parent))?;
    let old = aside.path().join("old");
    let had = folder.symlink_metadata().is_ok();
    if had {
        disk.rename(folder, &old)?;
    }
    if let Err(error) = disk.rename(beside.path(), folder) {
        if had && disk.rename(&old, folder).is_err() {
            // It stays where it is, under its other name, and is not removed.
            let _ = aside.keep();
        }
        return Err(error.into());
    }
    // The folder has moved: nothing is left for the guard to remove.
    let _ = beside.keep();
    Ok(disk.sync_folder(parent)?)
}
