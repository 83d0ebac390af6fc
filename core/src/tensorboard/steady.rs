//! A [`Board`] whose errors do not end a run. The first of several errors in a row is logged. An error closes the event
//! file. The next write cuts off the damaged end of the old file and opens a new file. When this succeeds, only the
//! values whose writes failed are missing.

use std::path::PathBuf;

use super::board::Board;
use super::error::BoardError;
use super::hparams::Hyperparameters;

/// The event files of a run during training.
#[derive(Debug)]
pub struct SteadyBoard {
    folder: PathBuf,
    hyperparameters: Hyperparameters,
    /// The configuration as Markdown.
    config: String,
    board: Option<Board>,
    /// The last step written; before the first write, the step that the run resumes from.
    last_step: u64,
    /// Whether this attempt has opened an event file.
    has_begun: bool,
    /// Whether the last write failed.
    is_broken: bool,
}

impl SteadyBoard {
    /// Opens the event files in `folder` for a run that resumes at `resume_step`, and writes its hyperparameters and
    /// configuration.
    pub fn open(folder: PathBuf, resume_step: u64, hyperparameters: Hyperparameters, config: String) -> Self {
        let (board, last_step, has_begun, is_broken) = (None, resume_step, false, false);
        let mut board = Self { folder, hyperparameters, config, board, last_step, has_begun, is_broken };
        board.write(|_| Ok(()));
        board
    }

    /// Calls `write` with the board. If `write` fails, logs the error, unless the previous write also failed.
    pub fn write(&mut self, write: impl FnOnce(&mut Board) -> Result<(), BoardError>) {
        match self.try_write(write) {
            Ok(()) if self.is_broken => {
                self.is_broken = false;
                tracing::info!("{}: TensorBoard's files can be written again", self.folder.display());
            }
            Ok(()) => {}
            Err(error) => {
                self.board = None;
                if !std::mem::replace(&mut self.is_broken, true) {
                    tracing::warn!("cannot write TensorBoard's files: {error}; training continues without them");
                }
            }
        }
    }

    fn try_write(&mut self, write: impl FnOnce(&mut Board) -> Result<(), BoardError>) -> Result<(), BoardError> {
        let mut board = match self.board.take() {
            Some(board) => board,
            None if self.has_begun => Board::reopen(&self.folder, self.last_step)?,
            None => self.begin()?,
        };
        self.has_begun = true;
        write(&mut board)?;
        self.last_step = self.last_step.max(board.step());
        self.board = Some(board);
        Ok(())
    }

    fn begin(&self) -> Result<Board, BoardError> {
        self.hyperparameters.save(&self.folder)?;
        let mut board = Board::open(&self.folder, Some(self.last_step))?;
        board.text(board.step(), "config", &self.config)?;
        Ok(board)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use prost::Message as _;

    use super::super::event::Event;
    use super::super::record::{Next, RecordReader};
    use super::*;
    use crate::files::FileError;

    /// The number of records of each step in all event files of a folder. Panics if a record is damaged.
    fn records(folder: &std::path::Path) -> BTreeMap<i64, usize> {
        let mut steps = BTreeMap::new();
        for entry in std::fs::read_dir(folder).expect("the folder can be read") {
            let path = entry.expect("the folder can be read").path();
            let file = std::fs::File::open(&path).expect("the file can be read");
            let mut reader = RecordReader::new(file).expect("the file can be read");
            loop {
                match reader.next().expect("the file can be read") {
                    Next::Record(data) => {
                        let event = Event::decode(data.as_slice()).expect("the record is an event");
                        *steps.entry(event.step).or_default() += 1;
                    }
                    Next::End => break,
                    _ => panic!("{} has a damaged record", path.display()),
                }
            }
        }
        steps
    }

    fn scalar(step: u64) -> impl FnOnce(&mut Board) -> Result<(), BoardError> {
        move |board| board.scalars(step, &[("loss/total", 1.0)])
    }

    #[test]
    fn writing_recovers_after_an_error_and_no_step_is_written_twice() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let mut board = SteadyBoard::open(folder.path().to_owned(), 0, Hyperparameters::default(), String::new());
        board.write(scalar(1));
        let broken = board.board.as_ref().expect("the board is open").path().to_owned();
        board.write(|_| {
            // A write that fails half-way leaves an incomplete record.
            let mut bytes = std::fs::read(&broken).expect("the file can be read");
            bytes.extend_from_slice(&[7; 5]);
            std::fs::write(&broken, bytes).expect("the test folder is writable");
            Err(FileError { path: broken.clone(), error: nix::errno::Errno::EIO.into() }.into())
        });
        assert!(board.is_broken);
        board.write(scalar(3));
        board.write(scalar(4));
        assert!(!board.is_broken);
        let found = records(folder.path());
        assert_eq!([1, 2, 3, 4].map(|step| found.get(&step).copied()), [Some(3), None, Some(1), Some(1)]);
    }

    #[test]
    fn files_that_cannot_be_opened_are_opened_later() {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let path = folder.path().join("tensorboard");
        std::fs::write(&path, "not a folder").expect("the test folder is writable");
        let mut board = SteadyBoard::open(path.clone(), 0, Hyperparameters::default(), String::new());
        board.write(scalar(1));
        assert!(board.is_broken);
        std::fs::remove_file(&path).expect("the file exists");
        board.write(scalar(2));
        assert_eq!(records(&path).get(&2), Some(&1));
    }
}
