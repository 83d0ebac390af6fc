//! Imports the PyPI wheel `geoclip` 1.3.0 into a folder of weights and gallery.
//!
//! The SHA-256 hash of the wheel is pinned. It is verified before anything is parsed, so only known bytes are parsed.
//! The `.pth` files in the wheel are zip archives of pickles. libtorch reads the weights of both encoders from
//! temporary files.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use locdiff_core::files::FileError;
use sha2::{Digest, Sha256};
use tch::Tensor;
use zip::ZipArchive;

use super::error::GeoclipError;
use super::folder::{GeoclipManifest, verified_manifest, write_folder};

/// SHA-256 hash of the published wheel `geoclip-1.3.0-py3-none-any.whl`.
pub const WHEEL_SHA256: &str = "08a93791166a279d52b95c466a952c75f17f654cc61bdf6ab20355325b564dec";

const SOURCE: &str = "PyPI geoclip 1.3.0";
const LICENCE: &str = "geoclip-1.3.0.dist-info/licenses/LICENSE";
const PLACES: &str = "geoclip/model/gps_gallery/coordinates_100K.csv";
/// Weight files in the wheel, each with the prefix that is added to the names of its tensors.
const WEIGHTS: [(&str, &str); 2] = [
    ("geoclip/model/weights/location_encoder_weights.pth", "location."),
    ("geoclip/model/weights/image_encoder_mlp_weights.pth", "image."),
];
/// A zip archive in the wheel, and the member of that archive that holds the logit scale as a four-byte number.
const LOGIT_SCALE: (&str, &str) = ("geoclip/model/weights/logit_scale_weights.pth", "logit_scale/data/0");

/// Reads the wheel and writes the folder `out`. Returns the manifest of the folder, and whether the folder was written.
/// Without `overwrite`, a folder that already has the wheel's weights stays as it is, and the wheel is not read. Fails
/// if the hash of the wheel is not [`WHEEL_SHA256`], or if `out` exists and may not be replaced (see [`write_folder`]).
pub fn import(wheel: &Path, out: &Path, overwrite: bool) -> Result<(GeoclipManifest, bool), GeoclipError> {
    if !overwrite && out.symlink_metadata().is_ok() {
        return match verified_manifest(out) {
            Ok((manifest, _)) if manifest.source == SOURCE => Ok((manifest, false)),
            _ => Err(GeoclipError::Exists(out.to_owned())),
        };
    }
    let mut file = File::open(wheel).map_err(FileError::at(wheel))?;
    check_hash(wheel, &mut file)?;
    let mut archive = ZipArchive::new(file).map_err(|error| GeoclipError::damaged(wheel, error))?;
    let scratch = tempfile::tempdir().map_err(FileError::at(&std::env::temp_dir()))?;
    let mut tensors = Vec::new();
    for (member, prefix) in WEIGHTS {
        let path = scratch.path().join("weights.pt");
        let bytes = read_member(wheel, &mut archive, member)?;
        std::fs::write(&path, &bytes).map_err(FileError::at(&path))?;
        for (name, tensor) in Tensor::loadz_multi(&path)? {
            tensors.push((format!("{prefix}{name}"), tensor));
        }
    }
    tensors.push(("logit_scale".to_owned(), logit_scale(wheel, &mut archive)?));
    let places = read_member(wheel, &mut archive, PLACES)?;
    let licence = read_member(wheel, &mut archive, LICENCE)?;
    let manifest = write_folder(out, SOURCE, &tensors, &lower_header(&places), &licence, overwrite)?;
    Ok((manifest, true))
}

fn check_hash(wheel: &Path, file: &mut File) -> Result<(), GeoclipError> {
    let mut digest = Sha256::new();
    std::io::copy(file, &mut digest).map_err(FileError::at(wheel))?;
    let got: String = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    if got != WHEEL_SHA256 {
        let reason =
            format!("sha256 is {got}, wanted {WHEEL_SHA256} ({SOURCE}); the file is damaged or is a different wheel");
        return Err(GeoclipError::damaged(wheel, reason));
    }
    Ok(file.rewind().map_err(FileError::at(wheel))?)
}

fn read_member(wheel: &Path, archive: &mut ZipArchive<File>, name: &str) -> Result<Vec<u8>, GeoclipError> {
    let mut member = archive.by_name(name).map_err(|error| GeoclipError::damaged(wheel, format!("{name}: {error}")))?;
    let mut bytes = Vec::new();
    member.read_to_end(&mut bytes).map_err(|error| GeoclipError::damaged(wheel, format!("{name}: {error}")))?;
    Ok(bytes)
}

fn logit_scale(wheel: &Path, archive: &mut ZipArchive<File>) -> Result<Tensor, GeoclipError> {
    let bytes = read_member(wheel, archive, LOGIT_SCALE.0)?;
    let damaged = |reason: &dyn std::fmt::Display| {
        GeoclipError::damaged(wheel, format!("{}: {}: {reason}", LOGIT_SCALE.0, LOGIT_SCALE.1))
    };
    let mut inner = ZipArchive::new(std::io::Cursor::new(bytes)).map_err(|error| damaged(&error))?;
    let mut value = [0; 4];
    let mut member = inner.by_name(LOGIT_SCALE.1).map_err(|error| damaged(&error))?;
    member.read_exact(&mut value).map_err(|error| damaged(&error))?;
    Ok(Tensor::f_from_slice(&[f32::from_le_bytes(value)])?.f_squeeze()?)
}

/// Changes the header `LAT,LON` to `lat,lon`, the column names in the tables that this program writes.
fn lower_header(csv: &[u8]) -> Vec<u8> {
    let end = csv.iter().position(|byte| *byte == b'\n').unwrap_or(csv.len());
    let mut lower = csv.to_vec();
    lower[..end].make_ascii_lowercase();
    lower
}
