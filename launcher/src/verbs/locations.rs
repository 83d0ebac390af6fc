//! Checks the locations of shards before workers are started, so that a wrong path is reported at once.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use locdiff_core::config::ShardsConfig;
use locdiff_core::exit_code::FailureKind;
use locdiff_core::text::nearest;

use crate::error::{LaunchError, reported};

/// Largest number of names that a message lists.
const NAMES_MAX: usize = 12;

/// Fails if no shards can be read at `location`. The error names `origin`, the configuration field or the argument that
/// gave the location. Globs and URLs are not checked.
pub(super) fn require_shards(origin: &str, location: &str) -> Result<(), LaunchError> {
    let advice = match origin.strip_prefix("shards.") {
        Some(_) => format!("; use other data with `--set {origin}=PATH`"),
        None => String::new(),
    };
    if location.is_empty() {
        return Err(reported!(NoData, "no shards, because {origin} is empty{advice}"));
    }
    if !ShardsConfig::is_path(location) {
        return Ok(());
    }
    let path = Path::new(location);
    match found_at(path) {
        Ok(Found::Shards) => Ok(()),
        Ok(Found::Table) => Err(reported!(
            BadData,
            "{location} ({origin}) is a table, not shards; make shards with `locdiff-launch shards build --table \
             {location} --embeddings FILE.npy --out DIR`"
        )),
        Ok(Found::OtherFolder) => Err(reported!(
            NoData,
            "no shards at {location} ({origin}): it has neither a manifest.json nor a *.parquet file; {}{advice}",
            names_in(path, None)
        )),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            let demo = match location.starts_with("shards/demo/") {
                true => "; `locdiff-launch demo` makes the data of the demo",
                false => "",
            };
            Err(reported!(NoData, "no shards at {location} ({origin}); {}{demo}{advice}", names_near(path)))
        }
        // An outage is not an error yet, because the workers try again for some time.
        Err(error) if FailureKind::of_io(&error) == FailureKind::Outage => Ok(()),
        Err(error) => Err(reported!(Io, "cannot read the shards at {location} ({origin}): {error}{advice}")),
    }
}

/// What a path leads to.
enum Found {
    /// Probably shards: a file, or a folder with a manifest or Parquet files.
    Shards,
    /// A table.
    Table,
    /// A folder without shards.
    OtherFolder,
}

/// Finds out what is at `path`. Opens the file or, in a folder, one of the shard files, to check that it can be read.
fn found_at(path: &Path) -> io::Result<Found> {
    let found = fs::metadata(path)?;
    if found.is_dir() {
        let entries: Vec<PathBuf> =
            fs::read_dir(path)?.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<_>>()?;
        let is_shards = |entry: &&PathBuf| entry.ends_with("manifest.json") || has_extension(entry, "parquet");
        let Some(file) = entries.iter().find(is_shards) else { return Ok(Found::OtherFolder) };
        // Opening a pipe would block.
        if fs::metadata(file)?.is_file() {
            File::open(file)?;
        }
        return Ok(Found::Shards);
    }
    if found.is_file() {
        File::open(path)?;
    }
    Ok(if has_extension(path, "csv") { Found::Table } else { Found::Shards })
}

fn has_extension(path: &Path, wanted: &str) -> bool {
    path.extension().is_some_and(|found| found.eq_ignore_ascii_case(wanted))
}

/// Lists names that the user may have meant instead of `path`, which does not exist. The names come from the nearest
/// parent folder that exists.
fn names_near(path: &Path) -> String {
    let folder = path.ancestors().skip(1).find(|folder| folder.as_os_str().is_empty() || folder.is_dir());
    let folder = folder.unwrap_or(Path::new("/"));
    let missing = path.strip_prefix(folder).ok().and_then(|rest| rest.iter().next()?.to_str());
    names_in(folder, missing)
}

/// Lists the folders and Parquet files in `folder`: all of them if they are few, else those that resemble `name`.
fn names_in(folder: &Path, name: Option<&str>) -> String {
    let (folder, shown) = match folder.as_os_str().is_empty() {
        true => (Path::new("."), "the current folder".to_owned()),
        false => (folder, format!("{}/", folder.display().to_string().trim_end_matches('/'))),
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let is_listed = |path: &PathBuf| path.is_dir() || has_extension(path, "parquet");
    let paths = entries.map(|entry| entry.path()).filter(is_listed);
    let mut names: Vec<String> = paths.filter_map(|path| path.file_name()?.to_str().map(str::to_owned)).collect();
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    let similar = nearest(name.unwrap_or_default(), names.iter().map(String::as_str));
    match (names.len(), similar.as_slice()) {
        (0, _) => format!("{shown} has neither folders nor Parquet files"),
        (1..=NAMES_MAX, _) => format!("{shown} has: {}", names.join(", ")),
        (count, []) => format!("{shown} has {count} folders and Parquet files with other names"),
        (_, similar) => format!("did you mean {} in {shown}?", similar.join(" or ")),
    }
}

#[cfg(test)]
mod tests {
    use locdiff_core::exit_code::{ExitCode, HasExitCode};

    use super::*;

    fn error(origin: &str, location: &Path) -> LaunchError {
        require_shards(origin, &location.display().to_string()).expect_err("there are no shards")
    }

    #[test]
    fn names_in_the_nearest_folder_are_listed() {
        let scratch = tempfile::tempdir().expect("a temporary folder can be created");
        let shards = scratch.path().join("shards");
        for name in ["mp16", "demo", ".hidden"] {
            fs::create_dir_all(shards.join(name)).expect("the folder can be created");
        }
        let found = error("shards.train", &shards.join("mp61/part"));
        assert_eq!(found.exit_code(), ExitCode::NoData);
        let text = found.to_string();
        let (at, has) = (shards.join("mp61/part"), shards.display());
        let want = format!("no shards at {} (shards.train); {has}/ has: demo, mp16; use other", at.display());
        assert!(text.starts_with(&want) && !text.contains("simulate"), "{text}");
        for number in 0..20 {
            fs::create_dir(shards.join(format!("set-{number}"))).expect("the folder can be created");
        }
        let text = error("PATH", &shards.join("mp61")).to_string();
        assert!(text.contains("did you mean mp16 in ") && !text.contains("--set"), "{text}");
        let text = error("PATH", &shards.join("xyz")).to_string();
        assert!(text.contains("has 22 folders and Parquet files with other names"), "{text}");
        let text = error("shards.test", &shards).to_string();
        assert!(text.contains("(shards.test): it has neither a manifest.json"), "{text}");
        assert!(require_shards("shards.train", "shards/*.parquet").is_ok());
        assert!(require_shards("shards.validation", "").is_err());
    }

    #[test]
    fn tables_and_unreadable_paths_are_explained() {
        let scratch = tempfile::tempdir().expect("a temporary folder can be created");
        let table = scratch.path().join("photos.csv");
        fs::write(&table, "id,lat,lon\n").expect("the file can be written");
        let found = error("shards.train", &table);
        assert_eq!(found.exit_code(), ExitCode::BadData);
        let want = format!(
            "(shards.train) is a table, not shards; make shards with `locdiff-launch shards build --table {}",
            table.display()
        );
        assert!(found.to_string().contains(&want), "{found}");
        // A link to itself is a path that cannot be read. Missing permissions cannot be tested here, because root may
        // read everything.
        let link = scratch.path().join("loop");
        std::os::unix::fs::symlink(&link, &link).expect("the link can be created");
        let found = error("shards.test", &link);
        assert_eq!(found.exit_code(), ExitCode::Io);
        let want = format!("cannot read the shards at {} (shards.test): ", link.display());
        assert!(found.to_string().starts_with(&want), "{found}");
    }
}
