//! `eval --suite time`: the time to locate an image by sampling, for different numbers of sampler steps, and by
//! retrieval. The weights and the images are random, as in `bench sample`.

use locdiff_core::protocol::SampleBench;
use serde::Serialize;
use serde_json::{Value, json};

use crate::cli::Global;
use crate::gpus;
use crate::output::Output;
use crate::rendezvous::{NodeWorkers, cores};
use crate::terminal::{TableColumn, table, width, wrapped};
use crate::verbs::bench::speed::time_images;
use crate::verbs::resolve_with_run;

/// Numbers of sampler steps to time, besides `eval.sampler_steps`. The paper uses 200.
const STEPS: [u32; 5] = [1, 5, 20, 50, 200];
/// Number of images on a GPU: as many as Im2GPS3k has.
const IMAGES_GPU: u32 = 2997;
/// Number of images on the CPU: one block.
const IMAGES_CPU: u32 = 64;
/// The paper's times, seconds per image: 16 samples of 200 steps, and GeoCLIP's retrieval.
const PUBLISHED: (TimeRow, TimeRow) = (
    TimeRow { operation: "sampling", steps: Some(200), s_per_image: 0.056, source: "published" },
    TimeRow { operation: "retrieval", steps: None, s_per_image: 0.024, source: "published" },
);

/// The time of one operation.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct TimeRow {
    operation: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<u32>,
    s_per_image: f64,
    source: &'static str,
}

impl TimeRow {
    fn name(&self) -> String {
        let steps = match self.steps {
            None => String::new(),
            Some(1) => ", 1 step".to_owned(),
            Some(steps) => format!(", {steps} steps"),
        };
        let mark = if self.source == "published" { " *" } else { "" };
        format!("{}{steps}{mark}", self.operation)
    }
}

/// Times sampling and retrieval, and prints the table.
pub(super) fn run(global: &Global, output: Output) -> anyhow::Result<Value> {
    let resolved = resolve_with_run(global)?;
    let config = &resolved.config;
    let world = NodeWorkers::plan(config, &gpus::inventory())?.first_worker_only(cores());
    let is_gpu = world.slots.iter().any(|slot| slot.gpu.is_some());
    let images = if is_gpu { IMAGES_GPU } else { IMAGES_CPU };
    let (mut rows, mut places, mut retrieval) = (Vec::new(), 0, None);
    for steps in steps(config.eval.sampler_steps, config.diffusion.timesteps) {
        let mut config = config.clone();
        config.eval.sampler_steps = steps;
        let bench = SampleBench { config, images, profile: false, retrieval: retrieval.is_none() };
        let found = time_images(&resolved, &world, bench)?;
        places = found.anchors;
        retrieval = retrieval.or(found.retrieval_s_per_image);
        let (steps, s_per_image) = (Some(steps), found.s_per_image);
        rows.push(TimeRow { operation: "sampling", steps, s_per_image, source: "computed" });
    }
    let row = |s_per_image| TimeRow { operation: "retrieval", steps: None, s_per_image, source: "computed" };
    rows.extend(retrieval.map(row));
    rows.extend([PUBLISHED.0, PUBLISHED.1]);
    let (degree, samples, threads) = (config.model.degree, config.eval.samples, world.threads());
    let device = if is_gpu { "a GPU".to_owned() } else { format!("the CPU with {threads} threads") };
    let title = format!(
        "{images} random images on {device}; sampling: L = {degree}, {samples} samples per image, {places} places; \
         retrieval: GeoCLIP's image head, a gallery of {places} points"
    );
    output.print(&wrapped(&title, 2, width()));
    output.print(&text(&rows));
    output.print("* published in the paper, with 16 samples per image, on a GPU with 24 GB");
    let device = if is_gpu { "cuda" } else { "cpu" };
    let data = json!({
        "device": device, "threads": threads, "images": images, "degree": degree, "samples": samples, "places": places,
    });
    Ok(json!({ "ok": true, "data": data, "rows": rows }))
}

/// The numbers of steps to time: `configured` and [`STEPS`], but at most `timesteps`, the steps of the noise schedule.
fn steps(configured: u32, timesteps: u32) -> Vec<u32> {
    let mut steps: Vec<u32> = STEPS.into_iter().chain([configured]).filter(|steps| *steps <= timesteps).collect();
    steps.sort_unstable();
    steps.dedup();
    steps
}

fn text(rows: &[TimeRow]) -> String {
    let names: Vec<String> = rows.iter().map(TimeRow::name).collect();
    let column = |heading: &str, cell: &dyn Fn(f64) -> String| TableColumn {
        heading: heading.to_owned(),
        cells: rows.iter().map(|row| cell(row.s_per_image)).collect(),
    };
    let columns =
        [column("s/image", &|seconds| format!("{seconds:.6}")), column("images/s", &|s| format!("{:.1}", 1.0 / s))];
    table("operation", &names, &columns, width()).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configured_steps_are_timed_and_steps_beyond_the_schedule_are_not() {
        assert_eq!(steps(20, 200), STEPS);
        assert_eq!(steps(7, 50), [1, 5, 7, 20, 50]);
        assert!(text(&[PUBLISHED.0, PUBLISHED.1]).contains("sampling, 200 steps *  0.056000      17.9"));
    }
}
