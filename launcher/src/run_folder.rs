//! A run on disk: who holds it, what it was configured with, its attempts and its checkpoints.
//!
//! ```text
//! RUN/config.toml         resolved configuration
//! RUN/lock                held by the launcher of the run as long as it lives; says its process id
//! RUN/attempt             number of the last attempt
//! RUN/step-NNNNNNNN/      a checkpoint: whole, or damaged after it was written (checkpoints/README.md)
//! RUN/latest              name of the newest, for people and scripts
//! RUN/logs/ATTEMPT/  RUN/tensorboard/  RUN/events.jsonl  RUN/failure.json
//! ```
//! Only who holds the lock changes anything here, and only [`RunFolder`] holds it. What reads goes by the folders alone
//! ([`checkpoints`], [`newest_whole`]) and renames nothing. A name `step-NNNNNNNN` is given by the launcher, once all
//! that the manifest lists is on the disk; a number of an attempt is never given twice.

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
pub use lock::Hold;
pub use names::{CONFIG, LATEST, new_run_name, newest_run, utc_text};
pub use resume::ResumePoint;
pub use scan::{Checkpoint, CheckpointRow, Condition, Depth, checkpoints, examine, newest_whole, whole_checkpoint};

/// A run that this process holds.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    files: Files,
    keep: usize,
    attempt: Option<u32>,
    /// The configuration of this start, where the run keeps the one before until it is taken.
    next_configuration: Option<String>,
    _lock: Hold,
}

/// A run that was opened.
#[derive(Debug)]
pub struct OpenedRun {
    /// The run.
    pub folder: RunFolder,
    /// It did not exist.
    pub is_new: bool,
    /// What is configured differently from the last time, a line for each field.
    pub changes: Vec<String>,
}

impl RunFolder {
    /// Makes the run `name` in `dir`, or opens it again; an error where another launcher holds it, or where the
    /// configuration differs in a field that a run keeps.
    pub fn open(files: Files, dir: &Path, name: &str, config: &RunConfig) -> Result<OpenedRun, LaunchError> {
        if !names::is_plain(name) {
            refuse!(Config, "checkpoint.run: is \"{name}\", wanted a plain folder name");
        }
        let path = dir.join(name);
        files.create_folders(&path)?;
        let lock = Hold::take(&path)?;
        let keep = config.checkpoint.keep as usize;
        let mut folder = Self { path, files, keep, attempt: None, next_configuration: None, _lock: lock };
        let (is_new, changes) = folder.configure(name, config)?;
        Ok(OpenedRun { folder, is_new, changes })
    }

    /// Compares the configuration with that of the run. A run without checkpoints takes the present one at once, any other with
    /// [`RunFolder::keep_configuration`].
    fn configure(&mut self, name: &str, config: &RunConfig) -> Result<(bool, Vec<String>), LaunchError> {
        let mut config = config.clone();
        name.clone_into(&mut config.checkpoint.run);
        let path = self.path.join(CONFIG);
        let text = toml::to_string(&config).expect("a checked configuration is plain TOML values");
        let known = match std::fs::read_to_string(&path) {
            Ok(known) => Some(known),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(LaunchError::at(path)(error)),
        };
        let changes = match &known {
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
                        "run {} was made with another configuration:\n  {}\nset these back, or name a new run with `--run NAME`",
                        self.path.display(),
                        found.refused.join("\n  ")
                    );
                }
                found.refused.into_iter().chain(found.allowed).collect()
            }
        };
        self.next_configuration = (known.as_ref() != Some(&text)).then_some(text);
        if !self.has_checkpoints()? {
            self.keep_configuration()?;
        }
        Ok((known.is_none(), changes))
    }

    /// From now on the run has the configuration that it was opened with.
    pub fn keep_configuration(&mut self) -> Result<(), LaunchError> {
        if let Some(text) = &self.next_configuration {
            self.files.write_whole(&self.path.join(CONFIG), text.as_bytes())?;
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
            "run {} has checkpoints but no {CONFIG}, so it is not known what they were trained with; put it back, or name \
             a new run with `--run NAME`",
            self.path.display()
        ))
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The attempt that [`RunFolder::begin_attempt`] gave last.
    pub fn attempt(&self) -> Option<u32> {
        self.attempt
    }

    /// Its checkpoints, oldest first.
    pub fn checkpoints(&self) -> Result<Vec<CheckpointRow>, LaunchError> {
        checkpoints(&self.path, Depth::Lengths)
    }
}
