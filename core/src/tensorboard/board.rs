//! The writer of a run's event file.
//!
//! Records are written directly to the file, without a buffer in memory. If the process is killed, no finished record
//! is lost, and at most the last record is incomplete. The caller must make sure that a run has only one writer.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use prost::Message;

use super::error::BoardError;
use super::event::{
    CLASS_BLOBS, CLASS_TENSOR, Event, EventContent, FILE_VERSION, Payload, SESSION_START, SessionLog, Summary,
    SummaryMetadata, SummaryValue, TensorProto, since_1970,
};
use super::histogram::Histogram;
use super::hparams::session_end;
use super::record::frame;
use super::resume::{PREFIX, event_files, trim};
use crate::draw::Picture;
use crate::files::FileError;

/// The folder of a run's event files: the folder `tensorboard` of the run if it exists (older versions created it),
/// otherwise the folder of the run itself. TensorBoard names a run after the folder of its files.
pub fn board_folder(run: &Path) -> PathBuf {
    let own = run.join("tensorboard");
    if own.exists() { own } else { run.to_owned() }
}

/// A value that TensorBoard can show under a tag.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// A number. It is written as f32 and need not be finite.
    Scalar(f64),
    /// Markdown.
    Text(&'a str),
    /// A histogram.
    Histogram(&'a Histogram),
    /// A PNG picture.
    Image(&'a Picture),
}

/// An open event file. It belongs to one attempt of a run, or holds values that are added after the run.
#[derive(Debug)]
pub struct Board {
    file: File,
    path: PathBuf,
    /// Total length of the records written so far.
    bytes: u64,
    /// The smallest step that may be written.
    step: u64,
}

impl Board {
    /// Opens a new event file in `folder`, which is created if it does not exist.
    ///
    /// If the run resumes from a checkpoint at `resume_step`, all records after this step are first removed from the
    /// files of earlier attempts, and a running TensorBoard is told to forget them. If `resume_step` is `None`, the run
    /// starts from the beginning, and all records of earlier attempts are removed.
    pub fn open(folder: &Path, resume_step: Option<u64>) -> Result<Self, BoardError> {
        let step = resume_step.map_or(0, |step| step.saturating_add(1));
        let mut board = Self::open_after(folder, step, |earlier| trim(earlier, resume_step))?;
        if resume_step.is_some() {
            board.append(step, EventContent::SessionLog(SessionLog { status: SESSION_START }))?;
        }
        Ok(board)
    }

    /// Opens a new event file after a write to the previous file failed. `step` is the last step that was written
    /// completely. Everything after this step is removed from the earlier files.
    pub(super) fn reopen(folder: &Path, step: u64) -> Result<Self, BoardError> {
        Self::open_after(folder, step, |earlier| trim(earlier, Some(step)))
    }

    /// Opens an additional event file in `folder`, for values that are added to `step` after the run. Existing files
    /// are not changed.
    pub fn open_additional(folder: &Path, step: u64) -> Result<Self, BoardError> {
        Self::open_after(folder, step, |_| Ok(()))
    }

    /// Opens a new event file after `trim` has processed the existing ones.
    fn open_after(
        folder: &Path,
        step: u64,
        trim: impl FnOnce(&[PathBuf]) -> Result<(), BoardError>,
    ) -> Result<Self, BoardError> {
        std::fs::create_dir_all(folder).map_err(FileError::at(folder))?;
        let earlier = event_files(folder)?;
        trim(&earlier)?;
        let newest_s = earlier.iter().filter_map(|path| seconds_of(path)).max();
        let (file, path) = create(folder, newest_s)?;
        let mut board = Self { file, path, bytes: 0, step };
        board.append(0, EventContent::FileVersion(FILE_VERSION.to_owned()))?;
        Ok(board)
    }

    /// The path of the event file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The smallest step that may be written. Values about the attempt itself, such as its configuration, are written
    /// at this step.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Writes the numbers of one step as one record.
    pub fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> Result<(), BoardError> {
        let values: Vec<_> = values.iter().map(|(tag, value)| (*tag, Value::Scalar(*value))).collect();
        self.write(step, &values)
    }

    /// Writes Markdown under a tag.
    pub fn text(&mut self, step: u64, tag: &str, markdown: &str) -> Result<(), BoardError> {
        self.write(step, &[(tag, Value::Text(markdown))])
    }

    /// Writes a picture under a tag.
    pub fn image(&mut self, step: u64, tag: &str, image: &Picture) -> Result<(), BoardError> {
        self.write(step, &[(tag, Value::Image(image))])
    }

    /// Writes the histograms of one step as one record.
    pub fn histograms(&mut self, step: u64, histograms: &[(String, Histogram)]) -> Result<(), BoardError> {
        let values: Vec<_> = histograms.iter().map(|(tag, value)| (tag.as_str(), Value::Histogram(value))).collect();
        self.write(step, &values)
    }

    /// Records that the run has ended. The step of this record is one higher than the last step, so that the record is
    /// removed if the run is resumed.
    pub fn mark_ended(&mut self) -> Result<(), BoardError> {
        self.step = self.step.saturating_add(1);
        self.append(self.step, EventContent::Summary(Summary { value: vec![session_end()] }))
    }

    /// Writes the values of one step as one record. `step` must be at least [`Board::step()`].
    pub fn write(&mut self, step: u64, values: &[(&str, Value<'_>)]) -> Result<(), BoardError> {
        if step < self.step {
            return Err(BoardError::Backwards { path: self.path.clone(), got: step, want: self.step });
        }
        if values.is_empty() {
            return Ok(());
        }
        let value = values.iter().map(|(tag, value)| summary_value(tag, *value)).collect();
        self.append(step, EventContent::Summary(Summary { value }))?;
        self.step = step;
        Ok(())
    }

    fn append(&mut self, step: u64, content: EventContent) -> Result<(), BoardError> {
        let wall_time = since_1970().as_secs_f64();
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        let record = frame(&Event { wall_time, step, content: Some(content) }.encode_to_vec());
        let written = self.file.write_all_at(&record, self.bytes);
        if written.is_err() {
            // Cut off the partly written record, because the next record is written at the same position. If the next
            // record were shorter, the end of the partial record would remain after it. If the cut fails and no record
            // follows, the next resume removes the partial record.
            let _ = self.file.set_len(self.bytes);
        }
        written.map_err(FileError::at(&self.path))?;
        self.bytes += record.len() as u64;
        Ok(())
    }
}

/// Creates a file whose name sorts after the names of all earlier event files, because TensorBoard reads files in the
/// order of their names.
fn create(folder: &Path, newest_s: Option<u64>) -> Result<(File, PathBuf), BoardError> {
    let seconds = since_1970().as_secs().max(newest_s.map_or(0, |newest| newest.saturating_add(1)));
    let host =
        nix::unistd::gethostname().map_or_else(|_| "localhost".into(), |name| name.to_string_lossy().into_owned());
    let mut number = 0_u64;
    loop {
        let path = folder.join(format!("{PREFIX}{seconds:010}.{host}.{}.{number}", std::process::id()));
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(file) => return Ok((file, path)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(FileError::at(&path)(error).into()),
        }
    }
}

fn seconds_of(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix(PREFIX)?.split('.').next()?.parse().ok()
}

/// Builds a value. Texts, histograms and images get the metadata that the `summary_v2.py` of their plugin writes.
fn summary_value(tag: &str, value: Value<'_>) -> SummaryValue {
    let for_plugin =
        |plugin, class, tensor| (Some(SummaryMetadata::of(plugin, Vec::new(), class)), Payload::Tensor(tensor));
    let (metadata, payload) = match value {
        Value::Scalar(number) => (None, Payload::Simple(number as f32)),
        Value::Text(markdown) => for_plugin("text", CLASS_TENSOR, TensorProto::string(markdown)),
        Value::Histogram(histogram) => for_plugin("histograms", CLASS_TENSOR, TensorProto::triples(histogram.rows())),
        Value::Image(image) => for_plugin("images", CLASS_BLOBS, image_tensor(image)),
    };
    SummaryValue { tag: tag.to_owned(), metadata, payload: Some(payload) }
}

/// The tensor for TensorBoard's images plugin: the width, the height, and then the pictures of the step. This code
/// always writes one picture.
fn image_tensor(image: &Picture) -> TensorProto {
    let size = |pixels: u32| pixels.to_string().into_bytes();
    TensorProto::strings(vec![size(image.width), size(image.height), image.png.clone()])
}

#[cfg(test)]
#[path = "board_tests.rs"]
mod tests;
