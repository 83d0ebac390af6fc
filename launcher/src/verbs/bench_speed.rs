//! `bench train` and `bench sample`: the speed of training steps and of the location of images, with random weights.

use locdiff_core::config::RunConfig;
use locdiff_core::protocol::{Job, SampleBench, SampleBenched, StepSpeed, TrainBench, TrainBenched};
use serde_json::{Value, json};

use super::locations::require_shards;
use super::{plan, run_gang};
use crate::cli::Global;
use crate::error::{LaunchError, refuse};
use crate::output::Output;
use crate::terminal::{TableColumn, table, width};

/// Times `steps` training steps. If `end_to_end` is true, also times a training on `shards.train`.
pub(super) fn train(steps: u32, end_to_end: bool, global: &Global, output: Output) -> anyhow::Result<Value> {
    let (resolved, world) = plan(global)?;
    let config = resolved.config.clone();
    refuse_filter(&config)?;
    world.check_divisible(&config)?;
    if end_to_end {
        require_shards("shards.train", &config.shards.train)?;
    }
    let folder = end_to_end.then(tempfile::tempdir).transpose()?;
    let scratch = folder.as_ref().map(|folder| folder.path().to_owned());
    let job = Job::BenchTrain(Box::new(TrainBench { config: config.clone(), steps, scratch }));
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
    let ceilings = &found.ceilings;
    output.print(&format!(
        "limits of the device: {:.1} TFLOP/s, {:.0} GB/s",
        ceilings.product_tflops, ceilings.memory_gb_per_s
    ));
    let mut result = json!({ "ok": true, "degree": degree, "batch": batch, "anchors": anchors, "steps": steps });
    merge(&mut result, json!(found.memory));
    merge(&mut result, json!(found));
    Ok(result)
}

/// Times the location of `images` images on the first worker.
pub(super) fn sample(images: u32, global: &Global, output: Output) -> anyhow::Result<Value> {
    let (resolved, world) = plan(global)?;
    let config = resolved.config.clone();
    refuse_filter(&config)?;
    let world = world.first_worker_only(config.train.threads());
    let job = Job::BenchSample(Box::new(SampleBench { config: config.clone(), images }));
    let found: SampleBenched = run_gang(&resolved, &world, job)?.first()?;
    let (degree, samples, steps) = (config.model.degree, config.eval.samples, config.eval.sampler_steps);
    output.print(&format!(
        "L = {degree}, {images} images, {samples} samples of {steps} steps, {} places, {} steps",
        found.anchors, found.path
    ));
    output.print(&format!(
        "{:.4} ms per image in all; blocks: {:.4} (10 %: {:.4}, 90 %: {:.4}); prepared in {:.2} s",
        found.s_per_image * 1e3,
        found.ms_per_image,
        found.ms_lo,
        found.ms_hi,
        found.prepare_s
    ));
    let mut result = json!({ "ok": true, "degree": degree, "images": images, "samples": samples, "steps": steps });
    merge(&mut result, json!(found));
    Ok(result)
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
