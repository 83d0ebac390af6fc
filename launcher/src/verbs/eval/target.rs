//! Selects the run, the checkpoint and the configuration to evaluate. The run is the one that `checkpoint.run` names
//! or, if this field is empty, the newest run with a checkpoint. `eval.checkpoint` selects the newest whole checkpoint,
//! the best checkpoint, or the checkpoint of a given step.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use locdiff_core::config::{self, CheckpointChoice, Layer, Prior, Resolved, RetrievalHead};

use super::files::tuned_name;
use crate::cli::Global;
use crate::error::{LaunchError, refuse, reported};
use crate::output::Output;
use crate::run_folder::{CONFIG, CheckpointUse, Depth, WholeCheckpoint, checkpoints, newest_whole, whole_checkpoint};
use crate::terminal::{width, wrapped};
use crate::verbs::checkpoint::find_run;
use crate::verbs::resolve;

/// Finds the run and its checkpoint, and prints both. The checkpoint is protected from removal. The configuration comes
/// from `--config` or, if this flag is not given, from the run. `--set` and the other flags override its values.
pub(in crate::verbs) fn find(
    global: &Global,
    is_hybrid: bool,
    output: Output,
) -> anyhow::Result<(PathBuf, WholeCheckpoint, CheckpointUse, Resolved)> {
    let run = find_run(None, global, output)?;
    let resolved = match global.config.is_empty() {
        false => {
            let resolved = resolve(global)?;
            let tuned = run.join("eval").join(tuned_name(resolved.config.eval.prior));
            if is_hybrid && tuned.exists() {
                output.print(&format!("using the settings of --config, not {}", tuned.display()));
            }
            resolved
        }
        true => own_configuration(&run, global, is_hybrid, output)?,
    };
    let (checkpoint, reason, protected) = loop {
        let (checkpoint, reason) = choose(&run, resolved.config.eval.checkpoint)?;
        // If the checkpoint has just been removed, `share` returns `None`. Then choose again, because there is a newer
        // checkpoint.
        if let Some(protected) = CheckpointUse::share(&checkpoint.path) {
            break (checkpoint, reason, protected);
        }
    };
    output.print(&format!("checkpoint ({reason}):\n  {}", checkpoint.path.display()));
    Ok((run, checkpoint, protected, resolved))
}

/// The run's own configuration with `--set` and the other flags. If LocDiff-H is evaluated, settings that were tuned with
/// the same prior override the run's own settings. Exception: if the configuration chooses a different retrieval head
/// from the one that was tuned, the tuned settings are ignored.
fn own_configuration(run: &Path, global: &Global, is_hybrid: bool, output: Output) -> Result<Resolved, LaunchError> {
    let mut layers = global.layers_over(Layer::File(run.join(CONFIG)));
    let own = config::load(&layers)?;
    if !is_hybrid {
        return Ok(own);
    }
    let prior = own.config.eval.prior;
    let path = run.join("eval").join(tuned_name(prior));
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let with = match prior {
                Prior::Training => "",
                Prior::Even => " with eval.prior = \"even\"",
            };
            let line =
                format!("LocDiff-H uses the configured settings, because `eval --tune` has not tuned this run{with}");
            output.print(&wrapped(&line, 2, width()));
            return Ok(own);
        }
        Err(error) => return Err(LaunchError::at(path)(error)),
    };
    if !text.lines().any(|line| line.starts_with("fine_scale")) {
        let line = "LocDiff-H uses the configured settings, because the tuned ones are from an older version; `eval \
                    --tune --hybrid` tunes again";
        output.print(&wrapped(line, 2, width()));
        return Ok(own);
    }
    let tuned_for = config::load(&[Layer::File(path.clone())])?.config.retrieval;
    let wanted = &own.config.retrieval;
    let (head, tuned_head) = (wanted.wanted_head(), tuned_for.head);
    let is_other_run = head == RetrievalHead::Trained && tuned_for.run != wanted.run;
    if head != RetrievalHead::Auto && tuned_head != RetrievalHead::Auto && (head != tuned_head || is_other_run) {
        let line = "LocDiff-H uses the configured settings, because the tuned ones are for another retrieval head; \
                    `eval --tune --hybrid` tunes settings for this head";
        output.print(&wrapped(line, 2, width()));
        return Ok(own);
    }
    layers.insert(1, Layer::File(path.clone()));
    let tuned = config::load(&layers)?;
    output.print(&format!("settings:\n  {}", path.display()));
    for line in text.lines().take(2).filter_map(|line| line.strip_prefix("# ")) {
        output.print(&format!("  {}", wrapped(line, 4, width() - 2)));
    }
    Ok(tuned)
}

/// The checkpoint to evaluate, and the reason for the choice.
pub(in crate::verbs) fn choose(
    run: &Path,
    choice: CheckpointChoice,
) -> Result<(WholeCheckpoint, &'static str), LaunchError> {
    let (checkpoint, skipped, reason) = match choice {
        CheckpointChoice::Newest => {
            let (checkpoint, skipped) = newest_whole(run)?;
            (checkpoint, skipped, "newest whole checkpoint")
        }
        CheckpointChoice::Best => {
            let rows = checkpoints(run, Depth::Lengths)?;
            let best = rows.iter().find(|row| row.best).ok_or_else(|| no_score(run))?;
            let (checkpoint, skipped) = whole_checkpoint(&run.join(&best.name))?;
            (checkpoint, skipped, "best validation score")
        }
        CheckpointChoice::Step(step) => {
            let rows = checkpoints(run, Depth::Lengths)?;
            let Some(found) = rows.iter().find(|row| row.step == step && row.state == "present") else {
                let steps: Vec<String> =
                    rows.iter().filter(|row| row.state == "present").map(|row| row.step.to_string()).collect();
                refuse!(
                    NoData,
                    "run {} has no checkpoint of step {step} (eval.checkpoint); steps with a checkpoint: {}",
                    run.display(),
                    if steps.is_empty() { "none".to_owned() } else { steps.join(", ") }
                );
            };
            let (checkpoint, skipped) = whole_checkpoint(&run.join(&found.name))?;
            (checkpoint, skipped, "the step that eval.checkpoint names")
        }
    };
    skipped.iter().for_each(|line| tracing::warn!("{line}"));
    Ok((checkpoint, reason))
}

fn no_score(run: &Path) -> LaunchError {
    reported!(
        NoData,
        "run {} has no checkpoint with a validation score (eval.checkpoint is \"best\"); train with shards.validation and \
         eval.every, or use `--set eval.checkpoint=newest`",
        run.display()
    )
}
