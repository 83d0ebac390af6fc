//! Tests that the answer for a row does not depend on the number of workers, on the other rows, or on duplicated views.

use std::process::Stdio;

use locdiff_core::exit_code::ExitCode;
use serde_json::Value;

use super::support::{ACCURACIES, folder, read, row, stage};
use crate::nodes::{bytes, with_a_killed_node};
use crate::small_shards;
use crate::stage::Ran;

#[test]
fn number_of_workers_does_not_change_any_answer() {
    let stage = stage();
    let mut first = None;
    // The 150 rows form three blocks, so one of four workers has nothing to do.
    for workers in [1, 2, 4] {
        let ran = stage.run(&format!("--json --workers {workers} eval --hybrid"));
        ran.exits_with(ExitCode::Success)
            .stderr_has("checkpoint (newest whole checkpoint):\n  ")
            .stderr_has("checkpoints/small/step-00000040\n");
        let files = [
            "truth.csv",
            "samples.csv",
            "images.json",
            "predictions-retrieval.csv",
            "predictions-retrieval-consensus.csv",
            "predictions-locdiff.csv",
            "predictions-locdiff-h.csv",
        ];
        let found = (files.map(|name| read(&stage, name)), ran.json());
        let rows = found.1["rows"].as_array().expect("the result has rows");
        assert_eq!(rows.len(), 4, "{rows:?}");
        for row in rows {
            assert_eq!((row["source"].as_str(), row["rows"].as_u64()), (Some("computed"), Some(150)), "{row}");
            for key in ACCURACIES.iter().chain(&["median_km", "mean_km", "geo_score"]) {
                let number =
                    |end: &str| row[format!("{key}{end}")].as_f64().unwrap_or_else(|| panic!("{key}{end}: {row}"));
                assert!(number("_lo") <= number("") && number("") <= number("_hi"), "{key}: {row}");
            }
            assert!(row["density"].is_number() && row["coverage"].is_number(), "{row}");
        }
        let first = first.get_or_insert_with(|| found.clone());
        assert_eq!(found.0, first.0, "the answers of {workers} workers and of one worker differ");
        assert_eq!(found.1["rows"], first.1["rows"], "the scores of {workers} workers and of one worker differ");
        assert_eq!(
            found.1["differences"], first.1["differences"],
            "`differences` is not the same for {workers} workers as for one worker"
        );
    }
    // The model must have learnt something, or the comparison would mean little. Random answers would be right in 4 %
    // of the rows.
    let (_, result) = first.expect("at least one evaluation ran");
    let accuracy = row(&result, "locdiff")["acc_2500km"].as_f64().expect("the accuracy is a number");
    assert!(accuracy > 15.0, "only {accuracy} % of the rows are within 2500 km, wanted more than 15 %");
}

#[test]
fn other_rows_and_duplicated_views_do_not_change_an_answer() {
    let stage = stage();
    small_shards::build(&stage, "alone", 1000..1100, 1, false);
    small_shards::build(&stage, "fewer", 1000..1070, 1, false);
    small_shards::build(&stage, "doubled", 1000..1100, 2, false);
    let answers = |name: &str| {
        stage.run(&format!("--json --set shards.test=shards/{name} eval")).exits_with(ExitCode::Success);
        let text = read(&stage, "predictions-locdiff.csv");
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let alone = answers("alone");
    assert_eq!(alone.len(), 101);
    assert_eq!(answers("fewer"), alone[..71]);
    assert_eq!(answers("doubled"), alone);
    assert!(!folder(&stage).join("predictions-locdiff-h.csv").exists(), "LocDiff-H ran, but --hybrid was not given");
}

#[test]
fn different_seed_or_sampler_gives_different_samples() {
    let stage = stage();
    let ran = stage.run("--json --set eval.checkpoint=best eval");
    ran.exits_with(ExitCode::NoData).stderr_has("no checkpoint with a validation score");
    let samples = |more: &str| {
        stage.run(&format!("--json {more} eval")).exits_with(ExitCode::Success);
        read(&stage, "samples.csv")
    };
    let first = samples("");
    assert_ne!(samples("--set train.seed=5"), first);
    assert_ne!(samples("--set eval.guidance=0 --set eval.sampler_steps=200"), first);
    assert_eq!(samples(""), first);
}

/// Each evaluation must print its own results. Afterwards, the folder must hold the complete results of one of the two
/// evaluations.
#[test]
fn concurrent_evaluations_of_one_run_do_not_mix() {
    let stage = stage();
    let line = |seed: u32| format!("--json --set train.seed={seed} eval");
    let rows = |ran: &Ran| ran.json()["rows"].clone();
    let alone = [1, 2].map(|seed| rows(&stage.run(&line(seed))));
    assert_ne!(alone[0], alone[1], "different seeds gave the same results");
    for _ in 0..4 {
        let started = [1, 2].map(|seed| {
            let mut command = stage.command(&line(seed));
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the launcher can be started")
        });
        let ended = started.map(|child| Ran::from(child.wait_with_output().expect("the process can be waited for")));
        for (ran, alone) in ended.iter().zip(&alone) {
            ran.exits_with(ExitCode::Success);
            assert_eq!(rows(ran), *alone);
        }
        let table: Value = serde_json::from_str(&read(&stage, "table.json")).expect("the file is valid JSON");
        assert!(alone.contains(&table["rows"]));
    }
}

#[test]
fn node_killed_during_an_evaluation_changes_no_byte() {
    let stage = stage();
    // Half of the rows hold a whole piece.
    small_shards::build(&stage, "many", 2000..2600, 1, true);
    let settings = "--device cpu --json --run small --set shards.test=shards/many";
    stage.run(&format!("{settings} --workers 2 eval --hybrid")).exits_with(ExitCode::Success);
    let one = bytes(&folder(&stage));
    assert!(one.len() >= 6, "{:?}", one.keys());
    for comes_back in [true, false] {
        std::fs::remove_dir_all(folder(&stage)).expect("the evaluation has a folder");
        let line = format!("{settings} --workers 1 --set supervise.node_patience_s=4 eval --hybrid");
        let log = with_a_killed_node(&stage, &line, comes_back);
        assert!(log.contains("256 of 600 photos are located already"), "{log}");
        assert_eq!(bytes(&folder(&stage)), one, "the node comes back: {comes_back}");
    }
}
