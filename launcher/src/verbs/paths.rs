//! Before a worker starts, checks the paths that come from flags or from the configuration, so that an error names the
//! flag or the field.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use locdiff_core::files::parent;
use locdiff_core::text::nearest;
use nix::unistd::{AccessFlags, access};

use crate::error::{LaunchError, refuse, reported};

/// Fails if the file cannot be read. `name` is the flag or the field that the path comes from.
pub(super) fn require_file(name: &str, path: &Path) -> Result<(), LaunchError> {
    match File::open(path).and_then(|file| file.metadata()) {
        Ok(found) if found.is_dir() => refuse!(Io, "{name}: {} is a folder, wanted a file", path.display()),
        Ok(_) => Ok(()),
        Err(error) => Err(unreadable(name, path, error)),
    }
}

/// The file of GeoCLIP's gallery in the folder `retrieval.geoclip`.
pub(super) fn geoclip_gallery(folder: &str) -> Result<PathBuf, LaunchError> {
    let file = Path::new(folder).join("gallery.csv");
    if !file.is_file() {
        refuse!(NoData, "no gallery at {}; `locdiff-launch geoclip import` makes it", file.display());
    }
    Ok(file)
}

fn unreadable(name: &str, path: &Path, error: io::Error) -> LaunchError {
    let shown = path.display();
    match error.kind() {
        ErrorKind::NotFound => reported!(Io, "{name}: no file at {shown}; {}", advice(path)),
        ErrorKind::PermissionDenied => reported!(Io, "{name}: {shown}: {error}; change its permissions"),
        _ => LaunchError::at(path)(error).about(name),
    }
}

/// Advice about the missing file `path`: names a file in the same folder with a similar name. If there is no such file,
/// names the folder that was searched.
fn advice(path: &Path) -> String {
    let folder = parent(path);
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let wanted = path.file_name().unwrap_or_default().to_string_lossy();
    match nearest(&wanted, names.iter().map(String::as_str)).first() {
        Some(similar) => format!("did you mean {}?", path.with_file_name(similar).display()),
        None if folder.is_dir() => format!("check the name; the folder is {}", full(folder).display()),
        None => format!("check the path; there is no folder {}", full(folder).display()),
    }
}

fn full(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Fails if the file or folder exists and may not be replaced, or if it cannot be created. `name` is the flag or the
/// field that the path comes from.
pub(super) fn require_new(name: &str, path: &Path, overwrite: bool) -> Result<(), LaunchError> {
    if !overwrite && path.symlink_metadata().is_ok() {
        refuse!(Exists, "{name}: {} exists; use --overwrite to replace it", path.display());
    }
    require_writable(parent(path)).map_err(|error| error.about(name))
}

/// Fails if the folder is not writable. If the folder does not exist, its nearest existing parent must be writable.
pub(super) fn require_writable(folder: &Path) -> Result<(), LaunchError> {
    let nearest = existing(folder);
    if !nearest.is_dir() {
        refuse!(Io, "{} is not a folder; choose another folder", nearest.display());
    }
    access(&nearest, AccessFlags::W_OK)
        .map_err(|error| reported!(Io, "{} is not writable: {error}; choose another folder", nearest.display()))
}

/// `path` itself if it exists, else its nearest parent that exists.
pub(super) fn existing(path: &Path) -> PathBuf {
    let start = full(path);
    start.ancestors().find(|path| path.exists()).map_or_else(|| PathBuf::from("/"), Path::to_owned)
}

#[cfg(test)]
mod tests {
    use locdiff_core::exit_code::{ExitCode, HasExitCode};

    use super::*;

    #[test]
    fn missing_file_is_named_with_its_flag_and_a_similar_file() {
        let base = tempfile::tempdir().expect("a temporary folder can be created");
        let at = |name: &str| base.path().join(name);
        std::fs::write(at("coordinates.csv"), "lat,lon\n").expect("the folder is writable");
        require_file("--table", &at("coordinates.csv")).expect("the file exists");
        let error = require_file("--table", &at("coordinate.csv")).expect_err("there is no such file");
        assert_eq!(error.exit_code(), ExitCode::Io);
        let (got, want) = (at("coordinate.csv"), at("coordinates.csv"));
        assert_eq!(
            error.to_string(),
            format!("--table: no file at {}; did you mean {}?", got.display(), want.display())
        );
        for (path, part) in [
            ("x/embeddings.npy", "there is no folder"),
            ("zzz", "check the name; the folder is"),
            ("coordinates.csv/a", "--table: "),
        ] {
            let text = require_file("--table", &at(path)).expect_err("there is no such file").to_string();
            assert!(text.contains(part) && text.starts_with("--table: "), "{text}");
        }
        let text = require_file("--table", base.path()).expect_err("it is a folder").to_string();
        assert!(text.ends_with("is a folder, wanted a file"), "{text}");
    }

    #[test]
    fn output_must_be_new_and_in_a_folder_that_exists_or_can_be_created() {
        let base = tempfile::tempdir().expect("a temporary folder can be created");
        let file = base.path().join("file");
        std::fs::write(&file, "text").expect("the folder is writable");
        require_new("--out", &base.path().join("a/b"), false).expect("the folders can be created");
        require_new("--out", &file, true).expect("the file may be replaced");
        let error = require_new("--out", &file, false).expect_err("the file exists");
        assert_eq!(error.exit_code(), ExitCode::Exists);
        let text = require_new("--out", &file.join("a/b"), false).expect_err("a file is not a folder").to_string();
        assert_eq!(text, format!("--out: {} is not a folder; choose another folder", file.display()));
        assert_eq!(existing(&base.path().join("a/b/c")), base.path());
    }
}
