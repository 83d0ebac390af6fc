//! The folder of a run: its lock, configuration, attempts and checkpoints. `RUN` stands for the path of the folder.
//!
//! ```text
//! RUN/config.toml         resolved configuration
//! RUN/lock                locked by the launcher that trains the run; contains the launcher's process id
//! RUN/attempts/N          the attempt N was claimed
//! RUN/attempts/N.json     the attempt N has begun; lists the checkpoints that were there
//! RUN/step-NNNNNNNN/      a committed checkpoint (checkpoints/README.md)
//! RUN/latest              name of the newest checkpoint, for people and scripts
//! RUN/logs/ATTEMPT/  RUN/events.out.tfevents.*  RUN/events.jsonl  RUN/failure.json  RUN/status.json
//! ```
//! A [`RunFolder`] holds the lock. Only the launcher that holds the lock, and its workers, change these files.
//! Functions that only read, such as [`checkpoints`] and [`newest_whole`], need no lock. `eval` writes to `RUN/eval/`,
//! which has its own lock. `eval` takes the lock of the run only while it adds scores to the TensorBoard files. A
//! [`CheckpointUse`] protects the checkpoint that `eval` reads.
//!
//! Locks may get lost. Then the newest attempt is in charge, and what earlier ones commit does not count.
//!
//! The launcher gives a checkpoint the name `step-NNNNNNNN` after all files in its manifest are on disk. So a
//! checkpoint with this name is whole, unless it was damaged later. No two attempts of a run have the same number.

mod attempts;
mod commit;
mod compare;
mod find;
mod goodput;
mod journal;
mod lock;
mod names;
mod records;
mod resume;
mod scan;
mod status;
mod stragglers;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use locdiff_core::config::{self, Layer, NetworkConfig, RunConfig};
use locdiff_core::files::Files;

use crate::error::{LaunchError, refuse, reported};

pub use commit::Commit;
pub use compare::different_fields;
pub use find::{has_ended, is_run, named_run, newest_run, runs, threads_of, unfinished_run};
pub use lock::{CheckpointUse, RunLock};
pub use names::{CONFIG, LATEST, new_run_name, utc_text};
pub use resume::ResumePoint;
pub use scan::{
    CheckpointRow, Condition, Depth, WholeCheckpoint, checkpoints, examine, newest_whole, whole_checkpoint,
};
pub use status::{RunState, RunStatus, StatusKeeper, WorkerStatus, exact_unix_s, host};
pub use stragglers::StepTimes;

/// A run whose lock this process holds.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    files: Files,
    keep: usize,
    attempt: Option<u32>,
    /// The configuration that the run was opened with, as TOML. `None` if `config.toml` already contains it.
    next_configuration: Option<String>,
    /// Whether the last attempt to write an event failed.
    events_failed: AtomicBool,
    _lock: RunLock,
}

/// Result of [`RunFolder::open`].
#[derive(Debug)]
pub struct OpenedRun {
    /// The run, locked by this process.
    pub folder: RunFolder,
    /// Whether the run is new, that is, had no `config.toml` before.
    pub is_new: bool,
    /// Whether this call created the folder.
    pub is_created: bool,
    /// One line for each field that differs from the previous configuration.
    pub changes: Vec<String>,
}

/// The configuration without the values that belong to a command, not to a run: the nodes, and how they meet.
fn without_command(mut config: RunConfig) -> RunConfig {
    (config.parallel.nodes, config.parallel.nodes_min, config.parallel.node_rank) = (1, 0, 0);
    config.network = NetworkConfig { interface: config.network.interface, ..NetworkConfig::default() };
    config
}

impl RunFolder {
    /// Creates the run `name` in `dir`, or opens it if it exists. Fails if another launcher holds the run. If the run
    /// has checkpoints, there are three more reasons to fail: the run's configuration is missing, it differs from
    /// `config` in a field that must not change, or `config` has fewer steps than the run has done.
    pub fn open(files: Files, dir: &Path, name: &str, config: &RunConfig) -> Result<OpenedRun, LaunchError> {
        if !names::is_plain(name) {
            refuse!(Config, "checkpoint.run: is \"{name}\", wanted a name without slashes or a leading dot");
        }
        let path = dir.join(name);
        let is_created = !path.exists();
        files.create_folders(&path).map_err(|error| LaunchError::from(error).about("checkpoint.dir"))?;
        let lock = RunLock::take(&path)?;
        let keep = config.checkpoint.keep as usize;
        let (attempt, next_configuration, events_failed) = (None, None, AtomicBool::new(false));
        let mut folder = Self { path, files, keep, attempt, next_configuration, events_failed, _lock: lock };
        let (is_new, changes) = folder.configure(name, config)?;
        Ok(OpenedRun { folder, is_new, is_created, changes })
    }

    /// Compares `config` with the configuration in the folder. If the run has no checkpoints, writes `config` to the
    /// folder at once. Otherwise, [`RunFolder::keep_configuration`] writes it later. Returns whether the run is new,
    /// and one line for each field that changed.
    fn configure(&mut self, name: &str, config: &RunConfig) -> Result<(bool, Vec<String>), LaunchError> {
        let mut config = config.clone();
        name.clone_into(&mut config.checkpoint.run);
        config = without_command(config);
        let path = self.path.join(CONFIG);
        let text = toml::to_string(&config).expect("a checked configuration contains only plain TOML values");
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
                self.refuse_fewer_steps(config.train.steps)?;
                found.refused.into_iter().chain(found.allowed).collect()
            }
        };
        self.next_configuration = (previous.as_ref() != Some(&text)).then_some(text);
        if !self.has_checkpoints()? {
            self.keep_configuration()?;
        }
        Ok((previous.is_none(), changes))
    }

    /// Rewrites `config.toml`, unless it already contains the configuration with which the run was opened.
    pub fn keep_configuration(&mut self) -> Result<(), LaunchError> {
        if let Some(text) = &self.next_configuration {
            self.refuse_if_superseded()?;
            self.files.write_atomically(&self.path.join(CONFIG), text.as_bytes())?;
            self.next_configuration = None;
        }
        Ok(())
    }

    fn refuse_fewer_steps(&self, steps: u64) -> Result<(), LaunchError> {
        match self.newest_step()? {
            Some(done) if done > steps => Err(reported!(
                RunDiffers,
                "run {} has done {done} steps, more than train.steps = {steps}; to train further, set train.steps above \
                 {done}; to train fewer steps, start a new run with `--run NAME`",
                self.path.display()
            )),
            _ => Ok(()),
        }
    }

    /// Step of the newest committed checkpoint, whole or damaged.
    pub fn newest_step(&self) -> Result<Option<u64>, LaunchError> {
        Ok(scan::committed(&self.path)?.last().map(|(step, _)| *step))
    }

    /// Removes the folder of a run that never began. Gives the folder a hidden name first, so that nobody sees it half
    /// removed.
    pub fn discard(&self) -> Result<(), LaunchError> {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let hidden = self.path.with_file_name(format!("{}{name}-{}", names::REMOVING, std::process::id()));
        let io = LaunchError::at(&self.path);
        std::fs::rename(&self.path, &hidden).map_err(&io)?;
        std::fs::remove_dir_all(&hidden).map_err(io)
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

    /// The number that the last call of [`RunFolder::begin_attempt`] returned. `None` before the first call.
    pub fn attempt(&self) -> Option<u32> {
        self.attempt
    }

    /// All checkpoints of the run, oldest first. The lengths of their files are checked, but not the checksums.
    pub fn checkpoints(&self) -> Result<Vec<CheckpointRow>, LaunchError> {
        checkpoints(&self.path, Depth::Lengths)
    }
}
