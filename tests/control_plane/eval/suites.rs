//! Tests of the suites that evaluate several runs, or one run with several galleries.

mod gallery_bias;

use locdiff_core::exit_code::ExitCode;
use serde_json::Value;

use super::support::{ACCURACIES, BASE, folder, row, stage};

/// The computed rows of a JSON result.
fn computed(result: &Value) -> Vec<&Value> {
    let rows = result["rows"].as_array().expect("the result has rows");
    rows.iter().filter(|row| row["source"] == "computed").collect()
}

fn accuracies(row: &Value) -> Vec<f64> {
    ACCURACIES.iter().map(|name| row[*name].as_f64().expect("an accuracy is a number")).collect()
}

#[test]
fn runs_are_compared_by_their_losses_and_degrees() {
    let stage = stage();
    let base = BASE.replace("--run small", "--run other").replace("model.degree=8", "model.degree=5");
    let loss = "--set loss.kl_weight=0 --set loss.l2_weight=0 --set loss.cosine_weight=1";
    stage.run(&format!("{base} {loss} --workers 1 --set eval.after_train=false train")).exits_with(ExitCode::Success);
    let ran = stage.run("--json eval --suite losses --runs small,other");
    let found =
        ran.exits_with(ExitCode::Success).stderr_has("\nother: cosine 1 ").stderr_has("\nsmall: KL 0.0711").json();
    let rows = computed(&found);
    assert_eq!(rows.iter().map(|row| &row["run"]).collect::<Vec<_>>(), ["small", "other"]);
    let weights = |row: &Value| ["l2_weight", "cosine_weight", "degree", "step"].map(|name| row[name].as_f64());
    assert_eq!(weights(rows[0]), [1.0, 0.0, 8.0, 40.0].map(Some));
    assert_eq!(weights(rows[1]), [0.0, 1.0, 5.0, 40.0].map(Some));
    assert!((rows[0]["kl_weight"].as_f64().expect("a weight is a number") - 5.76 / 81.0).abs() < 1e-12, "{found}");
    ran.stderr_has("cosine Im2GPS3k *");
    // The suite writes no results of the runs, and its rows are those of single evaluations.
    assert!(!folder(&stage).exists(), "the suite wrote to the folder of the run");
    for suite_row in &rows {
        let run = suite_row["run"].as_str().expect("the run is a name");
        let single = stage.run(&format!("--json --run {run} eval")).exits_with(ExitCode::Success).json();
        assert_eq!(accuracies(suite_row), accuracies(row(&single, "locdiff")), "{run}");
    }
    let ran = stage.run("--json eval --suite degree --runs small,other");
    let by_degree = ran.exits_with(ExitCode::Success).stderr_has("\nother: L = 5 ").json();
    let names: Vec<&Value> = computed(&by_degree).into_iter().map(|row| &row["run"]).collect();
    assert_eq!(names, ["other", "small"], "the rows are not in order of degree");

    let path = stage.path().join("checkpoints/other/config.toml");
    let config = std::fs::read_to_string(&path).expect("the run has a configuration");
    for (from, to, want) in [
        (
            "\"shards/test\"",
            "\"shards/train\"",
            "shards.test: is \"shards/test\" in run small and \"shards/train\" in run other",
        ),
        ("method = \"locdiff\"", "method = \"geoclip\"", "run other has trained an image head"),
    ] {
        assert!(config.contains(from), "{config}");
        std::fs::write(&path, config.replace(from, to)).expect("the test folder is writable");
        stage.run("eval --suite losses --runs small,other").exits_with(ExitCode::Config).stderr_has(want);
    }
    let ran = stage.run("eval --suite losses --runs small,nobody");
    ran.exits_with(ExitCode::NoData).stderr_has("no run `nobody` in checkpoints");
}

#[test]
fn grids_replace_the_places_that_locdiff_chooses_among() {
    let stage = stage();
    let ran = stage.run("--json eval --suite generalizability --grids 2000,300");
    let found =
        ran.exits_with(ExitCode::Success).stderr_has("(head knn)").stderr_has("LocDiff (L = 8) loses at most").json();
    let rows = computed(&found);
    // The gallery consists of the places of the training photos.
    let want = [("gallery", 512), ("grid", 2000), ("grid", 300)];
    for (suite_row, (gallery, points)) in rows.iter().zip(want) {
        assert_eq!((&suite_row["gallery"], &suite_row["points"]), (&gallery.into(), &points.into()), "{found}");
        let flags = match gallery {
            "gallery" => "--set eval.anchors=gallery".to_owned(),
            _ => format!("--set eval.anchors=grid --set eval.grid_points={points}"),
        };
        let single = stage.run(&format!("--json {flags} eval")).exits_with(ExitCode::Success).json();
        assert_eq!(accuracies(suite_row), accuracies(row(&single, "locdiff")), "{flags}");
    }
    assert_eq!(rows.len(), want.len(), "{found}");
    let differences = found["differences"].as_array().expect("the result has differences");
    assert_eq!(differences.len(), 2, "{found}");
    for (difference, grid) in differences.iter().zip(&rows[1..]) {
        assert_eq!(difference["points"], grid["points"]);
        for (place, less) in accuracies(difference).into_iter().enumerate() {
            let want = accuracies(grid)[place] - accuracies(rows[0])[place];
            assert!((less - want).abs() < 1e-9, "{difference}");
        }
    }
}
