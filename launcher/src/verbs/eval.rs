//! `eval`: evaluates a run. The workers locate the photos of the test shards. The launcher puts the answers in the
//! order of the data, writes them to the run's folder, computes the scores, and prints the table.
//!
//! - `target`: selects the model and the configuration.
//! - `model`: the model, and the settings and calibrations that belong to it.
//! - `locator`: lets workers locate photos. `predict` and `serve` also use this module.
//! - `evaluation`: evaluates a checkpoint, or tunes LocDiff-H. `train` also uses this module.
//! - `gather`: collects the answers from the workers.
//! - `files`: the files in `RUN/eval/`.
//! - `score`: computes metrics from answers.
//! - `table`: the results table, as JSON and as text.
//! - `calibrated`: how well the calibration of a run holds on the test photos.
//! - `published`: published results, which stand beside computed ones.
//! - `radii`: the calibration of a run: the radii around answers that `predict` writes, and the temperature of densities.
//! - `calibrate`: measures it.
//! - `predictions`: scores a file of predictions.
//! - `truth`: the true places of test photos.
//! - `suites`: the paper's experiments.

mod calibrate;
mod calibrated;
mod evaluation;
mod files;
mod gather;
mod locator;
mod model;
mod predictions;
mod published;
pub(super) mod radii;
mod score;
mod suites;
mod table;
mod target;
mod truth;

use locdiff_core::config::TrainMethod;
use locdiff_core::protocol::HybridRequest;
use serde_json::Value;

use crate::cli::{EvalRequest, Global};
use crate::error::refuse;
use crate::output::Output;
use crate::supervisor::{Supervisor, hold_signals};

pub(super) use evaluation::{Evaluation, after_training};
pub(super) use gather::RowCollector;
pub(super) use locator::{LocatingGang, prepared_job};
pub(super) use model::{ModelFile, ModelSource, head_xxh3};
pub(super) use target::{ChosenModel, choose, find_model};

/// Runs `eval`.
pub(super) fn run(request: &EvalRequest, global: &Global, output: Output) -> anyhow::Result<Value> {
    let mut result = evaluate(request, global, output)?;
    // `report` shows the results of experiments, and must know which experiment it was.
    if let (Some(suite), Some(fields)) = (request.suite, result.as_object_mut()) {
        fields.insert("suite".to_owned(), suite.name().into());
    }
    Ok(result)
}

fn evaluate(request: &EvalRequest, global: &Global, output: Output) -> anyhow::Result<Value> {
    if let Some(model) = &request.model {
        let model = model.display();
        refuse!(
            Usage,
            "--model: `eval` keeps its results in the folder of a run, which an exported file does not have; score the \
             answers of the file instead: `predict --model {model} SHARDS --out answers.csv`, then \
             `eval --predictions answers.csv`"
        );
    }
    if let Some(suite) = request.suite {
        suites::refuse_ignored(suite, request, global)?;
        if let Some(found) = suites::run(suite, request, global, output) {
            return found;
        }
    }
    if let Some(file) = &request.predictions {
        return predictions::run(file, global, output);
    }
    let mut global = global.clone();
    global.set.extend(request.exclude_km.map(|km| format!("eval.exclude_km={km:?}")));
    hold_signals()?;
    // `_use` keeps a launcher that trains the same run from removing the checkpoint during the evaluation.
    let (run, checkpoint, _use, resolved) = target::find(&global, request.hybrid && !request.tune, output)?;
    let uses_gallery = request.hybrid || request.tune || resolved.config.train.method == TrainMethod::Geoclip;
    if request.exclude_km.is_some() && !uses_gallery {
        refuse!(
            Usage,
            "--exclude-km leaves out gallery points for retrieval and LocDiff-H, but this evaluation uses neither; \
             add --hybrid or --tune"
        );
    }
    let world = super::workers(&global, &resolved)?;
    let mut evaluation = Evaluation {
        supervisor: &mut Supervisor::new()?,
        resolved,
        world: world.with_all_cores(),
        run: &run,
        checkpoint: &checkpoint,
        is_held: false,
        output,
    };
    if request.calibrate {
        let hybrid = if request.hybrid { HybridRequest::Wanted } else { HybridRequest::No };
        return calibrate::calibrate(&mut evaluation, hybrid);
    }
    if request.tune {
        let tuned = evaluation.tune(HybridRequest::Wanted)?;
        if !request.hybrid && request.suite.is_none() {
            return Ok(tuned);
        }
    }
    let hybrid = if request.hybrid { HybridRequest::Wanted } else { HybridRequest::No };
    evaluation.evaluate(hybrid, request.suite)
}
