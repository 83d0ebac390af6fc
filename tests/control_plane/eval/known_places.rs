//! Tests of test places that are near training places: they are counted.

use locdiff_core::exit_code::ExitCode;
use serde_json::json;

use super::support::{BASE, stage};
use crate::small_shards;

#[test]
fn train_and_eval_count_test_places_near_training_places() {
    let stage = stage();
    // Of the 150 test rows, the first 30 are training rows. The other places are at least 9 km from all training places.
    small_shards::build(&stage, "near", 482..632, 2, true);
    let counts = json!({ "places": 150, "within_1m": 30, "within_100m": 30, "within_1km": 30 });
    let line = "of 150 test places, 30 lie within 1 m, 30 within 100 m and 30 within 1 km of a training place";
    // Without retrieval there is no gallery, because the codes are decoded on a grid.
    for (flag, gallery) in [("", json!(null)), ("--hybrid", counts.clone())] {
        let ran = stage.run(&format!("--json --set shards.test=shards/near eval {flag}"));
        let overlap = &ran.exits_with(ExitCode::Success).stderr_has(line).json()["overlap"];
        assert_eq!(*overlap, json!({ "training": counts, "gallery": gallery }), "eval {flag}");
    }
    let ran = stage.run("--json --set shards.test=shards/near --set shards.train=shards/gone eval");
    let overlap = &ran.exits_with(ExitCode::Success).stderr_has("were not counted").json()["overlap"];
    assert_eq!(*overlap, json!({ "training": null, "gallery": null }));
    let base = BASE.replace("--run small", "--run other");
    let ran = stage.run(&format!("{base} --workers 1 --set train.steps=2 --set shards.test=shards/near train"));
    let overlap = &ran.exits_with(ExitCode::Success).stderr_has(line).json()["overlap"];
    assert_eq!(*overlap, json!({ "training": counts, "gallery": null }));
}
