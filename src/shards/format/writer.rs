//! Writes a folder of shards: checks rows, and writes Parquet files and their manifest.
//!
//! Invariant: the writer never puts an incomplete folder at its final path `out`. It writes all files to a folder
//! `OUT.partial-PID` next to `out`, where OUT is the name of `out` and PID is the process id. The manifest is written
//! last. Then the writer syncs the folder and renames it to `out`. If writing fails before the rename, `out` is
//! unchanged: it does not exist, or it is still the old folder.
//!
//! To replace an old folder (`overwrite`), the writer renames it to `OUT.partial-PID.replaced`, renames the new folder
//! to `out`, and then deletes the old folder. If the process is killed between the two renames, `out` does not exist
//! and the `.replaced` folder holds the old shards.
//!
//! `shards/README.md` specifies the format.

use locdiff_core::pulse;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use locdiff_core::files::{self, Files};
use locdiff_core::tables::PlacesPresent;

use super::checks;
use super::checksum::Checksum;
use super::columns::{ELEMENT_BYTES, view_column};
use super::file_writer::{ShardFileWriter, Template, WriterRows};
use super::manifest::{
    ImageHead, MANIFEST_NAME, Manifest, ManifestFile, SCHEMA_VERSION, SCHEMA_VERSION_WITH_COORDINATES,
};
use super::statistics::MomentSums;
use crate::shards::error::{ShardsError, Spot};

/// Default number of rows in a row group. `shards/README.md` explains the choice.
pub const ROWS_PER_GROUP: u32 = 1024;

/// Default size of a file, in bytes of embeddings.
pub const FILE_BYTES: u64 = 512 << 20;

/// Options of [`ShardWriter`].
#[derive(Debug, Clone)]
pub struct WriterOptions {
    /// Numbers per embedding.
    pub width: u32,
    /// Embeddings per row.
    pub views: u32,
    /// Description of where the rows come from, for the manifest.
    pub source: String,
    /// The retrieval head that can use the embeddings.
    pub image_head: ImageHead,
    /// Which rows have coordinates.
    pub places: PlacesPresent,
    /// Whether to replace the output folder if it exists. Only a folder of shards or an empty folder can be replaced.
    pub overwrite: bool,
    /// Rows per row group.
    pub rows_per_group: u32,
    /// Rows per file. The number is rounded down to whole row groups, but a file has at least one row group.
    pub rows_per_file: u64,
}

impl WriterOptions {
    /// Uses the defaults: coordinates in all rows, row groups of [`ROWS_PER_GROUP`] rows, files with about
    /// [`FILE_BYTES`] bytes of embeddings, and no overwriting.
    pub fn new(width: u32, views: u32, source: impl Into<String>, image_head: ImageHead) -> Self {
        let row_bytes = (u64::from(width) * u64::from(views) * ELEMENT_BYTES as u64).max(1);
        let rows_per_file = (FILE_BYTES / row_bytes).max(u64::from(ROWS_PER_GROUP));
        let (source, places, rows_per_group) = (source.into(), PlacesPresent::All, ROWS_PER_GROUP);
        Self { width, views, source, image_head, places, overwrite: false, rows_per_group, rows_per_file }
    }

    /// Number of rows in each file but the last.
    pub fn whole_file_rows(&self) -> u64 {
        let group = u64::from(self.rows_per_group).max(1);
        (self.rows_per_file / group).max(1) * group
    }

    fn check(&self) -> Result<(), ShardsError> {
        let fail = |text: &str| Err(ShardsError::Argument(text.to_owned()));
        match self {
            Self { width: 0, .. } => fail("the width of the embeddings is 0, wanted at least 1"),
            Self { views: 0, .. } => fail("the number of views is 0, wanted at least 1"),
            Self { rows_per_group: 0, .. } => fail("the number of rows per row group is 0, wanted at least 1"),
            _ => Ok(()),
        }
    }
}

/// A folder of shards that is being written.
pub struct ShardWriter {
    out: PathBuf,
    partial: PathBuf,
    options: WriterOptions,
    group: WriterRows,
    file: Option<ShardFileWriter>,
    template: Option<Template>,
    files: Vec<ManifestFile>,
    moments: MomentSums,
    rows: u64,
    /// Number of rows with coordinates.
    placed: u64,
}

impl ShardWriter {
    /// Starts to write a folder of shards. The finished folder gets the path `out`.
    pub fn create(out: &Path, options: WriterOptions) -> Result<Self, ShardsError> {
        options.check()?;
        let name = out
            .file_name()
            .ok_or_else(|| ShardsError::Argument(format!("{} does not end in a folder name", out.display())))?;
        check_target(out, options.overwrite)?;
        let partial = with_suffix(out, name, &format!(".partial-{}", std::process::id()));
        let parent = files::parent(out);
        fs::create_dir_all(parent).map_err(|error| ShardsError::io(parent, error))?;
        fs::create_dir(&partial).map_err(|error| ShardsError::io(&partial, error))?;
        let moments = MomentSums::new(options.width as usize);
        let group = WriterRows::new(options.views as usize);
        let (out, files) = (out.to_owned(), Vec::new());
        Ok(Self { out, partial, options, group, file: None, template: None, files, moments, rows: 0, placed: 0 })
    }

    /// Adds rows. If a row is bad, returns an error that names the row, and adds none of `rows`.
    pub fn push(&mut self, rows: &WriterRows) -> Result<(), ShardsError> {
        self.check(rows)?;
        let width = self.options.width as usize;
        let mut start = 0;
        while start < rows.ids.len() {
            let room = self.options.rows_per_group as usize - self.group.rows();
            let end = rows.ids.len().min(start + room);
            self.group.extend(rows, start..end, width);
            if self.group.rows() == self.options.rows_per_group as usize {
                self.write_group()?;
            }
            start = end;
        }
        if let Some(first) = rows.views.first() {
            self.moments.add(first);
        }
        self.rows += rows.ids.len() as u64;
        self.placed += rows.latitudes.iter().filter(|degrees| !degrees.is_nan()).count() as u64;
        Ok(())
    }

    /// Adds the files of another folder of shards, as hard links if possible. Its columns must be those of this writer,
    /// and its embeddings must be added to [`Self::moments`]. No rows may have been pushed.
    pub fn append(&mut self, folder: &Path, manifest: &Manifest) -> Result<(), ShardsError> {
        for file in &manifest.files {
            let name = file_name(self.files.len());
            let [from, to] = [folder.join(&file.name), self.partial.join(&name)];
            // Some file systems have no hard links.
            let linked = fs::hard_link(&from, &to).or_else(|_| fs::copy(&from, &to).map(drop));
            linked.map_err(|error| ShardsError::io(&from, error))?;
            self.files.push(ManifestFile { name, ..file.clone() });
        }
        self.rows += manifest.rows;
        self.placed += manifest.rows_with_coordinates.unwrap_or(manifest.rows);
        Ok(())
    }

    /// The sums over the embeddings of view 0.
    pub fn moments(&mut self) -> &mut MomentSums {
        &mut self.moments
    }

    /// Writes the last row group and the manifest, and renames the folder to its final name.
    pub fn finish(mut self) -> Result<Manifest, ShardsError> {
        if self.rows == 0 {
            return Err(ShardsError::Argument(format!("no rows to write to {}", self.out.display())));
        }
        if self.group.rows() > 0 {
            self.write_group()?;
        }
        self.end_file()?;
        let statistics = self.moments.statistics();
        let rows_with_coordinates = (self.placed < self.rows).then_some(self.placed);
        // Older programs can read shards in which all rows have coordinates.
        let schema_version =
            if rows_with_coordinates.is_some() { SCHEMA_VERSION } else { SCHEMA_VERSION_WITH_COORDINATES };
        let mut manifest = Manifest {
            schema_version,
            fingerprint: Checksum(0),
            rows: self.rows,
            rows_with_coordinates,
            width: self.options.width,
            views: self.options.views,
            source: self.options.source.clone(),
            image_head: self.options.image_head,
            mean: statistics.mean,
            standard_deviation: statistics.standard_deviation,
            files: std::mem::take(&mut self.files),
        };
        manifest.fingerprint = manifest.compute_fingerprint();
        Files::real().write_new(&self.partial.join(MANIFEST_NAME), &manifest.to_json()?)?;
        Files::real().sync_folder(&self.partial)?;
        self.rename()?;
        Ok(manifest)
    }

    /// Checks that the rows can be written.
    fn check(&self, rows: &WriterRows) -> Result<(), ShardsError> {
        let count = rows.ids.len();
        let argument = |reason: String| Err(ShardsError::Argument(format!("{}: {reason}", self.out.display())));
        let places = self.options.places;
        let placed = if places == PlacesPresent::None { 0 } else { count };
        if rows.latitudes.len() != placed || rows.longitudes.len() != placed {
            let (latitudes, longitudes) = (rows.latitudes.len(), rows.longitudes.len());
            return argument(format!(
                "{count} ids, {latitudes} latitudes and {longitudes} longitudes, wanted {placed} of both"
            ));
        }
        if rows.views.len() != self.options.views as usize {
            return argument(format!("the rows have {} views, wanted {}", rows.views.len(), self.options.views));
        }
        for (view, values) in rows.views.iter().enumerate() {
            let want = count * self.options.width as usize;
            if values.len() != want {
                let (got, width) = (values.len(), self.options.width);
                return argument(format!("view {view} has {got} numbers, wanted {want} ({count} rows of {width})"));
            }
        }
        let bad = |row: usize, column: String, reason: String| Err(ShardsError::bad(self.spot(row, column), reason));
        let is_missing =
            |row: usize| places == PlacesPresent::Some && rows.latitudes[row].is_nan() && rows.longitudes[row].is_nan();
        if let Some((row, reason)) = checks::first_outside(&rows.latitudes, (90.0, "latitude"), is_missing) {
            return bad(row, "lat".into(), reason);
        }
        if let Some((row, reason)) = checks::first_outside(&rows.longitudes, (180.0, "longitude"), is_missing) {
            return bad(row, "lon".into(), reason);
        }
        for (view, values) in rows.views.iter().enumerate() {
            if let Some((index, reason)) = checks::first_not_finite(values) {
                return bad(index / self.options.width as usize, view_column("embedding", view), reason);
            }
        }
        Ok(())
    }

    /// Where row `row` of a call to [`ShardWriter::push`] would be written, for error messages.
    fn spot(&self, row: usize, column: String) -> Spot {
        let per_group = u64::from(self.options.rows_per_group);
        let groups_per_file = self.options.whole_file_rows() / per_group;
        let waiting = self.group.rows() as u64 + row as u64;
        let group = self.file.as_ref().map_or(0, |file| file.row_groups.len()) as u64 + waiting / per_group;
        let index = self.files.len() + (group / groups_per_file) as usize;
        let file = self.out.join(file_name(index)).display().to_string();
        let row_group = u32::try_from(group % groups_per_file).ok();
        Spot { file, row_group, column: Some(column), row: Some(waiting % per_group) }
    }

    fn write_group(&mut self) -> Result<(), ShardsError> {
        pulse::advance();
        let WriterOptions { width, views, places, .. } = self.options;
        if self.file.is_none() {
            let name = file_name(self.files.len());
            self.file = Some(ShardFileWriter::create(&self.partial, name, (width, views), places)?);
        }
        let file = self.file.as_mut().expect("a missing file was just created");
        file.write(&mut self.group, &mut self.template)?;
        if file.rows >= self.options.whole_file_rows() {
            self.end_file()?;
        }
        Ok(())
    }

    fn end_file(&mut self) -> Result<(), ShardsError> {
        if let Some(file) = self.file.take() {
            self.files.push(file.finish()?);
        }
        Ok(())
    }

    /// Renames the complete folder to its final name, and deletes the old folder if there is one.
    fn rename(&self) -> Result<(), ShardsError> {
        let io = |error| ShardsError::io(&self.out, error);
        check_target(&self.out, self.options.overwrite)?;
        let replaced = with_suffix(&self.partial, self.partial.file_name().unwrap_or_default(), ".replaced");
        let exists = self.out.exists();
        if exists {
            fs::rename(&self.out, &replaced).map_err(io)?;
        }
        if let Err(error) = fs::rename(&self.partial, &self.out) {
            if exists {
                // Restore the old folder. If that fails too, the old folder stays at the path `replaced`.
                let _ = fs::rename(&replaced, &self.out);
            }
            return Err(io(error));
        }
        Files::real().sync_folder(files::parent(&self.out))?;
        if exists {
            fs::remove_dir_all(&replaced).map_err(|error| ShardsError::io(&replaced, error))?;
        }
        Ok(())
    }
}

impl Drop for ShardWriter {
    fn drop(&mut self) {
        // Deletes the unfinished folder. After a successful `finish`, this folder does not exist.
        let _ = fs::remove_dir_all(&self.partial);
    }
}

/// Replaces the last component of `path` by `name` followed by `suffix`.
fn with_suffix(path: &Path, name: &OsStr, suffix: &str) -> PathBuf {
    let mut name = name.to_owned();
    name.push(suffix);
    path.with_file_name(name)
}

fn file_name(index: usize) -> String {
    format!("part-{index:05}.parquet")
}

/// Checks that `out` may be written: nothing exists at `out`, or `overwrite` is set and `out` is a folder of shards or
/// an empty folder.
pub fn check_target(out: &Path, overwrite: bool) -> Result<(), ShardsError> {
    let Ok(found) = fs::symlink_metadata(out) else { return Ok(()) };
    if !overwrite {
        return Err(ShardsError::Exists(out.to_owned()));
    }
    let empty = || fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_none());
    // Other folders of this project also have a manifest.json. Accept only a manifest of shards, of any version.
    let is_shard_manifest = |text: Vec<u8>| {
        let value: serde_json::Value = serde_json::from_slice(&text).unwrap_or_default();
        value["schema_version"].is_u64() && value["files"].is_array()
    };
    let is_shards = fs::read(out.join(MANIFEST_NAME)).is_ok_and(is_shard_manifest);
    if !found.is_dir() || !(is_shards || empty()) {
        let reason =
            "is not a folder of shards (it has no manifest.json of shards), so --overwrite does not replace it";
        return Err(ShardsError::Argument(format!("{} {reason}", out.display())));
    }
    Ok(())
}
