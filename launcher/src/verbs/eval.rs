//! `eval`: the coordinator's phase of evaluation. Workers locate rows, this side gathers them in the order of the data,
//! writes them to the run's folder, scores them on a thread of its own, and prints the table.
//!
//! - `target`: which run, which checkpoint, which configuration.
//! - `phase`: one evaluation, or one tuning; `train` starts it too.
//! - `gather`: rows as they come from the workers.
//! - `files`: what is left in `RUN/eval/`.
//! - `score`: from answers to metrics.
//! - `table`: rows for programs and for people; `published`: the paper's rows.
//! - `predictions`: anybody's answers.

mod files;
mod gather;
mod phase;
mod predictions;
mod published;
mod score;
mod table;
mod target;

use locdiff_core::protocol::HybridWish;
use serde_json::Value;

use crate::cli::{EvalRequest, Global};
use crate::error::refuse;
use crate::gpus;
use crate::output::Output;
use crate::rendezvous::World;
use crate::run_folder::Hold;
use crate::supervisor::Supervisor;

pub(super) use phase::{Phase, after_training, rows_are_there};
pub(super) use target::choose;

/// `eval`.
pub(super) fn run(request: &EvalRequest, global: &Global, output: Output) -> anyhow::Result<Value> {
    let is_table1 = match request.suite.as_deref() {
        None => false,
        Some("main") => true,
        Some("perturbation") => return super::perturbation::run(global, output),
        Some(other) => refuse!(Usage, "eval --suite {other}: there are main and perturbation"),
    };
    if let Some(file) = &request.predictions {
        return predictions::run(file, global, output);
    }
    let (run, checkpoint, resolved) = target::find(global, request.hybrid, output)?;
    let world = World::plan(&resolved.config, &gpus::inventory())?;
    // Who trains this run at the moment writes its event files.
    let held = Hold::try_take(&run)?;
    let mut phase = Phase {
        supervisor: &mut Supervisor::new()?,
        resolved,
        world: world.with_all_cores(),
        run: &run,
        checkpoint: &checkpoint,
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
