//! `eval`: the coordinator's phase of evaluation. Workers locate rows, this side gathers them in the order of the data,
//! writes them to the run's folder, has them scored, and prints the table.
//!
//! - `target`: which run, which checkpoint, which configuration.
//! - `phase`: one evaluation, or one tuning; `train` starts it too.
//! - `gather`: rows as they come from the workers.
//! - `files`: what is left in `RUN/eval/`.
//! - `table`: for people; `published`: the paper's rows.

mod files;
mod gather;
mod phase;
mod published;
mod table;
mod target;

use std::path::{Path, PathBuf};

use locdiff_core::exit_code::ExitCode;
use locdiff_core::protocol::{HybridWish, Job, PredictionsJob};
use serde_json::Value;

use crate::cli::Global;
use crate::error::LaunchError;
use crate::gpus;
use crate::output::Output;
use crate::rendezvous::World;
use crate::run_folder;
use crate::supervisor::Supervisor;

pub(super) use phase::{Phase, after_training, with_all_cores};
use target::Target;
pub(super) use target::choose;

/// What `eval` is asked for.
#[derive(Debug, Clone, Default)]
pub(super) struct Request {
    /// LocDiff-H too.
    pub(super) hybrid: bool,
    /// The table of the paper to print.
    pub(super) suite: Option<String>,
    /// Score these predictions instead.
    pub(super) predictions: Option<PathBuf>,
    /// Choose the hybrid's settings.
    pub(super) tune: bool,
}

/// `eval`.
pub(super) fn run(request: &Request, global: &Global, output: Output) -> anyhow::Result<Value> {
    let is_table1 = match request.suite.as_deref() {
        None => false,
        Some("main") => true,
        Some("perturbation") => return super::perturbation::run(global, output),
        Some(other) => return Err(usage(format!("--suite {other}: there are main and perturbation")).into()),
    };
    if let Some(file) = &request.predictions {
        return predictions(file, global, output);
    }
    let target = Target::find(global, request.hybrid, output)?;
    let world = World::plan(&target.resolved.config, &gpus::inventory())?;
    // Who trains this run at the moment writes its event files.
    let held = run_folder::try_hold(&target.run)?;
    let mut phase = Phase {
        supervisor: &mut Supervisor::new()?,
        resolved: target.resolved,
        world: with_all_cores(world),
        run: &target.run,
        checkpoint: &target.checkpoint,
        is_held: held.is_some(),
        output,
    };
    if request.tune {
        let tuned = phase.tune()?;
        if !request.hybrid && !is_table1 {
            return Ok(tuned);
        }
    }
    let wish = if request.hybrid { HybridWish::Wanted } else { HybridWish::No };
    phase.evaluate(wish, is_table1)
}

/// `eval --predictions`: one worker reads and scores the file.
fn predictions(file: &Path, global: &Global, output: Output) -> anyhow::Result<Value> {
    let resolved = super::resolve(global, &gpus::inventory())?;
    let config = resolved.config.clone();
    if config.eval.truth.is_empty() {
        phase::rows_are_there("shards.test", &config.shards.test)?;
    }
    let job = Job::Predictions(Box::new(PredictionsJob { file: file.to_owned(), config }));
    let found = super::run_gang(&resolved, &phase::one_on_the_cpu(), job, true)?;
    let result = found.results.into_iter().next().unwrap_or_default();
    output.people(&table::text(&result));
    Ok(result)
}

fn usage(reason: String) -> LaunchError {
    LaunchError::Reported { text: format!("eval {reason}"), code: ExitCode::Usage }
}
