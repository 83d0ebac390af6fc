//! GeoCLIP's weights for tests. They are imported once from the wheel that `make setup` downloads, and all test
//! processes share them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use locdiff::geoclip::{self, Geoclip, GeoclipError};

/// Path of the wheel: the value of the environment variable `LOCDIFF_GEOCLIP_WHEEL`, or the file that `make setup` puts
/// into `.geoclip/`.
pub(crate) fn wheel() -> PathBuf {
    let named = std::env::var_os("LOCDIFF_GEOCLIP_WHEEL").map(PathBuf::from);
    let path =
        named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(".geoclip/geoclip-1.3.0-py3-none-any.whl"));
    assert!(path.exists(), "{} is missing; run `make setup`", path.display());
    path
}

/// A folder with the real weights and the first 4,096 places of the gallery. Embedding so few places takes only half a
/// second.
pub(crate) fn folder() -> PathBuf {
    let base = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = base.join(format!("geoclip-{}-4096", &geoclip::WHEEL_SHA256[..8]));
    for _ in 0..3 {
        if Geoclip::open(&folder).is_ok() {
            return folder;
        }
        make(base, &folder);
    }
    panic!("cannot create {} in three attempts", folder.display());
}

/// Creates `folder`. If several test processes create it at once, the first process to rename its temporary folder
/// succeeds, and the others use the result.
fn make(base: &Path, folder: &Path) {
    let scratch = tempfile::tempdir_in(base).expect("a temporary folder can be created");
    let whole = scratch.path().join("whole");
    geoclip::import(&wheel(), &whole, false).expect("the wheel is valid");
    let tensors = tch::Tensor::read_safetensors(whole.join("geoclip.safetensors")).expect("just written");
    let text = std::fs::read_to_string(whole.join("gallery.csv")).expect("just written");
    let short: String = text.split_inclusive('\n').take(4097).collect();
    match geoclip::write_folder(folder, "test", &tensors, short.as_bytes(), b"", false) {
        Ok(_) => {}
        Err(GeoclipError::Exists(_) | GeoclipError::Io(_)) => std::thread::sleep(Duration::from_millis(20)),
        Err(error) => panic!("cannot write the folder of weights: {error}"),
    }
}
