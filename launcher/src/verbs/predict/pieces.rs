//! Complete pieces of a prediction, as files in the folder `OUT.partial`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use locdiff_core::files::Files;
use locdiff_core::protocol::{PredictedRow, PredictedRows, ToLauncher, piece_rows};
use serde_json::Value;

use crate::error::{LaunchError, refuse, reported};
use crate::run_folder::RunLock;
use crate::supervisor::GangObserver;
use crate::terminal::Display;
use crate::verbs::eval::radii::first_difference;

/// Describes the prediction that the pieces belong to.
const JOB: &str = "job.json";
const PIECE: &str = "piece-";
/// The other files of the folder: the description, the copied input, the unfinished outputs and the lock.
const OTHER_FILES: [&str; 5] = [JOB, "input.parquet", "out", "density", "lock"];

/// The folder, locked by this process.
pub(super) struct PiecesFolder {
    path: PathBuf,
    files: Files,
    is_removed: bool,
    _lock: RunLock,
}

/// Whether a prediction writes files of this name.
fn is_own(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    OTHER_FILES.contains(&&*name) || name.starts_with(PIECE)
}

impl PiecesFolder {
    /// Creates the folder, or opens the folder of an interrupted prediction. With `overwrite`, removes the pieces of an
    /// interrupted prediction. Fails if the folder is not the folder of a prediction.
    pub(super) fn open(path: &Path, overwrite: bool) -> Result<Self, LaunchError> {
        let files = Files::real();
        let entries = if path.exists() { files.entries(path)? } else { Vec::new() };
        if let Some(other) = entries.iter().find(|entry| !is_own(entry)) {
            refuse!(Exists, "{} is not a file of a prediction; move it away, or choose another --out", other.display());
        }
        files.create_folders(path)?;
        let folder = Self { _lock: RunLock::take(path)?, path: path.to_owned(), files, is_removed: false };
        if overwrite {
            folder.remove_pieces()?;
        }
        Ok(folder)
    }

    /// Removes all pieces, and then the description of their prediction.
    fn remove_pieces(&self) -> Result<(), LaunchError> {
        for number in self.done()? {
            self.files.remove_file(&self.piece(number))?;
        }
        let job = self.path.join(JOB);
        if job.exists() { Ok(self.files.remove_file(&job)?) } else { Ok(()) }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Records what is predicted, or checks that the pieces in the folder belong to the same prediction. Returns the
    /// numbers of the complete pieces.
    pub(super) fn claim(&self, job: &Value) -> Result<Vec<u64>, LaunchError> {
        let path = self.path.join(JOB);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                // Pieces without a description could belong to any prediction.
                self.remove_pieces()?;
                self.files.write_atomically(&path, job.to_string().as_bytes())?;
                return self.done();
            }
            Err(error) => return Err(LaunchError::at(path)(error)),
        };
        let recorded: Value = serde_json::from_str(&text).unwrap_or_default();
        if let Some(name) = first_difference(&recorded, job) {
            refuse!(
                Exists,
                "{} holds pieces of a prediction with another value of `{name}`; repeat that command, or use --overwrite \
                 to start again",
                self.path.display()
            );
        }
        self.done()
    }

    /// The numbers of the complete pieces, ascending.
    pub(super) fn done(&self) -> Result<Vec<u64>, LaunchError> {
        let number = |path: &PathBuf| path.file_name()?.to_str()?.strip_prefix(PIECE)?.parse().ok();
        let mut found: Vec<u64> = self.files.entries(&self.path)?.iter().filter_map(number).collect();
        found.sort_unstable();
        Ok(found)
    }

    /// The files of all pieces, in order. Fails if one of them is missing.
    pub(super) fn files(&self, rows: u64) -> Result<Vec<PathBuf>, LaunchError> {
        let count = rows.div_ceil(piece_rows(rows));
        let (got, wanted): (Vec<u64>, Vec<u64>) = (self.done()?, (0..count).collect());
        if got != wanted {
            return Err(reported!(WorkerFailed, "{} of {count} pieces are complete: this is a bug", got.len()));
        }
        Ok(wanted.into_iter().map(|number| self.piece(number)).collect())
    }

    fn piece(&self, number: u64) -> PathBuf {
        self.path.join(format!("{PIECE}{number:08}"))
    }

    /// Removes the folder.
    pub(super) fn remove(mut self) -> Result<(), LaunchError> {
        self.is_removed = true;
        Ok(self.files.remove_folder(&self.path)?)
    }
}

impl Drop for PiecesFolder {
    /// Removes a folder without pieces, which is of no use to a later command.
    fn drop(&mut self) {
        if !self.is_removed && self.done().is_ok_and(|done| done.is_empty()) {
            // Ignore an error: the command has ended, and the folder does no harm.
            let _ = self.files.remove_folder(&self.path);
        }
    }
}

/// Collects the rows of the workers, and writes each piece when it is complete.
pub(super) struct Pieces<'a> {
    folder: &'a PiecesFolder,
    /// Pieces that are not complete, with their rows by index.
    open: BTreeMap<u64, BTreeMap<u64, PredictedRow>>,
    /// Rows of this attempt.
    received: u64,
    /// Pieces that were complete before this attempt.
    before: u64,
    failed: Option<LaunchError>,
    display: Display,
}

impl<'a> Pieces<'a> {
    pub(super) fn new(folder: &'a PiecesFolder, before: u64) -> Self {
        Self { folder, open: BTreeMap::new(), received: 0, before, failed: None, display: Display::new() }
    }

    /// Ends the progress bar. Fails if a piece could not be written.
    pub(super) fn finish(&mut self) -> Result<(), LaunchError> {
        self.display.finish();
        self.failed.take().map_or(Ok(()), Err)
    }

    fn add(&mut self, PredictedRows { of_rows, rows }: PredictedRows) -> Result<(), LaunchError> {
        let size = piece_rows(of_rows);
        for row in rows {
            let number = row.index / size;
            let piece = self.open.entry(number).or_default();
            piece.insert(row.index, row);
            self.received += 1;
            if piece.len() as u64 == size.min(of_rows - number * size) {
                let mut text = String::new();
                for row in self.open.remove(&number).into_iter().flat_map(BTreeMap::into_values) {
                    let line = serde_json::to_string(&row).expect("a row can be written as JSON");
                    let _ = writeln!(text, "{line}");
                }
                self.folder.files.write_atomically(&self.folder.piece(number), text.as_bytes())?;
            }
        }
        self.display.count("photos located", (self.before * size + self.received).min(of_rows), of_rows);
        Ok(())
    }
}

impl GangObserver for Pieces<'_> {
    fn report(&mut self, message: ToLauncher) {
        if let (ToLauncher::Predicted(predicted), None) = (message, &self.failed) {
            self.failed = self.add(predicted).err();
        }
    }
}
