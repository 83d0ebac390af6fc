//! Tests of `predict`, and of the radii that `eval --calibrate` measures.

use std::io::Write as _;
use std::process::{Command, Stdio};

use locdiff_core::exit_code::ExitCode;
use nix::sys::signal::Signal;
use serde_json::Value;

use super::support::{read, stage};
use crate::small_shards::{self, WIDTH, embedding, npy};
use crate::stage::{Ran, Stage, eventually, signal, wait};

/// Runs a command with `input` as its stdin.
fn fed(mut command: Command, input: &str) -> Ran {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the launcher can be started");
    let mut stdin = child.stdin.take().expect("stdin is a pipe");
    stdin.write_all(input.as_bytes()).expect("the launcher reads its stdin");
    drop(stdin);
    Ran::from(child.wait_with_output().expect("the process can be waited for"))
}

fn file(stage: &Stage, name: &str) -> String {
    std::fs::read_to_string(stage.path().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The cells `id`, `lat` and `lon` of each line of a CSV file.
fn places(text: &str) -> Vec<[String; 3]> {
    let cells = |line: &str| {
        let mut cells = line.split(',').map(str::to_owned);
        std::array::from_fn(|_| cells.next().unwrap_or_default())
    };
    text.lines().skip(1).map(cells).collect()
}

#[test]
fn predictions_equal_the_answers_of_eval_with_any_number_of_workers_and_in_any_company() {
    let stage = stage();
    for (flag, answers) in [("", "predictions-locdiff.csv"), (" --hybrid", "predictions-locdiff-h.csv")] {
        stage.run(&format!("--json eval{flag}")).exits_with(ExitCode::Success);
        let mut first = None;
        for workers in [1, 2, 4] {
            // An exclusion needs true places, so `predict` ignores it.
            let line = format!(
                "--workers {workers} --set eval.exclude_km=1 predict shards/test{flag} --samples --overwrite --out out.csv"
            );
            let ran = stage.run(&line);
            ran.exits_with(ExitCode::Success);
            let found = file(&stage, "out.csv");
            assert_eq!(first.get_or_insert_with(|| found.clone()), &found, "{workers} workers");
        }
        assert_eq!(places(&first.expect("at least one prediction ran")), places(&read(&stage, answers)));
    }
    assert!(!stage.path().join("out.csv.partial").exists());

    // The same rows in reverse order and without coordinates, and one at a time.
    let rows: Vec<usize> = (1000..1100).collect();
    small_shards::build(&stage, "alone", 1000..1100, 1, false);
    stage.run("predict shards/alone --out alone.csv").exits_with(ExitCode::Success);
    let alone = places(&file(&stage, "alone.csv"));
    let numbers: Vec<f32> = rows.iter().rev().flat_map(|row| embedding(*row, 0)).collect();
    std::fs::write(stage.path().join("reversed.npy"), npy(&numbers, WIDTH)).expect("the test folder is writable");
    stage.run("predict reversed.npy --out reversed.csv").exits_with(ExitCode::Success);
    let reversed = places(&file(&stage, "reversed.csv"));
    assert_eq!(reversed[99][0], "99");
    for (one, other) in alone.iter().zip(reversed.iter().rev()) {
        assert_eq!(one[1..], other[1..], "{}", one[0]);
    }
    for index in [0, 41, 99] {
        let numbers: Vec<String> = embedding(rows[index], 0).map(|number| number.to_string()).collect();
        let ran = fed(stage.command("predict -"), &format!("[{}]\n", numbers.join(", ")));
        ran.exits_with(ExitCode::Success).stderr_has("1 prediction\n");
        let found: Value = serde_json::from_str(ran.stdout.trim()).expect("stdout is one JSON object");
        let got = ["lat", "lon"].map(|key| format!("{:.8}", found[key].as_f64().expect("the place is a number")));
        assert_eq!(got, alone[index][1..]);
    }
}

#[test]
fn killed_predictions_go_on_and_give_the_same_bytes() {
    let stage = stage();
    small_shards::build(&stage, "many", 1000..3000, 1, false);
    stage.run("predict shards/many --out whole.parquet").exits_with(ExitCode::Success);
    let pieces = || {
        let entries = std::fs::read_dir(stage.path().join("out.parquet.partial")).into_iter().flatten().flatten();
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("piece-")).count()
    };
    for wanted in [1, 3, 5] {
        let mut command = stage.command("--workers 2 predict shards/many --out out.parquet");
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the launcher can start");
        eventually("some pieces are complete", || pieces() >= wanted);
        signal(child.id(), Signal::SIGKILL);
        wait(&mut child);
        assert!(!stage.path().join("out.parquet").exists(), "the prediction ended before it was killed");
    }
    let ran = stage.run("--set eval.samples=8 predict shards/many --out out.parquet");
    ran.exits_with(ExitCode::Exists).stderr_has("another value of `settings`");
    let ran = stage.run("predict shards/many --out out.parquet");
    ran.exits_with(ExitCode::Success);
    assert!(ran.stdout.contains("resuming: "), "{}", ran.stdout);
    let [whole, resumed] = ["whole.parquet", "out.parquet"].map(|name| std::fs::read(stage.path().join(name)));
    assert_eq!(whole.expect("the file was written"), resumed.expect("the file was written"));
    assert!(!stage.path().join("out.parquet.partial").exists());
    stage.run("predict shards/many --out out.parquet").exits_with(ExitCode::Exists).stderr_has("use --overwrite");
}

#[test]
fn bad_rows_are_named_and_counted_and_bad_names_are_refused() {
    let stage = stage();
    let row = |number: usize| {
        let numbers: Vec<String> = embedding(number, 0).map(|number| number.to_string()).collect();
        format!("photo-{number},\"[{}]\"\n", numbers.join(" "))
    };
    let text = format!("path,embedding\n{}bad,\"[1 2 x]\"\n{}", row(1000), row(1001));
    std::fs::write(stage.path().join("photos.csv"), text).expect("the test folder is writable");
    let ran = stage.run("--json predict photos.csv --out out.geojson");
    ran.exits_with(ExitCode::Success).stderr_has("photos.csv: row 1: \"x\" is not a number");
    assert_eq!((ran.json()["rows"].as_u64(), ran.json()["bad_rows"].as_u64()), (Some(2), Some(1)));
    let found: Value = serde_json::from_str(&file(&stage, "out.geojson")).expect("the file is valid JSON");
    assert_eq!(found["features"][1]["properties"]["id"], "photo-1001");
    stage.run("predict photos.csv --out out.txt").exits_with(ExitCode::Usage).stderr_has("wanted .parquet, .csv or");
    stage.run("predict nothing.csv --out out.csv").exits_with(ExitCode::Io).stderr_has("nothing.csv");
    let ran = stage.run("predict shards/nothing --out out.csv");
    ran.exits_with(ExitCode::NoData).stderr_has("shards/nothing");
    assert!(!stage.path().join("out.csv.partial").exists(), "a command without a result left a folder");
    let ran = fed(stage.command("predict -"), "[1, 2, 3]\n");
    ran.exits_with(ExitCode::BadData).stderr_has("embeddings have 3 numbers");
}

/// With its default, the retrieval head depends on the data. A prediction takes it from the training data.
#[test]
fn automatic_head_and_gallery_anchors_work_without_coordinates() {
    let stage = stage();
    let line = "--set retrieval.head=auto --set eval.anchors=gallery predict";
    stage.run(&format!("{line} shards/test --out shards.csv")).exits_with(ExitCode::Success);
    let numbers: Vec<f32> = (1000..1150).flat_map(|row| embedding(row, 0)).collect();
    std::fs::write(stage.path().join("photos.npy"), npy(&numbers, WIDTH)).expect("the test folder is writable");
    stage.run(&format!("{line} photos.npy --out photos.csv")).exits_with(ExitCode::Success);
    small_shards::build(&stage, "one-view", 1000..1150, 1, false);
    stage.run(&format!("{line} shards/one-view --out one-view.csv")).exits_with(ExitCode::Success);
    let [photos, one_view] = ["photos.csv", "one-view.csv"].map(|name| places(&file(&stage, name)));
    assert_eq!(photos.len(), 150);
    for (one, other) in photos.iter().zip(&one_view) {
        assert_eq!(one[1..], other[1..]);
    }
    std::fs::create_dir(stage.path().join("mine.csv.partial")).expect("the test folder is writable");
    std::fs::write(stage.path().join("mine.csv.partial/notes"), "x").expect("the test folder is writable");
    let ran = stage.run(&format!("{line} photos.npy --out mine.csv"));
    ran.exits_with(ExitCode::Exists).stderr_has("notes is not a file of a prediction");
}

#[test]
fn radii_are_measured_on_validation_photos_and_belong_to_their_settings() {
    let stage = stage();
    small_shards::build(&stage, "validation", 4000..4400, 1, false);
    let ran = stage.run("--json predict shards/test --out before.csv");
    ran.exits_with(ExitCode::Success).stderr_has("`eval --calibrate` measures them");
    assert_eq!(ran.json()["calibrated"], false);
    let ran = stage.run("--json --set shards.validation=shards/validation eval --calibrate");
    ran.exits_with(ExitCode::Success).stderr_has("radii in checkpoints/small/eval/calibration.json");
    for (row, wanted) in ran.json()["rows"].as_array().expect("the result has rows").iter().zip([0.5, 0.9]) {
        let share = row["share"].as_f64().expect("the share is a number");
        assert!((share - wanted).abs() < 0.1, "{share} of {wanted}");
    }
    let ran = stage.run("--json predict shards/test --out after.csv");
    assert_eq!(ran.exits_with(ExitCode::Success).json()["calibrated"], true);
    let text = file(&stage, "after.csv");
    assert_eq!(places(&text), places(&file(&stage, "before.csv")));
    for line in text.lines().skip(1) {
        let cells: Vec<&str> = line.split(',').collect();
        let [half, most] = [3, 4].map(|cell| cells[cell].parse::<f64>().expect("the radius is a number"));
        assert!(half > 0.0 && half <= most && most < 20_038.0, "{line}");
    }
    let ran = stage.run("--json --set eval.samples=5 predict shards/test --out other.csv");
    assert_eq!(ran.exits_with(ExitCode::Success).stderr_has("`samples`").json()["calibrated"], false);
    small_shards::build(&stage, "few", 4000..4150, 1, false);
    let ran = stage.run("--json --set shards.validation=shards/few eval --calibrate");
    ran.exits_with(ExitCode::NoData).stderr_has("150 usable photos, wanted at least 200");
}
