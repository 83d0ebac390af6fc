//! Finds runs in a folder: by name, the newest one, or the one that a repeated command resumes.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use locdiff_core::config::{self, Layer, RunConfig};
use locdiff_core::text::nearest;

use super::compare::compare;
use super::names::{CONFIG, LATEST};
use super::scan;
use super::status::{RunState, RunStatus};
use super::without_command;
use crate::error::{LaunchError, reported};

/// Largest number of names that an error lists.
const NAMES_MAX: usize = 5;

/// Whether the folder is a run.
pub fn is_run(folder: &Path) -> bool {
    folder.join(CONFIG).exists()
}

/// Number of threads in the run's configuration. `None` if the folder is not a run, or if its configuration cannot be
/// read or has no number.
pub fn threads_of(run: &Path) -> Option<u32> {
    config::load(&[Layer::File(run.join(CONFIG))]).ok()?.config.train.threads.value()
}

/// The folders of all runs in `dir`, sorted by name. The list is empty if `dir` does not exist.
pub fn runs(dir: &Path) -> Result<Vec<PathBuf>, LaunchError> {
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(|error| LaunchError::at(dir)(error).about("checkpoint.dir"))?,
    };
    let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    found.retain(|path| is_run(path));
    found.sort();
    Ok(found)
}

/// The run `name` in `dir`. If there is no such run, the error names `dir` and lists the runs with similar names. If no
/// name is similar, the error lists all runs, or gives only the number of runs if there are many.
pub fn named_run(dir: &Path, name: &str) -> Result<PathBuf, LaunchError> {
    let found = dir.join(name);
    if is_run(&found) {
        return Ok(found);
    }
    let runs = runs(dir)?;
    let names: Vec<&str> = runs.iter().filter_map(|run| run.file_name()?.to_str()).collect();
    let similar = nearest(name, names.iter().copied());
    let advice = match (similar.as_slice(), names.as_slice()) {
        (_, []) => "there are no runs; create one with `locdiff-launch train`".to_owned(),
        ([], all) if all.len() <= NAMES_MAX => format!("runs there: {}", all.join(", ")),
        ([], all) => format!("the folder has {} runs; `locdiff-launch runs` lists them", all.len()),
        (similar, _) => format!("did you mean {}?", similar.join(" or ")),
    };
    Err(reported!(NoData, "no run `{name}` in {}; {advice}", dir.display()))
}

/// Of the runs in `dir` that have a checkpoint, the one whose configuration or newest checkpoint was written last.
pub fn newest_run(dir: &Path) -> Result<PathBuf, LaunchError> {
    let mut without = 0;
    for run in newest_first(dir)? {
        if !scan::committed(&run)?.is_empty() {
            return Ok(run);
        }
        without += 1;
    }
    let found = match without {
        0 => "no runs".to_owned(),
        _ => format!("no run with a checkpoint (runs without one: {without})"),
    };
    let dir = dir.display();
    Err(reported!(NoData, "{found} in {dir}; create one with `locdiff-launch train`, or name a run with `--run NAME`"))
}

/// The newest run in `dir` that has not ended and whose configuration equals `config`, except that
/// `checkpoint.dir` and `checkpoint.run` may differ.
pub fn unfinished_run(dir: &Path, config: &RunConfig) -> Result<Option<PathBuf>, LaunchError> {
    let config = without_command(config.clone());
    let is_same = |run: &Path| {
        let Ok(mut found) = config::load(&[Layer::File(run.join(CONFIG))]) else { return false };
        found.config.checkpoint.dir.clone_from(&config.checkpoint.dir);
        found.config.checkpoint.run.clone_from(&config.checkpoint.run);
        compare(&without_command(found.config), &config).is_empty()
    };
    Ok(newest_first(dir)?.into_iter().find(|run| is_same(run) && !has_ended(run, config.train.steps)))
}

/// Whether a run of `steps` steps has nothing left to do: it has a checkpoint of its last step, and its evaluation is
/// done or was not requested. A run without a readable status counts as evaluated.
pub fn has_ended(run: &Path, steps: u64) -> bool {
    let is_evaluated = RunStatus::current(run).is_none_or(|status| status.state == RunState::Ended);
    is_evaluated && scan::present(run).is_ok_and(|found| found.last().is_some_and(|newest| newest.step >= steps))
}

/// The runs in `dir`, beginning with the most recently written one.
fn newest_first(dir: &Path) -> Result<Vec<PathBuf>, LaunchError> {
    let mut found: Vec<(SystemTime, PathBuf)> =
        runs(dir)?.into_iter().filter_map(|run| Some((written_at(&run)?, run))).collect();
    found.sort();
    Ok(found.into_iter().rev().map(|(_, run)| run).collect())
}

/// The time when the run's configuration or its file `latest` was written, whichever is later.
fn written_at(run: &Path) -> Option<SystemTime> {
    let modified = |name: &str| std::fs::metadata(run.join(name)).and_then(|found| found.modified()).ok();
    modified(CONFIG).max(modified(LATEST))
}
