//! Tests of `bench train` and `bench sample`. They check the numbers that a benchmark must print, not the speed.

use locdiff_core::exit_code::ExitCode;
use serde_json::Value;

use crate::small_shards;
use crate::stage::{Stage, Worker};

const SMALL: &str = "--device cpu --json --set model.degree=5 --set loss.anchors=32 --set train.global_batch=24";

fn positive(result: &Value, field: &str) {
    assert!(result[field].as_f64().is_some_and(|number| number > 0.0), "{field} in {result}");
}

#[test]
fn bench_train_times_steps_in_memory_and_from_shards() {
    let stage = Stage::new(Worker::Real);
    small_shards::build(&stage, "small", 0..128, 1, false);
    let line =
        format!("{SMALL} --workers 2 --set shards.train=shards/small bench train --steps 6 --end-to-end --profile");
    let result = stage.run(&line).exits_with(ExitCode::Success).json();
    for field in ["ms_per_step", "ms_lo", "ms_hi", "samples_per_s", "tflops", "gb_per_s"] {
        positive(&result, field);
        positive(&result["end_to_end"], field);
    }
    for field in ["product_tflops", "memory_gb_per_s"] {
        positive(&result["ceilings"], field);
    }
    let profile = result["profile"]["rows"].as_array().expect("a profile has rows");
    for row in profile.iter().take(5) {
        ["calls", "ms_per_step", "percent"].iter().for_each(|field| positive(row, field));
    }
    assert!(profile.iter().any(|row| row["name"] == "aten::addmm"), "no matrix product in {profile:?}");
    let sizes = ["degree", "batch", "anchors", "steps"].map(|field| result[field].as_u64());
    assert_eq!(sizes, [Some(5), Some(24), Some(32), Some(6)], "{result}");
    assert_eq!((&result["path"], &result["peak_gib"]), (&"autograd".into(), &Value::Null), "{result}");
    let ms = result["ms_per_step"].as_f64().unwrap_or_default();
    let rows_per_s = result["samples_per_s"].as_f64().unwrap_or_default();
    assert!((rows_per_s * ms / 24e3 - 1.0).abs() < 1e-6, "{result}");
    let ran = stage.run(&format!("{SMALL} --workers 25 bench train"));
    ran.exits_with(ExitCode::Config).stderr_has("train.global_batch: is 24, which is too few for 25");
    let left = std::fs::read_dir(stage.path().join("checkpoints")).is_ok_and(|mut found| found.next().is_some());
    assert!(!left, "the benchmark left a run behind");
}

#[test]
fn bench_sample_times_images_and_a_filter_is_refused() {
    let stage = Stage::new(Worker::Real);
    let line = format!("{SMALL} --set eval.samples=2 --set eval.sampler_steps=2 bench sample --images 100 --profile");
    let result = stage.run(&line).exits_with(ExitCode::Success).json();
    for field in ["s_per_image", "ms_per_image", "ms_lo", "ms_hi", "prepare_s", "tflops"] {
        positive(&result, field);
    }
    positive(&result["ceilings"], "product_tflops");
    let profile = result["profile"]["rows"].as_array().expect("a profile has rows");
    assert!(profile.iter().any(|row| row["name"] == "aten::addmm"), "no matrix product in {profile:?}");
    let sizes = ["degree", "images", "samples", "steps"].map(|field| result[field].as_u64());
    assert_eq!(sizes, [Some(5), Some(100), Some(2), Some(2)], "{result}");
    assert_eq!(result.get("retrieval_s_per_image"), None, "{result}");
    let line = format!("{SMALL} --set eval.samples=2 --set eval.sampler_steps=2 --set diffusion.timesteps=4");
    let result = stage.run(&format!("{line} eval --suite time")).exits_with(ExitCode::Success).json();
    let rows = result["rows"].as_array().expect("the result has rows");
    rows.iter().for_each(|row| positive(row, "s_per_image"));
    let what = |row: &Value| format!("{} {} {}", row["source"], row["operation"], row["steps"]).replace('"', "");
    let what: Vec<String> = rows.iter().map(what).collect();
    let want = ["computed sampling 1", "computed sampling 2", "computed retrieval null", "published sampling 200"];
    assert_eq!((&what[..4], &*what[4]), (&want.map(str::to_owned)[..], "published retrieval null"));
    let ran = stage.run(&format!("{SMALL} --set model.low_pass_dims=9 bench sample"));
    ran.exits_with(ExitCode::Config).stderr_has("model.low_pass_dims: is 9, wanted 0");
}
