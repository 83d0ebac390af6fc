//! `eval --suite losses` and `eval --suite degree`: one row for each of several runs, with the loss or the degree that
//! it was trained with. All runs are evaluated on the same test photos.

use std::path::PathBuf;

use locdiff_core::config::{self, KlDirection, Layer, Resolved, RunConfig, TrainMethod};
use locdiff_core::protocol::{EvalSummary, HybridRequest};
use serde_json::{Map, Value, json};

use crate::cli::{Global, Suite};
use crate::error::{LaunchError, refuse};
use crate::gpus;
use crate::output::Output;
use crate::rendezvous::NodeWorkers;
use crate::run_folder::{CONFIG, CheckpointUse, WholeCheckpoint};
use crate::supervisor::{Supervisor, hold_signals};
use crate::terminal::width;
use crate::verbs::eval::evaluation::{Evaluation, Rated};
use crate::verbs::eval::published;
use crate::verbs::eval::table::{self, Computed, Row};
use crate::verbs::eval::target;

/// Fields of `[eval]` that may differ between the runs: they choose a checkpoint, or are about training.
const OTHER_FIELDS: [&str; 5] = ["checkpoint", "every", "quick_rows", "quick_samples", "after_train"];

/// A run to evaluate.
struct ComparedRun {
    name: String,
    run: PathBuf,
    checkpoint: WholeCheckpoint,
    /// Keeps the checkpoint from being removed.
    _use: CheckpointUse,
    resolved: Resolved,
    /// The configuration that the run was trained with.
    trained: RunConfig,
}

/// Evaluates the runs and prints the table.
pub(super) fn run(suite: Suite, names: &[String], global: &Global, output: Output) -> anyhow::Result<Value> {
    if names.is_empty() {
        refuse!(Usage, "eval --suite {} compares runs; name them with --runs A,B,...", suite.name());
    }
    hold_signals()?;
    let targets = names.iter().map(|name| find(name, global, output)).collect::<anyhow::Result<Vec<ComparedRun>>>()?;
    check_settings(&targets)?;
    let mut supervisor = Supervisor::new()?;
    let mut found = Vec::new();
    for target in &targets {
        let world = NodeWorkers::plan(&target.resolved.config, &gpus::inventory())?.with_all_cores();
        let mut evaluation = Evaluation {
            supervisor: &mut supervisor,
            resolved: target.resolved.clone(),
            world,
            run: &target.run,
            checkpoint: &target.checkpoint,
            is_held: false,
            output,
        };
        found.push((target, evaluation.rate(HybridRequest::No)?));
    }
    let (first, rated) = &found[0];
    if let Some((other, _)) = found.iter().find(|(_, other)| other.summary.fingerprint != rated.summary.fingerprint) {
        refuse!(
            BadData,
            "runs {} and {} were evaluated on different test photos; evaluate again",
            first.name,
            other.name
        );
    }
    let (eval, summary) = (&first.resolved.config.eval, rated.summary.clone());
    let data = table::data_summary(&summary, rated.places.count(), eval);
    let thresholds_km = eval.thresholds_km.clone();
    if suite == Suite::Degree {
        found.sort_by_key(|(_, rated)| rated.summary.degree);
    }
    let mut rows: Vec<Row> = found.into_iter().flat_map(|(target, rated)| target_rows(suite, target, rated)).collect();
    rows.extend(published::rows_for(suite, &thresholds_km).into_iter().map(Row::Published));
    output.print(table::text(&data, &thresholds_km, &rows, width()).trim_end());
    Ok(json!({ "ok": true, "data": summary, "rows": rows }))
}

fn find(name: &str, global: &Global, output: Output) -> anyhow::Result<ComparedRun> {
    let global = Global { run: Some(name.to_owned()), ..global.clone() };
    let (run, checkpoint, protected, resolved) = target::find(&global, false, output)?;
    let trained = config::load(&[Layer::File(run.join(CONFIG))]).map_err(LaunchError::from)?.config;
    if trained.train.method != TrainMethod::Locdiff {
        refuse!(
            Config,
            "run {name} has trained an image head, so it has no LocDiff to evaluate; leave it out of --runs"
        );
    }
    Ok(ComparedRun { name: name.to_owned(), run, checkpoint, _use: protected, resolved, trained })
}

/// Fails if the runs name different test data, or would be evaluated with different settings.
fn check_settings(runs: &[ComparedRun]) -> Result<(), LaunchError> {
    let Some(first) = runs.first() else { return Ok(()) };
    let wanted = settings(&first.resolved.config);
    for run in runs {
        for ((field, one), (_, other)) in wanted.iter().zip(settings(&run.resolved.config)) {
            if *one != other {
                refuse!(
                    Config,
                    "{field}: is {one} in run {} and {other} in run {}; choose one with `--set {field}=...`",
                    first.name,
                    run.name
                );
            }
        }
    }
    Ok(())
}

/// The settings that must be the same in all runs.
fn settings(config: &RunConfig) -> Vec<(String, Value)> {
    let mut found = vec![
        ("shards.test".to_owned(), json!(config.shards.test)),
        ("shards.mean_views".to_owned(), json!(config.shards.mean_views)),
    ];
    if let Value::Object(eval) = json!(config.eval) {
        let own = eval.into_iter().filter(|(field, _)| !OTHER_FIELDS.contains(&field.as_str()));
        found.extend(own.map(|(field, value)| (format!("eval.{field}"), value)));
    }
    found
}

/// The rows of a run. There is one: that of LocDiff.
fn target_rows(suite: Suite, target: &ComparedRun, rated: Rated) -> impl Iterator<Item = Row> {
    let Rated { scores, summary, .. } = rated;
    let labels = labels(&target.name, &target.trained, &summary);
    let what = match suite {
        Suite::Losses => loss_name(&target.trained),
        _ => format!("L = {}", summary.degree),
    };
    let (name, dataset) = (format!("{}: {what}", target.name), target.resolved.config.shards.test.clone());
    scores.into_iter().map(move |scored| {
        Row::Computed(Computed {
            method: scored.method.name().to_owned(),
            rating: scored.rating,
            name: Some(name.clone()),
            dataset: dataset.clone(),
            simulated: summary.is_simulated,
            source: "computed",
            out_of_range: None,
            labels: labels.clone(),
        })
    })
}

/// The fields of a row that describe its run.
fn labels(run: &str, trained: &RunConfig, summary: &EvalSummary) -> Map<String, Value> {
    let loss = &trained.loss;
    let labels = [
        ("run", json!(run)),
        ("step", json!(summary.step)),
        ("degree", json!(summary.degree)),
        ("kl", json!(loss.kl)),
        ("kl_weight", json!(kl_weight(trained))),
        ("l2_weight", json!(loss.l2_weight)),
        ("l1_weight", json!(loss.l1_weight)),
        ("cosine_weight", json!(loss.cosine_weight)),
    ];
    labels.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn kl_weight(trained: &RunConfig) -> f64 {
    trained.loss.kl_weight(trained.model.kept_dims() as f64)
}

/// The terms of a training loss with their weights, such as "KL 0.0025, L2 1".
fn loss_name(trained: &RunConfig) -> String {
    let loss = &trained.loss;
    let kl = match loss.kl {
        KlDirection::Reverse => "KL",
        KlDirection::Forward => "forward KL",
    };
    let terms =
        [(kl, kl_weight(trained)), ("L2", loss.l2_weight), ("L1", loss.l1_weight), ("cosine", loss.cosine_weight)];
    let terms = terms.into_iter().filter(|(_, weight)| *weight > 0.0);
    // Four significant digits are enough to recognise a weight.
    let terms: Vec<String> = terms.map(|(name, weight)| format!("{name} {}", rounded(weight))).collect();
    terms.join(", ")
}

/// `value` with at most four significant digits.
fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_named_by_their_terms() {
        let name = |lines: &[&str]| {
            let layers: Vec<Layer> = lines.iter().map(|line| Layer::Set((*line).to_owned())).collect();
            loss_name(&config::load(&layers).expect("the settings are valid").config)
        };
        assert_eq!(name(&["model.degree=47"]), "KL 0.0025, L2 1");
        assert_eq!(name(&["model.degree=22", "loss.kl=forward", "loss.l2_weight=0"]), "forward KL 0.01089");
        assert_eq!(name(&["loss.kl_weight=0", "loss.l2_weight=0", "loss.cosine_weight=0.5"]), "cosine 0.5");
    }
}
