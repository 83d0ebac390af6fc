//! Looks for the data that other commands need: shards, GeoCLIP's weights and runs. Suggests the next command to type.

use std::path::{Path, PathBuf};

use locdiff_core::config::{RetrievalHead, RunConfig};

use super::finding::{Finding, Level};
use crate::error::LaunchError;
use crate::run_folder::{RunState, RunStatus, named_run, newest_run, runs};
use crate::verbs::locations::require_shards;
use crate::verbs::train::quoted;

/// What was found in the folders that the configuration names.
pub(super) struct DataReport {
    /// A finding for each kind of data, by name.
    pub(super) findings: Vec<(&'static str, Finding)>,
    /// False if the training shards are known to be missing.
    pub(super) has_training: bool,
    /// The verb to run next, with its arguments.
    next: String,
}

impl DataReport {
    /// Looks for shards, weights and runs. `is_default` is true if neither `--config` nor `--set` was given.
    pub(super) fn new(config: &RunConfig, is_default: bool) -> Self {
        let shards = [
            ("shards.train", &config.shards.train),
            ("shards.validation", &config.shards.validation),
            ("shards.test", &config.shards.test),
        ];
        let mut findings: Vec<_> = shards.map(|(key, location)| (key, shards_at(key, location))).into();
        let geoclip = geoclip(config);
        let found = newest(config);
        let is_missing = |key: &str| findings.iter().any(|(name, (level, _))| *name == key && *level != Level::Ok);
        let build = |out: &str| format!("shards build --table FILE --embeddings FILE --out {}", quoted(out));
        let next = match &found {
            Ok(None) if is_missing("shards.train") && is_default => "demo".to_owned(),
            _ if is_missing("shards.train") => build(&config.shards.train),
            _ if geoclip.0 != Level::Ok => import(&config.retrieval.geoclip),
            Ok(Some(run)) if run.is_alive() => "status".to_owned(),
            Ok(Some(run)) if run.is_ended() && is_missing("shards.test") => build(&config.shards.test),
            Ok(Some(run)) if run.is_ended() => "eval --hybrid".to_owned(),
            Ok(Some(run)) if config.checkpoint.run.is_empty() => format!("--run {} train", quoted(&run.name)),
            _ => "train".to_owned(),
        };
        let has_training = !is_missing("shards.train");
        findings.push(("GeoCLIP", geoclip));
        findings.push(("runs", runs_in(config, &found)));
        Self { findings, has_training, next }
    }

    /// The command line to type next. It repeats `words`, the command line of this process, without `--json` and with
    /// the next verb in place of `doctor`.
    pub(super) fn next_command(&self, words: impl Iterator<Item = String>) -> String {
        let kept = words.skip(1).filter(|word| word != "--json");
        let verb = |word: String| if word == "doctor" { self.next.clone() } else { quoted(&word) };
        ["locdiff-launch".to_owned()].into_iter().chain(kept.map(verb)).collect::<Vec<_>>().join(" ")
    }
}

fn shards_at(key: &str, location: &str) -> Finding {
    match require_shards(key, location) {
        Ok(()) => (Level::Ok, location.to_owned()),
        Err(_) if location.is_empty() => (Level::Ok, "not set".to_owned()),
        Err(missing) => (Level::Warning, missing.to_string()),
    }
}

/// The command that imports GeoCLIP's weights into `folder`.
fn import(folder: &str) -> String {
    let is_default = folder == RunConfig::default().retrieval.geoclip;
    if is_default { "geoclip import".to_owned() } else { format!("geoclip import --out {}", quoted(folder)) }
}

fn geoclip(config: &RunConfig) -> Finding {
    let folder = &config.retrieval.geoclip;
    match config.retrieval.head {
        _ if config.retrieval.has_geoclip() => (Level::Ok, folder.clone()),
        RetrievalHead::Auto => {
            let text = "no weights; LocDiff-H needs them only for CLIP features of 768 numbers and for simulated \
                        photos: import them with `locdiff-launch geoclip import`";
            (Level::Ok, text.to_owned())
        }
        RetrievalHead::Knn => (Level::Ok, "not needed: retrieval.head is \"knn\"".to_owned()),
        _ => {
            let text = format!(
                "no weights in {folder} (retrieval.geoclip); LocDiff-H needs them: import them with `locdiff-launch {}`",
                import(folder)
            );
            (Level::Warning, text)
        }
    }
}

/// The run that [`newest`] finds.
struct NewestRun {
    name: String,
    /// The state and the step of the run, in words.
    progress: String,
    /// `None` if the run has no readable status.
    state: Option<RunState>,
}

impl NewestRun {
    fn is_alive(&self) -> bool {
        matches!(self.state, Some(RunState::Running | RunState::Evaluating))
    }

    /// Whether the run has ended. A run without a readable status counts as ended, because it can be evaluated if it
    /// has a checkpoint.
    fn is_ended(&self) -> bool {
        matches!(self.state, None | Some(RunState::Ended))
    }
}

/// The run that `checkpoint.run` names or, if this field is empty, the newest run with a checkpoint. `None` if
/// `checkpoint.dir` has no runs.
fn newest(config: &RunConfig) -> Result<Option<NewestRun>, LaunchError> {
    let dir = Path::new(&config.checkpoint.dir);
    if runs(dir)?.is_empty() {
        return Ok(None);
    }
    let folder: PathBuf =
        if config.checkpoint.run.is_empty() { newest_run(dir)? } else { named_run(dir, &config.checkpoint.run)? };
    let status = RunStatus::current(&folder);
    let progress = status.as_ref().map_or_else(
        || "unknown".to_owned(),
        |RunStatus { state, step, steps, .. }| format!("{}, step {step} of {steps}", state.name()),
    );
    let state = status.map(|status| status.state);
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Some(NewestRun { name, progress, state }))
}

fn runs_in(config: &RunConfig, found: &Result<Option<NewestRun>, LaunchError>) -> Finding {
    match found {
        Ok(Some(run)) => (Level::Ok, format!("{} in {} ({})", run.name, config.checkpoint.dir, run.progress)),
        Ok(None) => (Level::Ok, format!("none in {} (checkpoint.dir)", config.checkpoint.dir)),
        Err(error) => (Level::Warning, error.to_string()),
    }
}
