//! What is evaluated: the run that is named, or the newest; its newest whole checkpoint, or its best.

use std::path::{Path, PathBuf};

use locdiff_core::config::{self, CheckpointChoice, Layer, Resolved};

use super::files::TUNED;
use crate::cli::Global;
use crate::error::{LaunchError, reported};
use crate::output::Output;
use crate::run_folder::{CONFIG, Checkpoint, Depth, checkpoints, newest_whole, whole_checkpoint};
use crate::verbs::checkpoint::find_run;
use crate::verbs::resolve;

/// Finds the run and its checkpoint, and says both. The configuration is the run's, unless `--config` names another.
pub(super) fn find(
    global: &Global,
    is_hybrid: bool,
    output: Output,
) -> anyhow::Result<(PathBuf, Checkpoint, Resolved)> {
    let run = find_run(None, global, output)?;
    let resolved = match &global.config {
        Some(_) => {
            let tuned = run.join("eval").join(TUNED);
            if is_hybrid && tuned.exists() {
                output.people(&format!("settings as --config has them: {} is not used with it", tuned.display()));
            }
            resolve(global)?
        }
        None => config::load(&layers(&run, global, is_hybrid, output)?).map_err(LaunchError::from)?,
    };
    let (checkpoint, words) = choose(&run, resolved.config.eval.checkpoint)?;
    output.people(&format!("checkpoint {} ({words})", checkpoint.path.display()));
    Ok((run, checkpoint, resolved))
}

/// The run's own configuration; for LocDiff-H what was tuned for it on top; then flags.
fn layers(run: &Path, global: &Global, is_hybrid: bool, output: Output) -> Result<Vec<Layer>, LaunchError> {
    let mut layers = global.layers_over(Layer::File(run.join(CONFIG)));
    if !is_hybrid {
        return Ok(layers);
    }
    let path = run.join("eval").join(TUNED);
    match std::fs::read_to_string(&path) {
        Ok(text) => {
            let words = text.lines().next().unwrap_or_default().trim_start_matches("# ").to_owned();
            output.people(&format!("settings of {} ({words})", path.display()));
            layers.insert(1, Layer::File(path));
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            output.people("settings as configured: `eval --tune` has not chosen any for this run");
        }
        Err(error) => return Err(LaunchError::at(path)(error)),
    }
    Ok(layers)
}

/// The checkpoint of a run that is wanted, and which it is.
pub(in crate::verbs) fn choose(
    run: &Path,
    choice: CheckpointChoice,
) -> Result<(Checkpoint, &'static str), LaunchError> {
    let (checkpoint, passed_over, words) = match choice {
        CheckpointChoice::Newest => {
            let (checkpoint, passed_over) = newest_whole(run)?;
            (checkpoint, passed_over, "the newest that is whole")
        }
        CheckpointChoice::Best => {
            let rows = checkpoints(run, Depth::Lengths)?;
            let best = rows.iter().find(|row| row.best).ok_or_else(|| no_score(run))?;
            let (checkpoint, passed_over) = whole_checkpoint(&run.join(&best.name))?;
            (checkpoint, passed_over, "the best by its validation score")
        }
    };
    passed_over.iter().for_each(|line| tracing::warn!("{line}"));
    Ok((checkpoint, words))
}

fn no_score(run: &Path) -> LaunchError {
    reported!(
        NoData,
        "run {} has no checkpoint with a validation score (eval.checkpoint is \"best\"); train with shards.validation and \
         eval.every, or say `--set eval.checkpoint=newest`",
        run.display()
    )
}
