//! The records of a run: logs, events, and the last failure.

use std::fs::OpenOptions;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use serde::Serialize;
use serde_json::Value;

use super::RunFolder;
use super::names::unix_s;
use crate::error::LaunchError;

const EVENTS: &str = "events.jsonl";
const FAILURE: &str = "failure.json";

impl RunFolder {
    /// Path of the log file of one worker in an attempt.
    pub fn log_path(&self, attempt: u32, rank: u32) -> PathBuf {
        self.path.join("logs").join(attempt.to_string()).join(format!("rank-{rank}.log"))
    }

    /// Appends one line to `events.jsonl`: the time, the name of the event, and the fields of `details`.
    pub fn event(&self, event: &str, details: &impl Serialize) -> Result<(), LaunchError> {
        #[derive(Serialize)]
        struct Line<'a, T> {
            unix_s: u64,
            event: &'a str,
            #[serde(flatten)]
            details: &'a T,
        }
        let path = self.path.join(EVENTS);
        let line = Line { unix_s: unix_s(SystemTime::now()), event, details };
        let line = serde_json::to_string(&line).expect("the details of an event can be written as JSON");
        let append = || -> std::io::Result<()> {
            let mut file = OpenOptions::new().read(true).append(true).create(true).open(&path)?;
            // A launcher that was killed may have left an incomplete line. In this case, begin a new line.
            let mut last = [b'\n'];
            if file.seek(SeekFrom::End(0))? > 0 {
                file.seek(SeekFrom::End(-1))?;
                file.read_exact(&mut last)?;
            }
            let begin = if last == [b'\n'] { "" } else { "\n" };
            file.write_all(format!("{begin}{line}\n").as_bytes())?;
            file.flush()
        };
        append().map_err(LaunchError::at(&path))
    }

    /// Appends an event with [`RunFolder::event`]. An error is only logged as a warning, because a run must not end
    /// when its events cannot be written. Several errors in a row cause one warning.
    pub fn note(&self, event: &str, details: &impl Serialize) {
        match self.event(event, details) {
            Ok(()) => self.events_failed.store(false, Ordering::Relaxed),
            Err(error) if !self.events_failed.swap(true, Ordering::Relaxed) => {
                tracing::warn!("cannot record an event: {error}; training continues without it");
            }
            Err(_) => {}
        }
    }

    /// Writes a description of a failure to `failure.json`.
    pub fn write_failure(&self, failure: &Value) -> Result<(), LaunchError> {
        let text = serde_json::to_vec_pretty(failure).expect("a JSON value can be serialised");
        self.files.write_atomically(&self.path.join(FAILURE), &text)?;
        Ok(())
    }

    /// Removes `failure.json`, if an earlier failure left one.
    pub fn clear_failure(&self) -> Result<(), LaunchError> {
        match self.files.remove_file(&self.path.join(FAILURE)) {
            Err(error) if error.error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }
}
