//! Writes a snapshot in a thread of its own while training goes on; at most one at a time.
//!
//! What a rank reports is on the disk: each file, and then its names in the folder. Tensors on a GPU are fetched here, on a stream
//! of the thread's own, so that training need not wait for it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use locdiff_core::files::{FileError, Files};
use locdiff_core::protocol::{CheckpointFile, PartsWritten, partial_name};
use serde_json::Value;
use tch::{Device, Tensor};

use super::error::CheckpointError;
use super::writer::{Staging, write_fetched, write_json};
use crate::native::cuda::{self, Event, Priority, Stream, with_stream};

/// One file of a snapshot.
#[derive(Debug)]
pub enum Part {
    /// Tensors that nobody else writes to any more.
    Tensors {
        /// Name of the file.
        name: String,
        /// By name.
        tensors: Vec<(String, Tensor)>,
        /// Texts that go with them.
        metadata: BTreeMap<String, String>,
    },
    /// Anything else.
    Json {
        /// Name of the file.
        name: String,
        /// What it says.
        value: Value,
    },
}

/// A rank's share of a checkpoint.
#[derive(Debug)]
pub struct Snapshot {
    /// Steps made.
    pub step: u64,
    /// The attempt that this worker belongs to.
    pub attempt: u32,
    /// Validation score at this step, where it was measured.
    pub score: Option<f64>,
    /// What this rank writes; may be nothing.
    pub parts: Vec<Part>,
    /// Where parts are on a GPU: when they are there.
    pub ready: Option<Event>,
}

/// The thread that writes.
#[derive(Debug)]
pub struct Background {
    files: Files,
    run_dir: PathBuf,
    writing: Option<JoinHandle<Result<PartsWritten, CheckpointError>>>,
    /// What parts on a GPU are fetched with.
    fetch: Option<Arc<Mutex<Fetch>>>,
}

/// A stream and memory for the copies from one GPU.
#[derive(Debug)]
struct Fetch {
    gpu: usize,
    stream: Stream,
    staging: Staging,
}

impl Background {
    /// For the checkpoints of one run, whose tensors are on `device`.
    pub fn new(files: Files, run_dir: PathBuf, device: Device) -> Result<Self, CheckpointError> {
        let fetch = match device {
            Device::Cuda(gpu) => {
                let (stream, staging) = (Stream::from_pool(Priority::Normal)?, Staging::new()?);
                Some(Arc::new(Mutex::new(Fetch { gpu, stream, staging })))
            }
            _ => None,
        };
        Ok(Self { files, run_dir, writing: None, fetch })
    }

    /// Begins to write a snapshot. Waits for the one before; what became of that is returned.
    pub fn submit(&mut self, snapshot: Snapshot) -> Result<Option<PartsWritten>, CheckpointError> {
        let before = self.wait()?;
        let (files, run_dir) = (self.files.clone(), self.run_dir.clone());
        let fetch = self.fetch.clone();
        let thread = std::thread::Builder::new().name("checkpoint".into());
        let writing = thread.spawn(move || match fetch {
            Some(fetch) => {
                // One thread at a time; after a panic in it the memory is as good as before.
                let fetch = fetch.lock().unwrap_or_else(PoisonError::into_inner);
                cuda::set_device(fetch.gpu)?;
                with_stream(fetch.stream, || write(&files, run_dir, &snapshot, Some(&fetch.staging)))?
            }
            None => write(&files, run_dir, &snapshot, None),
        });
        self.writing = Some(writing.map_err(FileError::at(&self.run_dir))?);
        Ok(before)
    }

    /// What was written since the last call, if it is finished.
    pub fn poll(&mut self) -> Result<Option<PartsWritten>, CheckpointError> {
        if self.writing.as_ref().is_some_and(JoinHandle::is_finished) { self.wait() } else { Ok(None) }
    }

    /// Waits for what is being written.
    pub fn wait(&mut self) -> Result<Option<PartsWritten>, CheckpointError> {
        let Some(writing) = self.writing.take() else { return Ok(None) };
        let written =
            writing.join().map_err(|_| CheckpointError::Internal("the checkpoint's thread panicked".into()))?;
        written.map(Some)
    }
}

impl Drop for Background {
    /// libtorch must not end under a thread that still reads tensors.
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::error!("{error}");
        }
    }
}

fn write(
    files: &Files,
    run_dir: PathBuf,
    snapshot: &Snapshot,
    staging: Option<&Staging>,
) -> Result<PartsWritten, CheckpointError> {
    let Snapshot { step, attempt, score, parts, ready } = snapshot;
    if let Some(ready) = ready {
        ready.synchronize()?;
    }
    let folder = run_dir.join(partial_name(*step, *attempt));
    let mut written = Vec::with_capacity(parts.len());
    if !parts.is_empty() {
        files.create_folder(&folder)?;
    }
    for part in parts {
        match write_part(files, &folder, part, staging) {
            Ok(file) => written.push(file),
            Err(error) => {
                // The disk may be full: what is of no use goes. The folder may have parts of others.
                for part in parts {
                    let _ = files.remove_file(&folder.join(part.name()));
                }
                return Err(error);
            }
        }
    }
    if !parts.is_empty() {
        files.sync_folder(&folder)?;
    }
    Ok(PartsWritten { step: *step, attempt: *attempt, files: written, score: *score })
}

impl Part {
    fn name(&self) -> &str {
        match self {
            Self::Tensors { name, .. } | Self::Json { name, .. } => name,
        }
    }
}

fn write_part(
    files: &Files,
    folder: &std::path::Path,
    part: &Part,
    staging: Option<&Staging>,
) -> Result<CheckpointFile, CheckpointError> {
    match part {
        Part::Tensors { name, tensors, metadata } => write_fetched(files, folder, (name, tensors), metadata, staging),
        Part::Json { name, value } => write_json(files, folder, name, value),
    }
}
