//! Tests of the TensorBoard events of a run. The tests read the events with TensorBoard's own Python package.

use locdiff_core::exit_code::ExitCode;
use serde_json::{Value, json};

use super::support::{BASE, run_dir, stage, train};
use crate::python_support::run_python;
use crate::stage::Stage;

fn read_events(stage: &Stage, run: &str) -> Value {
    let printed = run_python("tests/data_plane/read_events.py", &[&run_dir(stage, run)]);
    serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}"))
}

fn steps(series: &Value) -> Vec<u64> {
    let events = series.as_array().unwrap_or_else(|| panic!("no series: {series}"));
    events.iter().map(|event| event[0].as_u64().expect("an event has a step")).collect()
}

#[track_caller]
fn assert_events(found: &Value, last: u64, histograms: &[u64], images: &[u64]) {
    for tag in [
        "loss/total",
        "run/goodput_percent",
        "run/start_percent",
        "run/restart_percent",
        "device/tflops",
        "device/memory_resident_gib",
        "device/percent_of_peak",
    ] {
        assert_eq!(steps(&found["scalars"][tag]), (1..=last).collect::<Vec<_>>(), "{tag}");
    }
    let weights = found["histograms"].as_object().expect("the run has histograms");
    assert_eq!(weights.len(), 62, "wanted ten tensors for each of six modules, and two for the head");
    for (tag, series) in weights {
        assert_eq!(steps(series), histograms, "{tag}");
    }
    // The tensor `down1.x.weight` is a 144 x 144 matrix.
    let total_count = |event: &Value| -> f64 {
        let rows = event[1].as_array().expect("a histogram has rows");
        rows.iter().map(|row| row[2].as_f64().expect("a row has a count")).sum()
    };
    let series = found["histograms"]["weights/down1.x.weight"].as_array().expect("the tag has events");
    let counts = series.iter().map(total_count);
    assert!(counts.into_iter().all(|count| count == 144.0 * 144.0));
    // The density picture has five maps: one of the initial noise, and one for each of the four sampler steps. The maps
    // are in two rows.
    for (tag, size) in [("validation/answers", [1280, 680]), ("validation/density_of_first_row", [1618, 406])] {
        let series = &found["images"][tag];
        assert_eq!(steps(series), images, "{tag}");
        for event in series.as_array().expect("the tag has pictures") {
            assert_eq!(event[1].as_array().expect("the event has a picture")[..2], size, "{tag}");
        }
    }
    let metrics = found["hparams"]["metrics"].as_array().expect("the page has metrics");
    assert_eq!(metrics.len(), 7);
    for metric in metrics {
        let series = &found["scalars"][metric.as_str().expect("a metric is a tag")];
        assert_eq!(steps(series).last(), Some(&last), "{metric} has no value at the last step");
    }
    assert_eq!((&found["hparams"]["status"], &found["other_tags"]), (&json!(1), &json!([])));
    assert_eq!(found["hparams"]["values"]["train.steps"], last as f64);
    assert_eq!(found["hparams"]["values"]["model.degree"], 11.0);
}

#[test]
fn tensorboard_has_no_duplicates_after_a_kill_and_an_extension() {
    let stage = stage();
    let settings = "--workers 2 --set shards.validation=shards/small --set eval.every=5 --set eval.quick_rows=10 \
        --set eval.sampler_steps=4 --set train.histogram_every=4 --set checkpoint.every=3 --set train.peak_tflops=0.1";
    // Rank 0, which writes the event file, is killed at step 9. Training resumes from the checkpoint of step 6.
    let ran =
        stage.run(&format!("{BASE} --run shown {settings} --set train.steps=10 train --inject kill@rank=0,step=9"));
    ran.exits_with(ExitCode::Success);
    assert_events(&read_events(&stage, "shown"), 10, &[4, 8, 10], &[5, 10]);
    train(&stage, "shown", &format!("{settings} --set train.steps=13")).exits_with(ExitCode::Success);
    assert_events(&read_events(&stage, "shown"), 13, &[4, 8, 10, 12, 13], &[5, 10, 13]);
}
