//! Tests of test places near known places: `train` and `eval` count them, and `eval --exclude-km` leaves out gallery
//! points near them.

use locdiff_core::exit_code::ExitCode;
use locdiff_core::geo::{Degrees, Place, UnitVector};
use serde_json::{Value, json};

use super::support::{BASE, folder, read, row, stage};
use crate::small_shards;
use crate::stage::Stage;

#[test]
fn train_and_eval_count_test_places_near_training_places() {
    let stage = stage();
    // Of the 150 test rows, the first 30 are training rows. The other places are at least 9 km from all training
    // places.
    small_shards::build(&stage, "near", 482..632, 2, true);
    let counts = json!({ "places": 150, "within_1m": 30, "within_100m": 30, "within_1km": 30 });
    let line = "of 150 test places, 30 lie within 1 m, 30 within 100 m and 30 within 1 km of a training place";
    // Without retrieval there is no gallery, because the codes are decoded on a grid.
    for (flag, gallery) in [("", json!(null)), ("--hybrid", counts.clone())] {
        let ran = stage.run(&format!("--json --set shards.test=shards/near eval {flag}"));
        let overlap = &ran.exits_with(ExitCode::Success).stderr_has(line).json()["overlap"];
        assert_eq!(*overlap, json!({ "training": counts, "gallery": gallery }), "eval {flag}");
    }
    let plot = "accuracy-by-distance.svg";
    let table: Value = serde_json::from_str(&read(&stage, "table.json")).expect("the file holds JSON");
    let curves = &table["by_training_distance"];
    assert_eq!((&curves["bins"][0]["rows"], &curves["bins"][0]["from_km"]), (&json!(30), &json!(0.0)), "{curves}");
    let methods = curves["curves"].as_array().expect("there is a curve per method");
    let names: Vec<&Value> = methods.iter().map(|curve| &curve["method"]).collect();
    assert_eq!(names, ["retrieval", "retrieval-consensus", "locdiff", "locdiff-h"]);
    assert_eq!(read(&stage, plot).matches("<polyline").count(), 20, "4 methods at 5 distances");
    let ran = stage.run("--json --set shards.test=shards/near --set shards.train=shards/gone eval");
    let overlap = &ran.exits_with(ExitCode::Success).stderr_has("were not counted").json()["overlap"];
    assert_eq!(*overlap, json!({ "training": null, "gallery": null }));
    assert!(!folder(&stage).join(plot).exists(), "the plot of an earlier evaluation is left");
    let base = BASE.replace("--run small", "--run other");
    let ran = stage.run(&format!("{base} --workers 1 --set train.steps=2 --set shards.test=shards/near train"));
    let overlap = &ran.exits_with(ExitCode::Success).stderr_has(line).json()["overlap"];
    assert_eq!(*overlap, json!({ "training": counts, "gallery": null }));
}

/// The places in a file of `RUN/eval/`.
fn places(stage: &Stage, name: &str) -> Vec<UnitVector> {
    let place = |line: &str| {
        let mut numbers = line.split(',').skip(1).map(|text| Degrees(text.parse().expect("a coordinate is a number")));
        let mut next = || numbers.next().expect("a line has two coordinates");
        Place::new(next(), next()).expect("the coordinates are in range").into()
    };
    read(stage, name).lines().skip(1).map(place).collect()
}

#[test]
fn excluded_gallery_points_are_neither_retrieved_nor_tuned_with() {
    let stage = stage();
    small_shards::build(&stage, "near", 482..632, 2, true);
    small_shards::build(&stage, "validation", 300..400, 1, false);
    let flags = "--json --set shards.test=shards/near --set shards.validation=shards/validation \
                 --set retrieval.mode=any-sample --set retrieval.radius_km=2000 --set retrieval.knn_neighbours=1";
    let found = stage.run(&format!("{flags} eval --hybrid")).exits_with(ExitCode::Success).json();
    assert!(row(&found, "retrieval")["acc_25km"].as_f64() > Some(5.0), "no photo retrieves its own place: {found}");
    assert_eq!(found["exclude_km"], 0.0);
    let line = "gallery points within 300 km of a photo's true place are left out";
    let found = stage.run(&format!("{flags} eval --hybrid --tune --exclude-km 300"));
    let found = found.exits_with(ExitCode::Success).json();
    assert_eq!((&found["exclude_km"], &row(&found, "retrieval")["acc_200km"]), (&300.0.into(), &0.0.into()));
    assert!(read(&stage, "report.txt").replace("\n  ", " ").contains(line));
    let [truth, own, hybrid] =
        ["truth.csv", "predictions-locdiff.csv", "predictions-locdiff-h.csv"].map(|name| places(&stage, name));
    let mut from_gallery = 0;
    for ((truth, _), hybrid) in truth.iter().zip(&own).zip(&hybrid).filter(|((_, own), hybrid)| own != hybrid) {
        assert!(
            truth.distance(*hybrid).0 > 300.0,
            "LocDiff-H answers with a point {} km away",
            truth.distance(*hybrid).0
        );
        from_gallery += 1;
    }
    assert!(from_gallery > 50, "LocDiff-H gives only {from_gallery} of 150 answers from the gallery");
    // The comment of `tuned.toml` has the accuracies of retrieval on the validation photos, which are training photos.
    let tuned = read(&stage, "tuned.toml");
    let retrieval = tuned.lines().find(|line| line.starts_with("# retrieval")).expect("the accuracies of retrieval");
    assert!(tuned.contains(line) && retrieval.split_whitespace().nth(4) == Some("0.0"), "{tuned}");
    let ran = stage.run("--set shards.test=shards/near --set eval.exclude_km=20000 eval --hybrid");
    ran.exits_with(ExitCode::Config).stderr_has("all gallery points are within eval.exclude_km (20000 km)");
    stage.run("eval --exclude-km 5").exits_with(ExitCode::Usage).stderr_has("add --hybrid or --tune");
}
