//! The writer of a run's event file.
//!
//! Every record is one write to the file: a killed process loses nothing that it has said, and at most the last record is
//! torn. There is one writer per run; who calls sees to that.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use prost::Message;

use super::error::BoardError;
use super::event::{
    CLASS_BLOBS, CLASS_TENSOR, Event, FILE_VERSION, Payload, SESSION_START, SessionLog, Summary, SummaryMetadata,
    SummaryValue, TensorProto, What, since_1970,
};
use super::histogram::Histogram;
use super::hparams::session_end;
use super::record::frame;
use super::resume::{PREFIX, event_files, trim};
use crate::draw::Picture;
use crate::files::FileError;

/// Something that TensorBoard can show under a tag.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// A number, written as f32; one that is not finite is shown as such.
    Scalar(f64),
    /// Markdown.
    Text(&'a str),
    /// How many values lie where.
    Histogram(&'a Histogram),
    /// A picture.
    Image(&'a Picture),
}

/// The event file of one attempt of a run.
#[derive(Debug)]
pub struct Board {
    file: File,
    path: PathBuf,
    /// Length of all whole records.
    bytes: u64,
    /// No smaller step may come.
    step: u64,
}

impl Board {
    /// Opens a new event file in `folder`, which is made where it is missing.
    ///
    /// Resumed from a checkpoint at step S, everything after S is first removed from the files of earlier attempts, and a
    /// TensorBoard that is watching is told to forget it. With no step, the run begins: all that earlier attempts wrote goes.
    pub fn open(folder: &Path, resume_step: Option<u64>) -> Result<Self, BoardError> {
        let step = resume_step.map_or(0, |step| step.saturating_add(1));
        let mut board = Self::beside_trimmed(folder, step, |earlier| trim(earlier, resume_step))?;
        if resume_step.is_some() {
            board.append(step, What::SessionLog(SessionLog { status: SESSION_START }))?;
        }
        Ok(board)
    }

    /// Opens one more event file in `folder` for what is said of `step` later on; nothing that stands there is changed.
    pub fn beside(folder: &Path, step: u64) -> Result<Self, BoardError> {
        Self::beside_trimmed(folder, step, |_| Ok(()))
    }

    fn beside_trimmed(
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
        board.append(0, What::FileVersion(FILE_VERSION.to_owned()))?;
        Ok(board)
    }

    /// The file that is written.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The smallest step that may be written now: what an attempt says of itself (its configuration) is said here.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Numbers of one step: one record, one time.
    pub fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> Result<(), BoardError> {
        let values: Vec<_> = values.iter().map(|(tag, value)| (*tag, Value::Scalar(*value))).collect();
        self.write(step, &values)
    }

    /// Markdown under a tag.
    pub fn text(&mut self, step: u64, tag: &str, markdown: &str) -> Result<(), BoardError> {
        self.write(step, &[(tag, Value::Text(markdown))])
    }

    /// A picture under a tag.
    pub fn image(&mut self, step: u64, tag: &str, image: &Picture) -> Result<(), BoardError> {
        self.write(step, &[(tag, Value::Image(image))])
    }

    /// Histograms of one step: one record, one time.
    pub fn histograms(&mut self, step: u64, histograms: &[(String, Histogram)]) -> Result<(), BoardError> {
        let values: Vec<_> = histograms.iter().map(|(tag, found)| (tag.as_str(), Value::Histogram(found))).collect();
        self.write(step, &values)
    }

    /// Says that the run came to its end, one step behind everything else: a run that goes on after all takes it back.
    pub fn ended(&mut self) -> Result<(), BoardError> {
        self.step = self.step.saturating_add(1);
        self.append(self.step, What::Summary(Summary { value: vec![session_end()] }))
    }

    /// Values of one step: one record, one time. Steps may be equal to the one before, never smaller.
    pub fn write(&mut self, step: u64, values: &[(&str, Value<'_>)]) -> Result<(), BoardError> {
        if step < self.step {
            return Err(BoardError::Backwards { path: self.path.clone(), got: step, want: self.step });
        }
        if values.is_empty() {
            return Ok(());
        }
        let value = values.iter().map(|(tag, value)| summary_value(tag, *value)).collect();
        self.append(step, What::Summary(Summary { value }))?;
        self.step = step;
        Ok(())
    }

    fn append(&mut self, step: u64, what: What) -> Result<(), BoardError> {
        let wall_time = since_1970().as_secs_f64();
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        let record = frame(&Event { wall_time, step, what: Some(what) }.encode_to_vec());
        let written = self.file.write_all_at(&record, self.bytes);
        if written.is_err() {
            // Half a record must not stand before a whole one; where even this fails, the next resume cuts it off.
            let _ = self.file.set_len(self.bytes);
        }
        written.map_err(FileError::at(&self.path))?;
        self.bytes += record.len() as u64;
        Ok(())
    }
}

/// A new file whose name sorts behind those of all earlier ones: TensorBoard reads files in the order of their names.
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

/// Metadata as the plugins' `summary_v2.py` have them.
fn summary_value(tag: &str, value: Value<'_>) -> SummaryValue {
    let shown = |plugin, class, tensor| (Some(SummaryMetadata::of(plugin, Vec::new(), class)), Payload::Tensor(tensor));
    let (metadata, payload) = match value {
        Value::Scalar(number) => (None, Payload::Simple(number as f32)),
        Value::Text(markdown) => shown("text", CLASS_TENSOR, TensorProto::string(markdown)),
        Value::Histogram(found) => shown("histograms", CLASS_TENSOR, TensorProto::triples(found.rows())),
        Value::Image(image) => shown("images", CLASS_BLOBS, image_tensor(image)),
    };
    SummaryValue { tag: tag.to_owned(), metadata, payload: Some(payload) }
}

/// Width, height, then the pictures of a step: here one.
fn image_tensor(image: &Picture) -> TensorProto {
    let size = |pixels: u32| pixels.to_string().into_bytes();
    TensorProto::strings(vec![size(image.width), size(image.height), image.png.clone()])
}

#[cfg(test)]
#[path = "board_tests.rs"]
mod tests;
