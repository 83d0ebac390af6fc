//! `bench train` and `bench sample`: the speed of training steps and of the location of images, with random weights.

use locdiff_core::config::{Resolved, RunConfig};
use locdiff_core::protocol::{
    Ceilings, Job, ProfileRow, SampleBench, SampleBenched, StepProfile, StepSpeed, TrainBench, TrainBenched,
};
use serde_json::{Value, json};

use crate::cli::{Global, TrainBenchRequest};
use crate::error::{LaunchError, refuse};
use crate::output::Output;
use crate::rendezvous::NodeWorkers;
use crate::terminal::{TableColumn, table, width};
use crate::verbs::locations::require_shards;
use crate::verbs::{plan, run_gang};

/// Longest name of an operator or kernel in the printed table, characters. The JSON result has the whole names.
const NAME_CHARS_MAX: usize = 70;
/// Number of rows of a profile that are printed. The JSON result has all rows.
const PROFILE_ROWS_MAX: usize = 25;

/// Times training steps on random rows and, if asked, on `shards.train`.
pub(in crate::verbs) fn train(request: &TrainBenchRequest, global: &Global, output: Output) -> anyhow::Result<Value> {
    let TrainBenchRequest { steps, end_to_end, profile } = *request;
    let (resolved, world) = plan(global)?;
    let config = resolved.config.clone();
    refuse_filter(&config)?;
    world.check_division(&config)?;
    if end_to_end {
        require_shards("shards.train", &config.shards.train)?;
    }
    let folder = end_to_end.then(tempfile::tempdir).transpose()?;
    let scratch = folder.as_ref().map(|folder| folder.path().to_owned());
    let job = Job::BenchTrain(Box::new(TrainBench { config: config.clone(), steps, scratch, profile }));
    let found: TrainBenched = run_gang(&resolved, &world, job)?.first()?;
    let rows = std::iter::once(("rows in memory", &found.memory))
        .chain(found.end_to_end.as_ref().map(|speed| ("from shards", speed)));
    let (names, speeds): (Vec<String>, Vec<&StepSpeed>) = rows.map(|(name, speed)| (name.to_owned(), speed)).unzip();
    let column = |heading: &str, decimals: usize, value: fn(&StepSpeed) -> f64| TableColumn {
        heading: heading.to_owned(),
        cells: speeds.iter().map(|speed| format!("{:.decimals$}", value(speed))).collect(),
    };
    let columns = [
        column("ms/step", 3, |speed| speed.ms_per_step),
        column("10 %", 3, |speed| speed.ms_lo),
        column("90 %", 3, |speed| speed.ms_hi),
        column("rows/s", 0, |speed| speed.samples_per_s),
        column("TFLOP/s", 2, |speed| speed.tflops),
        column("GB/s", 1, |speed| speed.gb_per_s),
        column("wait %", 1, |speed| 100.0 * speed.data_wait),
    ];
    let (batch, degree, anchors) = (config.train.global_batch, config.model.degree, config.loss.anchors);
    output
        .print(&format!("L = {degree}, batch {batch}, {anchors} anchors, {steps} steps, gradients by {}", found.path));
    output.print(table("training", &names, &columns, width()).trim_end());
    print_limits(&found.ceilings, output);
    if let Some(profile) = &found.profile {
        let steps = if profile.is_graph { "replays of the CUDA graph" } else { "eager steps" };
        print_profile(profile, steps, output);
    }
    let mut result = json!({ "ok": true, "degree": degree, "batch": batch, "anchors": anchors, "steps": steps });
    merge(&mut result, json!(found.memory));
    merge(&mut result, json!(found));
    Ok(result)
}

fn print_limits(ceilings: &Ceilings, output: Output) {
    output.print(&format!(
        "limits of the device: {:.1} TFLOP/s, {:.0} GB/s",
        ceilings.product_tflops, ceilings.memory_gb_per_s
    ));
}

/// Prints the longest rows of a profile of `what`.
fn print_profile(profile: &StepProfile, what: &str, output: Output) {
    let shown = &profile.rows[..profile.rows.len().min(PROFILE_ROWS_MAX)];
    let names: Vec<String> = shown.iter().map(|row| row.name.chars().take(NAME_CHARS_MAX).collect()).collect();
    let column = |heading: &str, decimals: usize, value: fn(&ProfileRow) -> f64| TableColumn {
        heading: heading.to_owned(),
        cells: shown.iter().map(|row| format!("{:.decimals$}", value(row))).collect(),
    };
    let columns = [
        column("calls", 2, |row| row.calls),
        column("ms/step", 3, |row| row.ms_per_step),
        column("%", 1, |row| row.percent),
        column("begins at ms", 3, |row| row.first_ms),
    ];
    output.print(table(&format!("profile of {what}"), &names, &columns, width()).trim_end());
    let others = profile.rows.len() - shown.len();
    if others > 0 {
        let rest: f64 = profile.rows[shown.len()..].iter().map(|row| row.percent).sum();
        output.print(&format!("{others} more rows: {rest:.1} %"));
    }
}

/// Times the location of `images` images on the first worker.
pub(in crate::verbs) fn sample(images: u32, profile: bool, global: &Global, output: Output) -> anyhow::Result<Value> {
    let (resolved, world) = plan(global)?;
    let config = resolved.config.clone();
    let world = world.first_worker_only(config.train.threads());
    let found =
        time_images(&resolved, &world, SampleBench { config: config.clone(), images, profile, retrieval: false })?;
    let (degree, samples, steps) = (config.model.degree, config.eval.samples, config.eval.sampler_steps);
    output.print(&format!(
        "L = {degree}, {images} images, {samples} samples of {steps} steps, {} places, {} steps",
        found.anchors, found.path
    ));
    output.print(&format!(
        "{:.4} ms per image in all, {:.1} TFLOP/s; blocks: {:.4} (10 %: {:.4}, 90 %: {:.4}); prepared in {:.2} s",
        found.s_per_image * 1e3,
        found.tflops,
        found.ms_per_image,
        found.ms_lo,
        found.ms_hi,
        found.prepare_s
    ));
    print_limits(&found.ceilings, output);
    if let Some(profile) = &found.profile {
        print_profile(profile, "all blocks, per sampler step", output);
    }
    let mut result = json!({ "ok": true, "degree": degree, "images": images, "samples": samples, "steps": steps });
    merge(&mut result, json!(found));
    Ok(result)
}

/// Lets a worker time the location of images.
pub(in crate::verbs) fn time_images(
    resolved: &Resolved,
    world: &NodeWorkers,
    bench: SampleBench,
) -> anyhow::Result<SampleBenched> {
    refuse_filter(&bench.config)?;
    run_gang(resolved, world, Job::BenchSample(Box::new(bench)))?.first()
}

/// A low-pass filter depends on the training rows, and there are none.
fn refuse_filter(config: &RunConfig) -> Result<(), LaunchError> {
    if config.model.low_pass_dims > 0 {
        refuse!(
            Config,
            "model.low_pass_dims: is {}, wanted 0, because the filter needs data",
            config.model.low_pass_dims
        );
    }
    Ok(())
}

/// Adds the fields of `more` to the object `result`.
fn merge(result: &mut Value, more: Value) {
    if let (Value::Object(fields), Value::Object(more)) = (result, more) {
        fields.extend(more);
    }
}
