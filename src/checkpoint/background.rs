//! Writes a snapshot in a background thread while training continues, one snapshot at a time.
//!
//! The result of a snapshot is returned only after the files and their folder have been fsynced. The thread copies
//! tensors from a GPU on a separate CUDA stream, so that training does not wait for the copy.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use locdiff_core::files::{FileError, Files};
use locdiff_core::protocol::{CheckpointFile, PartsWritten, partial_name};
use serde_json::Value;
use tch::{Device, Tensor};

use super::error::CheckpointError;
use super::writer::{Staging, write_fetched, write_json};
use crate::native::cuda::{self, CudaEvent, CudaStream, Priority, with_stream};

/// One file of a snapshot.
#[derive(Debug)]
pub enum Part {
    /// A safetensors file. No other code may write to its tensors.
    Tensors {
        /// Name of the file.
        name: String,
        /// Tensors with their names.
        tensors: Vec<(String, Tensor)>,
        /// Metadata of the file.
        metadata: BTreeMap<String, String>,
    },
    /// A JSON file.
    Json {
        /// Name of the file.
        name: String,
        /// Content of the file.
        value: Value,
    },
}

/// A rank's share of a checkpoint.
#[derive(Debug)]
pub struct Snapshot {
    /// Training steps done.
    pub step: u64,
    /// The attempt that this worker belongs to.
    pub attempt: u32,
    /// Validation score at this step, if it was measured.
    pub score: Option<f64>,
    /// The files that this rank writes. The list may be empty.
    pub parts: Vec<Part>,
    /// Event that the GPU signals when the tensors are complete; `None` on the CPU.
    pub ready: Option<CudaEvent>,
}

/// Writes the snapshots of one run in the background.
#[derive(Debug)]
pub struct Background {
    files: Files,
    run_dir: PathBuf,
    writing: Option<Writing>,
    /// An injected fault for the next snapshot.
    fault: Option<WriteFault>,
    /// Stream and buffer for copies from the GPU; `None` if the tensors are on the CPU.
    fetch: Option<Arc<Mutex<Fetch>>>,
}

/// A snapshot that is being written.
#[derive(Debug)]
struct Writing {
    thread: JoinHandle<Result<PartsWritten, CheckpointError>>,
    step: u64,
    since: Instant,
}

/// A fault to inject into a write.
#[derive(Debug)]
pub enum WriteFault {
    /// The write begins after this delay.
    Delay(Duration),
    /// The write fails with this error.
    Error(FileError),
}

/// A stream and a pinned buffer for copies from one GPU.
#[derive(Debug)]
struct Fetch {
    gpu: usize,
    stream: CudaStream,
    staging: Staging,
}

impl Background {
    /// A writer for the run in `run_dir`. The tensors of the run are on `device`.
    pub fn new(files: Files, run_dir: PathBuf, device: Device) -> Result<Self, CheckpointError> {
        let fetch = match device {
            Device::Cuda(gpu) => {
                let (stream, staging) = (CudaStream::from_pool(Priority::Normal)?, Staging::new()?);
                Some(Arc::new(Mutex::new(Fetch { gpu, stream, staging })))
            }
            _ => None,
        };
        Ok(Self { files, run_dir, writing: None, fault: None, fetch })
    }

    /// Waits for the previous snapshot, then starts to write this one. Returns the result of the previous snapshot;
    /// `None` if no result was pending.
    pub fn submit(&mut self, snapshot: Snapshot) -> Result<Option<PartsWritten>, CheckpointError> {
        let previous = self.wait()?;
        let (files, run_dir) = (self.files.clone(), self.run_dir.clone());
        let (fetch, fault, step) = (self.fetch.clone(), self.fault.take(), snapshot.step);
        let thread = std::thread::Builder::new().name("checkpoint".into());
        let thread = thread.spawn(move || {
            match fault {
                Some(WriteFault::Delay(delay)) => std::thread::sleep(delay),
                Some(WriteFault::Error(error)) => return Err(error.into()),
                None => {}
            }
            match fetch {
                Some(fetch) => {
                    // Only one checkpoint thread runs at a time, so the lock is free. If an earlier thread panicked,
                    // the lock is poisoned, but the buffer is still usable.
                    let fetch = fetch.lock().unwrap_or_else(PoisonError::into_inner);
                    cuda::set_device(fetch.gpu)?;
                    with_stream(fetch.stream, || write(&files, run_dir, &snapshot, Some(&fetch.staging)))?
                }
                None => write(&files, run_dir, &snapshot, None),
            }
        });
        let thread = thread.map_err(FileError::at(&self.run_dir))?;
        self.writing = Some(Writing { thread, step, since: Instant::now() });
        Ok(previous)
    }

    /// Stops waiting for the snapshot that is being written. Its thread continues in the background.
    pub fn abandon(&mut self) {
        self.writing = None;
    }

    /// Injects a fault into the next snapshot.
    pub fn inject(&mut self, fault: WriteFault) {
        self.fault = Some(fault);
    }

    /// The step of the snapshot that is being written, and how long the write has taken so far; `None` if no snapshot
    /// is being written.
    pub fn busy(&self) -> Option<(u64, Duration)> {
        let writing = self.writing.as_ref().filter(|writing| !writing.thread.is_finished())?;
        Some((writing.step, writing.since.elapsed()))
    }

    /// The result of the snapshot that is being written, if the thread has finished; `None` otherwise. Does not wait.
    pub fn poll(&mut self) -> Result<Option<PartsWritten>, CheckpointError> {
        if self.busy().is_none() { self.wait() } else { Ok(None) }
    }

    /// Waits for the snapshot that is being written and returns its result; `None` if no snapshot is being written.
    pub fn wait(&mut self) -> Result<Option<PartsWritten>, CheckpointError> {
        let Some(writing) = self.writing.take() else { return Ok(None) };
        let written =
            writing.thread.join().map_err(|_| CheckpointError::Internal("the checkpoint thread panicked".into()))?;
        written.map(Some)
    }
}

impl Drop for Background {
    /// Waits for the thread, because libtorch must not shut down while the thread still reads tensors.
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
                // The disk may be full, so remove the files of this rank. Keep the folder, because it may contain files
                // of other ranks.
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
