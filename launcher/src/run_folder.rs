//! A run on disk: its lock, configuration, attempts and checkpoints.
//!
//! ```text
//! RUN/config.toml         resolved configuration
//! RUN/lock                locked by the launcher of the run; contains its process id
//! RUN/attempt             number of the last attempt
//! RUN/step-NNNNNNNN/      a committed checkpoint (checkpoints/README.md)
//! RUN/latest              name of the newest checkpoint, for people and scripts
//! RUN/logs/ATTEMPT/  RUN/tensorboard/  RUN/events.jsonl  RUN/failure.json
//! ```
//! Only a [`RunFolder`], which holds the lock, changes the run. Readers ([`checkpoints`], [`newest_whole`]) need no
//! lock and rename nothing. The launcher gives a checkpoint its name `step-NNNNNNNN` once all files in its manifest are
//! on disk. So a checkpoint is whole unless it was damaged later. The number of an attempt is never used twice.

mod commit;
mod compare;
mod journal;
mod lock;
mod names;
mod resume;
mod scan;

use std::path::{Path, PathBuf};

use locdiff_core::config::{self, Layer, RunConfig};
use locdiff_core::files::Files;

use crate::error::{LaunchError, refuse, reported};

pub use commit::Commit;
pub use lock::RunLock;
pub use names::{CONFIG, LATEST, new_run_name, newest_run, utc_text};
pub use resume::ResumePoint;
pub use scan::{
    CheckpointRow, Condition, Depth, WholeCheckpoint, checkpoints, examine, newest_whole, whole_checkpoint,
};

/// A run that this process holds.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    files: Files,
    keep: usize,
    attempt: Option<u32>,
    /// The configuration of this start, if it differs from the one in the folder and has not replaced it yet.
    next_configuration: Option<String>,
    _lock: RunLock,
}

/// A run that was opened.
#[derive(Debug)]
pub struct OpenedRun {
    /// The run, locked by this process.
    pub folder: RunFolder,
    /// Whether the run is new.
    pub is_new: bool,
    /// Fields that differ from the previous configuration, one line each.
    pub changes: Vec<String>,
}

impl RunFolder {
    /// Creates the run `name` in `dir`, or opens it again. Fails if another launcher holds it, or if the configuration
    /// differs in a field that must not change within a run.
    pub fn open(files: Files, dir: &Path, name: &str, config: &RunConfig) -> Result<OpenedRun, LaunchError> {
        if !names::is_plain(name) {
            refuse!(Config, "checkpoint.run: is \"{name}\", wanted a folder name without slashes or a leading dot");
        }
        let path = dir.join(name);
        files.create_folders(&path)?;
        let lock = RunLock::take(&path)?;
        let keep = config.checkpoint.keep as usize;
        let mut folder = Self { path, files, keep, attempt: None, next_configuration: None, _lock: lock };
        let (is_new, changes) = folder.configure(name, config)?;
        Ok(OpenedRun { folder, is_new, changes })
    }

    /// Compares the configuration with the one in the folder. A run without checkpoints adopts the new one at once, any
    /// other run when [`RunFolder::keep_configuration`] is called.
    fn configure(&mut self, name: &str, config: &RunConfig) -> Result<(bool, Vec<String>), LaunchError> {
        let mut config = config.clone();
        name.clone_into(&mut config.checkpoint.run);
        let path = self.path.join(CONFIG);
        let text = toml::to_string(&config).expect("a checked configuration is plain TOML values");
        let previous = match std::fs::read_to_string(&path) {
            Ok(previous) => Some(previous),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(LaunchError::at(path)(error)),
        };
        let changes = match &previous {
            None => {
                self.refuse_checkpoints_without_configuration()?;
                Vec::new()
            }
            Some(_) => {
                let was = config::load(&[Layer::File(path.clone())])?.config;
                let found = compare::compare(&was, &config);
                if !found.refused.is_empty() && self.has_checkpoints()? {
                    refuse!(
                        RunDiffers,
                        "run {} was created with another configuration:\n  {}\nrestore these values, or start a \
                         new run with `--run NAME`",
                        self.path.display(),
                        found.refused.join("\n  ")
                    );
                }
                found.refused.into_iter().chain(found.allowed).collect()
            }
        };
        self.next_configuration = (previous.as_ref() != Some(&text)).then_some(text);
        if !self.has_checkpoints()? {
            self.keep_configuration()?;
        }
        Ok((previous.is_none(), changes))
    }

    /// Writes the configuration that the run was opened with to the folder.
    pub fn keep_configuration(&mut self) -> Result<(), LaunchError> {
        if let Some(text) = &self.next_configuration {
            self.files.write_atomically(&self.path.join(CONFIG), text.as_bytes())?;
            self.next_configuration = None;
        }
        Ok(())
    }

    fn has_checkpoints(&self) -> Result<bool, LaunchError> {
        Ok(!scan::committed(&self.path)?.is_empty() || !scan::set_aside(&self.path)?.is_empty())
    }

    fn refuse_checkpoints_without_configuration(&self) -> Result<(), LaunchError> {
        if !self.has_checkpoints()? {
            return Ok(());
        }
        Err(reported!(
            Corrupt,
            "run {} has checkpoints but no {CONFIG}, so their configuration is unknown; restore the file, or start a \
             new run with `--run NAME`",
            self.path.display()
        ))
    }

    /// The folder of the run.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number that [`RunFolder::begin_attempt`] returned last.
    pub fn attempt(&self) -> Option<u32> {
        self.attempt
    }

    /// The checkpoints of the run, oldest first.
    pub fn checkpoints(&self) -> Result<Vec<CheckpointRow>, LaunchError> {
        checkpoints(&self.path, Depth::Lengths)
    }
}
