//! Complete pieces of a prediction, as files in the folder `OUT.partial`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use locdiff_core::exit_code::{ExitCode, HasExitCode as _};
use locdiff_core::files::{FileWriter, Files, WRITING, parent};
use locdiff_core::prior_file::PriorFile;
use locdiff_core::protocol::{EvalJob, PredictedRow, PredictedRows, ToLauncher, piece_rows};
use serde_json::{Value, json};

use crate::error::{LaunchError, refuse, reported};
use crate::run_folder::RunLock;
use crate::supervisor::GangObserver;
use crate::terminal::Display;
use crate::verbs::eval::RowCollector;
use crate::verbs::eval::radii::first_difference;

/// Describes the prediction that the pieces belong to.
const JOB: &str = "job.json";
/// The version of the data that the pieces were predicted from.
const DATA: &str = "data";
/// The files that the prediction may have put in their places already.
const OUTPUTS: &str = "outputs.json";
const PIECE: &str = "piece-";
/// The copy of the prior.
const PRIOR: &str = "prior.geojson";
/// The other files of the folder: the descriptions, the copied input and prior, the unfinished outputs and the lock.
const OTHER_FILES: [&str; 8] = [JOB, DATA, OUTPUTS, "input.parquet", PRIOR, "out", "density", "lock"];

/// The folder, locked by this process.
pub(super) struct PiecesFolder {
    path: PathBuf,
    files: Files,
    is_removed: bool,
    _lock: RunLock,
}

/// Whether a prediction writes files of this name. A killed command may leave files with the name of an atomic write.
fn is_own(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let written = name.strip_prefix('.').and_then(|name| name.strip_suffix(WRITING));
    let name = written.unwrap_or(&name);
    OTHER_FILES.contains(&name) || name.starts_with(PIECE)
}

/// The files that an interrupted prediction with this folder may have put in their places already. They may be
/// replaced.
pub(super) fn placed(folder: &Path) -> Vec<PathBuf> {
    std::fs::read(folder.join(OUTPUTS)).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

impl PiecesFolder {
    /// Creates the folder, or opens the folder of an interrupted prediction. Fails if the folder is not the folder of a
    /// prediction.
    pub(super) fn open(path: &Path) -> Result<Self, LaunchError> {
        let files = Files::real();
        let entries = if path.exists() { files.entries(path)? } else { Vec::new() };
        if let Some(other) = entries.iter().find(|entry| !is_own(entry)) {
            refuse!(Exists, "{} is not a file of a prediction; move it away, or choose another --out", other.display());
        }
        files.create_folders(path)?;
        let lock = RunLock::take(path).map_err(|error| match error.exit_code() {
            ExitCode::RunHeld => {
                reported!(
                    RunHeld,
                    "another command uses {}; wait until it ends, or choose another --out",
                    path.display()
                )
            }
            _ => error,
        })?;
        Ok(Self { _lock: lock, path: path.to_owned(), files, is_removed: false })
    }

    /// Removes all pieces, and then what is known about them.
    pub(super) fn remove_pieces(&self) -> Result<(), LaunchError> {
        for number in self.done()? {
            self.files.remove_file(&self.piece(number))?;
        }
        [OUTPUTS, DATA, JOB].into_iter().try_for_each(|name| self.remove_if_there(name))
    }

    fn remove_if_there(&self, name: &str) -> Result<(), LaunchError> {
        let path = self.path.join(name);
        if path.exists() { Ok(self.files.remove_file(&path)?) } else { Ok(()) }
    }

    /// Forgets the version of the data. For data that is copied again by each command, so that its version changes,
    /// while the job describes its contents.
    pub(super) fn forget_data_version(&self) -> Result<(), LaunchError> {
        self.remove_if_there(DATA)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Records what is predicted. If the pieces in the folder belong to another prediction, removes them if `overwrite`
    /// is true, and fails otherwise. Returns the numbers of the complete pieces.
    pub(super) fn claim(&self, job: &Value, overwrite: bool) -> Result<Vec<u64>, LaunchError> {
        let path = self.path.join(JOB);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(LaunchError::at(path)(error)),
        };
        let recorded: Value = serde_json::from_str(&text).unwrap_or_default();
        let difference = first_difference(&recorded, job);
        // Pieces without a description could belong to any prediction.
        if text.is_empty() || overwrite && difference.is_some() {
            self.remove_pieces()?;
            self.files.write_atomically(&path, job.to_string().as_bytes())?;
        } else if let Some(name) = difference {
            refuse!(
                Exists,
                "{} holds pieces of a prediction with another value of `{name}`; repeat that command, or use --overwrite \
                 to start again",
                self.path.display()
            );
        }
        self.done()
    }

    /// Copies a prior to the folder, so that all workers read the contents that were checked. Returns the path of the
    /// copy.
    pub(super) fn keep_prior(&self, prior: &PriorFile) -> Result<PathBuf, LaunchError> {
        let path = self.path.join(PRIOR);
        self.files.write_atomically(&path, prior.bytes())?;
        Ok(path)
    }

    /// The numbers of the complete pieces, ascending.
    pub(super) fn done(&self) -> Result<Vec<u64>, LaunchError> {
        let number = |path: &PathBuf| path.file_name()?.to_str()?.strip_prefix(PIECE)?.parse().ok();
        let mut found: Vec<u64> = self.files.entries(&self.path)?.iter().filter_map(number).collect();
        found.sort_unstable();
        Ok(found)
    }

    /// The files of all pieces, in order, with the indices of their rows. Fails if one of them is missing.
    pub(super) fn files(&self, rows: u64) -> Result<Vec<(PathBuf, Range<u64>)>, LaunchError> {
        let size = piece_rows(rows);
        let count = rows.div_ceil(size);
        let (got, wanted): (Vec<u64>, Vec<u64>) = (self.done()?, (0..count).collect());
        if got != wanted {
            return Err(reported!(WorkerFailed, "{} of {count} pieces are complete: this is a bug", got.len()));
        }
        let indices = |number: u64| number * size..rows.min((number + 1) * size);
        Ok(wanted.into_iter().map(|number| (self.piece(number), indices(number))).collect())
    }

    fn piece(&self, number: u64) -> PathBuf {
        self.path.join(format!("{PIECE}{number:08}"))
    }

    /// Gives the outputs their final names. Each output is a pair of an unfinished file and its final name.
    pub(super) fn place(&self, outputs: &[(PathBuf, &Path)]) -> Result<(), LaunchError> {
        for (from, _) in outputs {
            std::fs::File::open(from).and_then(|file| file.sync_all()).map_err(LaunchError::at(from))?;
        }
        // If this command is killed between two outputs, a repeated command may replace the first one.
        let names = outputs.iter().map(|(_, to)| std::path::absolute(to).map_err(LaunchError::at(to)));
        let names = json!(names.collect::<Result<Vec<PathBuf>, LaunchError>>()?);
        self.files.write_atomically(&self.path.join(OUTPUTS), names.to_string().as_bytes())?;
        outputs.iter().try_for_each(|(from, to)| {
            self.files.rename(from, to)?;
            Ok(self.files.sync_folder(parent(to))?)
        })
    }

    /// Removes the folder.
    pub(super) fn remove(mut self) -> Result<(), LaunchError> {
        self.is_removed = true;
        // The outputs are in their places. A later command may not replace them, even if this one is killed here.
        self.remove_if_there(OUTPUTS)?;
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

/// Writes the rows of the workers to pieces. A piece gets its name when it is complete.
pub(super) struct Pieces<'a> {
    folder: &'a PiecesFolder,
    /// Numbers of the pieces that were complete before this attempt, ascending.
    done: Vec<u64>,
    /// The pieces that are not complete. Each worker writes one piece at a time.
    open: BTreeMap<u64, OpenPiece>,
    /// The version of the data; `None` before the first message.
    data_version: Option<String>,
    /// Rows of this attempt.
    received: u64,
    display: Display,
}

/// A piece that is not complete.
struct OpenPiece {
    unfinished: PathBuf,
    writer: FileWriter,
    /// Index of the row that comes next.
    next: u64,
}

impl<'a> Pieces<'a> {
    pub(super) fn new(folder: &'a PiecesFolder) -> Result<Self, LaunchError> {
        // Without pieces, it does not matter what the data was.
        let done = folder.done()?;
        let path = folder.path.join(DATA);
        let recorded = match std::fs::read_to_string(&path) {
            Ok(version) if !done.is_empty() => Some(version),
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(LaunchError::at(path)(error)),
            _ => None,
        };
        let (open, display) = (BTreeMap::new(), Display::new());
        Ok(Self { folder, done, open, data_version: recorded, received: 0, display })
    }

    fn add(&mut self, PredictedRows { of_rows, data_version, rows }: PredictedRows) -> Result<(), LaunchError> {
        self.check_data(data_version)?;
        // The last message of a worker has no rows.
        if rows.is_empty() {
            return Ok(());
        }
        let size = piece_rows(of_rows);
        for row in rows {
            self.add_row(&row, size, of_rows)?;
        }
        self.display.count("photos located", (self.done.len() as u64 * size + self.received).min(of_rows), of_rows);
        Ok(())
    }

    /// Records the version of the data before the first piece is written. Later versions must be the same.
    fn check_data(&mut self, data_version: String) -> Result<(), LaunchError> {
        match &self.data_version {
            None => {
                self.folder.files.write_atomically(&self.folder.path.join(DATA), data_version.as_bytes())?;
                self.data_version = Some(data_version);
            }
            Some(recorded) if *recorded != data_version => refuse!(
                DataChanged,
                "the input has changed since the pieces in {} were predicted; use --overwrite to start again",
                self.folder.path.display()
            ),
            Some(_) => {}
        }
        Ok(())
    }

    /// Appends a row to its piece. `size` is the number of rows in each piece but the last.
    fn add_row(&mut self, row: &PredictedRow, size: u64, of_rows: u64) -> Result<(), LaunchError> {
        let (number, files) = (row.index / size, &self.folder.files);
        let mut piece = match self.open.remove(&number) {
            Some(piece) => piece,
            None => {
                let unfinished = self.folder.path.join(format!(".{PIECE}{number:08}{WRITING}"));
                let writer = files.create(&unfinished)?;
                OpenPiece { unfinished, writer, next: number * size }
            }
        };
        if row.index != piece.next {
            return Err(reported!(WorkerFailed, "got row {}, wanted row {}: this is a bug", row.index, piece.next));
        }
        let mut line = serde_json::to_vec(row).expect("a row can be written as JSON");
        line.push(b'\n');
        piece.writer.put(&line)?;
        piece.next += 1;
        self.received += 1;
        if piece.next < of_rows.min((number + 1) * size) {
            self.open.insert(number, piece);
            return Ok(());
        }
        piece.writer.finish()?;
        files.rename(&piece.unfinished, &self.folder.piece(number))?;
        Ok(files.sync_folder(&self.folder.path)?)
    }
}

impl GangObserver for Pieces<'_> {
    fn report(&mut self, message: ToLauncher) -> Result<(), LaunchError> {
        if let ToLauncher::Predicted(predicted) = message { self.add(predicted) } else { Ok(()) }
    }
}

impl RowCollector for Pieces<'_> {
    fn begin(&mut self, job: &mut EvalJob) -> Result<(), LaunchError> {
        *self = Self::new(self.folder)?;
        job.done.clone_from(&self.done);
        Ok(())
    }

    fn end(&mut self) {
        self.display.finish();
    }
}

#[cfg(test)]
mod tests {
    use locdiff_core::files::Fault;
    use locdiff_core::protocol::RowDensity;

    use super::*;

    const ROWS: u64 = 600;

    /// A message with the rows from `first` to `end`, of [`ROWS`] rows.
    fn message(data_version: &str, first: u64, end: u64) -> ToLauncher {
        let row = |index: u64| PredictedRow {
            index,
            id: format!("photo-{index}"),
            answer: [1.0, 2.0],
            spread_km: 1.0,
            weight: 1.0,
            alternatives: Vec::new(),
            samples: Vec::new(),
            truth: None,
            density: RowDensity::default(),
        };
        let data_version = data_version.to_owned();
        ToLauncher::Predicted(PredictedRows { of_rows: ROWS, data_version, rows: (first..end).map(row).collect() })
    }

    /// Opens the folder of pieces, whose later operations use `files`.
    fn open(base: &Path, files: Files) -> PiecesFolder {
        let mut folder = PiecesFolder::open(&base.join("out.csv.partial")).expect("the folder can be created");
        folder.files = files;
        folder
    }

    #[test]
    fn pieces_are_complete_after_their_last_row_and_only_in_order() {
        let base = tempfile::tempdir().expect("a temporary folder can be created");
        let folder = open(base.path(), Files::real());
        let mut pieces = Pieces::new(&folder).expect("the folder can be read");
        // Two workers, each with its own pieces.
        for (first, end) in [(0, 0), (0, 200), (256, 500), (200, 256), (500, 512), (512, ROWS)] {
            pieces.report(message("v", first, end)).expect("the disk has room");
        }
        assert_eq!(folder.files(ROWS).expect("all pieces are complete").len(), 3);
        let text = std::fs::read_to_string(folder.piece(2)).expect("the piece can be read");
        let ids: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect();
        assert_eq!((ids.len(), &ids[0]["id"], &ids[87]["index"]), (88, &json!("photo-512"), &json!(599)));
        let mut again = Pieces::new(&folder).expect("the folder can be read");
        assert_eq!(again.done, [0, 1, 2]);
        let error = again.report(message("v", 3, 5)).expect_err("the piece begins with row 0");
        assert!(error.to_string().contains("got row 3, wanted row 0"), "{error}");
    }

    #[test]
    fn second_command_on_one_output_is_refused() {
        let base = tempfile::tempdir().expect("a temporary folder can be created");
        let _held = open(base.path(), Files::real());
        let error = PiecesFolder::open(&base.path().join("out.csv.partial")).err().expect("the folder is in use");
        assert_eq!(error.exit_code(), ExitCode::RunHeld);
        assert!(error.to_string().ends_with("choose another --out"), "{error}");
    }

    #[test]
    fn changed_data_is_refused_while_pieces_of_the_old_data_exist() {
        let base = tempfile::tempdir().expect("a temporary folder can be created");
        let folder = open(base.path(), Files::real());
        let begin = || Pieces::new(&folder).expect("the folder can be read");
        begin().report(message("old", 0, 100)).expect("the disk has room");
        begin().report(message("new", 0, 256)).expect("no piece was complete");
        let error = begin().report(message("old", 0, 0)).expect_err("a piece has other data");
        assert_eq!(error.exit_code(), ExitCode::DataChanged);
        folder.forget_data_version().expect("the folder is writable");
        begin().report(message("old", 0, 0)).expect("the version was forgotten");
        let mut pieces = begin();
        pieces.report(message("old", 256, 300)).expect("the disk has room");
        pieces.report(message("new", 300, 400)).expect_err("the data changed within an attempt");
    }

    /// A full disk is reported with the first file that cannot be written, and no piece is incomplete.
    #[test]
    fn full_disk_is_reported_at_once_with_the_name_of_the_file() {
        for operation in 0.. {
            let base = tempfile::tempdir().expect("a temporary folder can be created");
            let folder = open(base.path(), Files::failing(Fault::DiskFull, operation));
            let mut pieces = Pieces::new(&folder).expect("the folder can be read");
            let failed = [(0, 256), (256, 512), (512, ROWS)]
                .into_iter()
                .find_map(|(first, end)| pieces.report(message("v", first, end)).err().map(|error| (first, error)));
            for number in folder.done().expect("the folder can be read") {
                let text = std::fs::read_to_string(folder.piece(number)).expect("the piece can be read");
                assert_eq!(text.lines().count() as u64, (ROWS - number * 256).min(256));
            }
            let Some((first, error)) = failed else {
                assert!(operation > 6, "only {operation} operations can fail");
                return;
            };
            assert_eq!(error.exit_code(), ExitCode::Io);
            let text = error.to_string();
            assert!(text.contains("out.csv.partial") && text.contains("space"), "{text}");
            assert!(folder.done().expect("the folder can be read").len() as u64 <= first / 256, "{text}");
        }
    }

    #[test]
    fn command_that_was_killed_between_its_outputs_may_be_repeated() {
        let mut killed_between = false;
        for operation in 0.. {
            let base = tempfile::tempdir().expect("a temporary folder can be created");
            let [out, density] = ["out.csv", "density.parquet"].map(|name| base.path().join(name));
            let place = |files: Files| {
                let folder = open(base.path(), files);
                let files = ["density", "out", "piece-00000000"].map(|name| folder.path.join(name));
                for path in &files {
                    std::fs::write(path, "text").expect("the folder is writable");
                }
                let [one, other, _] = files;
                folder.place(&[(one, &density), (other, &out)])
            };
            let files = Files::failing(Fault::Crash, operation);
            let placed_once = place(files);
            let partial = base.path().join("out.csv.partial");
            for file in [&out, &density].into_iter().filter(|file| file.exists()) {
                assert!(placed(&partial).contains(file), "{} may not be replaced", file.display());
            }
            killed_between |= density.exists() && !out.exists();
            if placed_once.is_ok() {
                assert!(killed_between, "no operation is between the outputs");
                return;
            }
            place(Files::real()).expect("a repeated command succeeds");
            assert!(out.exists() && density.exists());
        }
    }
}
