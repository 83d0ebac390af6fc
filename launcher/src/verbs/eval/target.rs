//! Selects the model and the configuration to evaluate or to predict with. The model is an exported file, or a
//! checkpoint of a run. The run is the one that `checkpoint.run` names or, if this field is empty, the newest run with
//! a checkpoint. `eval.checkpoint` selects the newest whole checkpoint, the best checkpoint, or the checkpoint of a
//! given step.

use std::path::{Path, PathBuf};

use locdiff_core::config::{self, CheckpointChoice, Prior, Resolved, RetrievalHead, ValueOrigin};

use super::model::{ModelFile, ModelSource};
use crate::cli::Global;
use crate::error::{LaunchError, refuse, reported};
use crate::output::Output;
use crate::run_folder::{CheckpointUse, Depth, WholeCheckpoint, checkpoints, newest_whole, whole_checkpoint};
use crate::terminal::{width, wrapped};
use crate::verbs::resolve;
use crate::verbs::runs::find_run;

/// A model to predict with.
pub(in crate::verbs) struct ChosenModel {
    pub(in crate::verbs) file: ModelFile,
    pub(in crate::verbs) source: ModelSource,
    /// Keeps a launcher that trains the same run from removing the checkpoint. `None` for an exported file.
    _use: Option<CheckpointUse>,
    /// The configuration. `--set` and the other flags override its values.
    pub(in crate::verbs) resolved: Resolved,
}

/// Finds the model for predictions: the exported file `exported`, or a checkpoint as [`find`] does. Prints what was
/// found.
pub(in crate::verbs) fn find_model(
    exported: Option<&Path>,
    global: &Global,
    is_hybrid: bool,
    output: Output,
) -> anyhow::Result<ChosenModel> {
    let Some(path) = exported else {
        let (run, checkpoint, protected, resolved) = find(global, is_hybrid, output)?;
        let (file, source) = (ModelFile::of(&checkpoint)?, ModelSource::Run(run));
        return Ok(ChosenModel { file, source, _use: Some(protected), resolved });
    };
    if path.exists() && !path.is_file() {
        refuse!(
            Usage,
            "--model: {} is not a file, wanted one that `checkpoint export` wrote; for a run, use --run NAME instead",
            path.display()
        );
    }
    let (file, metadata) = ModelFile::exported("--model", path)?;
    output.print(&format!("model (step {}):\n  {}", file.step, path.display()));
    let source = ModelSource::Export(path.to_owned(), Box::new(metadata));
    let resolved = configuration(&source, global, is_hybrid, output)?;
    for (key, what) in [("checkpoint.run", "a run"), ("eval.checkpoint", "a checkpoint of a run")] {
        if matches!(resolved.origin(key), ValueOrigin::Set | ValueOrigin::Flag(_)) {
            refuse!(Usage, "{key} names {what}, but --model names a file; leave out one of them");
        }
    }
    Ok(ChosenModel { file, source, _use: None, resolved })
}

/// Finds the run and its checkpoint, and prints both. The checkpoint is protected from removal. The configuration comes
/// from `--config` or, if this flag is not given, from the run. `--set` and the other flags override its values.
pub(in crate::verbs) fn find(
    global: &Global,
    is_hybrid: bool,
    output: Output,
) -> anyhow::Result<(PathBuf, WholeCheckpoint, CheckpointUse, Resolved)> {
    let run = find_run(None, global, output)?;
    let resolved = configuration(&ModelSource::Run(run.clone()), global, is_hybrid, output)?;
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

/// The configuration from `--config` or, if this flag is not given, the model's own one. `--set` and the other flags
/// override its values.
fn configuration(
    source: &ModelSource,
    global: &Global,
    is_hybrid: bool,
    output: Output,
) -> Result<Resolved, LaunchError> {
    if global.config.is_empty() {
        return own_configuration(source, global, is_hybrid, output);
    }
    let resolved = resolve(global)?;
    if let Some(tuned) = source.tuned(resolved.config.eval.prior)?.filter(|_| is_hybrid) {
        output.print(&format!("using the settings of --config, not {}", tuned.name));
    }
    Ok(resolved)
}

/// The model's own configuration with `--set` and the other flags. If LocDiff-H is evaluated, settings that were tuned
/// with the same prior override the model's own settings. Exception: if the configuration chooses a different retrieval
/// head from the one that was tuned, the tuned settings are ignored.
fn own_configuration(
    source: &ModelSource,
    global: &Global,
    is_hybrid: bool,
    output: Output,
) -> Result<Resolved, LaunchError> {
    let mut layers = global.layers_over(source.base());
    let own = config::load(&layers)?;
    if !is_hybrid {
        return Ok(own);
    }
    let prior = own.config.eval.prior;
    let Some(tuned) = source.tuned(prior)? else {
        let with = match prior {
            Prior::Training => "",
            Prior::Even => " with eval.prior = \"even\"",
        };
        let line =
            format!("LocDiff-H uses the configured settings, because `eval --tune` has not tuned this model{with}");
        output.print(&wrapped(&line, 2, width()));
        return Ok(own);
    };
    if !tuned.text.lines().any(|line| line.starts_with("fine_scale")) {
        let line = "LocDiff-H uses the configured settings, because the tuned ones are from an older version; `eval \
                    --tune --hybrid` tunes again";
        output.print(&wrapped(line, 2, width()));
        return Ok(own);
    }
    let tuned_for = config::load(&[tuned.layer()])?.config.retrieval;
    let wanted = &own.config.retrieval;
    let (head, tuned_head) = (wanted.wanted_head(), tuned_for.head);
    let is_other_run = head == RetrievalHead::Trained && !source.is_head(&tuned_for.run, &own.config);
    if head != RetrievalHead::Auto && tuned_head != RetrievalHead::Auto && (head != tuned_head || is_other_run) {
        let line = "LocDiff-H uses the configured settings, because the tuned ones are for another retrieval head; \
                    `eval --tune --hybrid` tunes settings for this head";
        output.print(&wrapped(line, 2, width()));
        return Ok(own);
    }
    layers.insert(1, tuned.layer());
    let resolved = config::load(&layers)?;
    output.print(&format!("settings:\n  {}", tuned.name));
    for line in tuned.text.lines().take(2).filter_map(|line| line.strip_prefix("# ")) {
        output.print(&format!("  {}", wrapped(line, 4, width() - 2)));
    }
    Ok(resolved)
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
