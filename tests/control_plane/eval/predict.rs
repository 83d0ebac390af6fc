//! Tests of `predict`, and of the radii that `eval --calibrate` measures.

mod exported;
mod prior;
mod resume;

use std::io::Write as _;
use std::process::{Command, Stdio};

use locdiff_core::exit_code::ExitCode;
use serde_json::Value;

use super::support::{BASE, read, stage};
use crate::small_shards::{self, WIDTH, embedding, npy};
use crate::stage::{Ran, Stage};

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

    // The same rows in another order, without coordinates and through stdin; then one at a time.
    let rows: Vec<usize> = (1000..1100).collect();
    small_shards::build(&stage, "alone", 1000..1100, 1, false);
    let object = |row: usize| {
        let numbers: Vec<String> = embedding(row, 0).map(|number| number.to_string()).collect();
        format!("{{\"id\": \"photo-{row}\", \"embedding\": [{}]}}\n", numbers.join(", "))
    };
    for flag in ["--samples", "--hybrid"] {
        stage.run(&format!("predict shards/alone {flag} --overwrite --out alone.csv")).exits_with(ExitCode::Success);
        let mixed: String = (0..100).map(|index| object(rows[index * 37 % 100])).collect();
        let command = stage.command(&format!("--workers 2 predict - {flag} --overwrite --out mixed.csv"));
        fed(command, &mixed).exits_with(ExitCode::Success);
        let sorted = |name: &str| {
            let mut lines: Vec<String> = file(&stage, name).lines().map(str::to_owned).collect();
            lines.sort_unstable();
            lines
        };
        assert_eq!(sorted("alone.csv"), sorted("mixed.csv"), "{flag}");
        assert_ne!(file(&stage, "alone.csv"), file(&stage, "mixed.csv"));
    }
    let alone = file(&stage, "alone.csv");
    for index in [0, 99] {
        let command = stage.command("predict - --hybrid --overwrite --out one.csv");
        fed(command, &object(rows[index])).exits_with(ExitCode::Success);
        assert_eq!(file(&stage, "one.csv").lines().nth(1), alone.lines().nth(index + 1));
    }
    let ran = fed(stage.command("predict - --hybrid"), &object(rows[41]));
    ran.exits_with(ExitCode::Success).stderr_has("1 prediction\n");
    let found: Value = serde_json::from_str(ran.stdout.trim()).expect("stdout is one JSON object");
    let got = ["lat", "lon"].map(|key| format!("{:.8}", found[key].as_f64().expect("the place is a number")));
    assert_eq!(got, places(&alone)[41][1..]);
}

#[test]
fn bad_rows_are_named_and_counted_and_bad_names_are_refused() {
    let stage = stage();
    let row = |number: usize| {
        let numbers: Vec<String> = embedding(number, 0).map(|number| number.to_string()).collect();
        format!("photo-{number},\"[{}]\"\n", numbers.join(" "))
    };
    // The model decides the width, not the first row.
    let text = format!("path,embedding\nshort,\"[1 2]\"\n{}bad,\"[1 2 x]\"\n{}", row(1000), row(1001));
    std::fs::write(stage.path().join("photos.csv"), text).expect("the test folder is writable");
    let ran = stage.run("--json predict photos.csv --out out.geojson");
    ran.exits_with(ExitCode::Success).stderr_has("photos.csv: row 2: \"x\" is not a number");
    ran.stderr_has("photos.csv: row 0: the embedding has 2 numbers, wanted 12");
    assert_eq!((ran.json()["rows"].as_u64(), ran.json()["bad_rows"].as_u64()), (Some(2), Some(2)));
    let found: Value = serde_json::from_str(&file(&stage, "out.geojson")).expect("the file is valid JSON");
    assert_eq!(found["features"][1]["properties"]["id"], "photo-1001");
    stage.run("predict photos.csv --out out.txt").exits_with(ExitCode::Usage).stderr_has("wanted .parquet, .csv or");
    stage.run("predict nothing.csv --out out.csv").exits_with(ExitCode::Io).stderr_has("nothing.csv");
    let ran = stage.run("predict shards/nothing --out out.csv");
    ran.exits_with(ExitCode::NoData).stderr_has("shards/nothing");
    assert!(!stage.path().join("out.csv.partial").exists(), "a command without a result left a folder");
    let ran = fed(stage.command("predict -"), "[1, 2, 3]\n");
    ran.exits_with(ExitCode::BadData).stderr_has("the embedding has 3 numbers, wanted 12");
    // The sign of a zero, which JavaScript loses in JSON, changes nothing.
    let located = |zero: &str| {
        let ran = fed(stage.command("predict -"), &format!("1 2 3 {zero} 5 6 7 8 9 10 11 {zero}\n"));
        ran.exits_with(ExitCode::Success).stdout.clone()
    };
    assert_eq!(located("-0.0"), located("0"));
    let ran = fed(stage.command("predict - --hybrid"), &format!("{}\n", "0 ".repeat(12)));
    ran.exits_with(ExitCode::BadData).stderr_has("all numbers of the embedding are 0");
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
    ran.exits_with(ExitCode::Success).stderr_has("`eval --calibrate` measures the radii");
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

/// Shards of embeddings alone, and shards of a table in which some rows have no coordinates.
#[test]
fn shards_without_coordinates_are_for_predict_and_other_commands_say_so() {
    let stage = stage();
    let rows = 1000..1150;
    let numbers: Vec<f32> = rows.clone().flat_map(|row| embedding(row, 0)).collect();
    std::fs::write(stage.path().join("photos.npy"), npy(&numbers, WIDTH)).expect("the test folder is writable");
    let line = |row: usize| {
        let (latitude, longitude) = small_shards::place(row);
        if row.is_multiple_of(3) { format!("photo-{row},,\n") } else { format!("photo-{row},{latitude},{longitude}\n") }
    };
    let text = "id,lat,lon\n".to_owned() + &rows.map(line).collect::<String>();
    std::fs::write(stage.path().join("table.csv"), text).expect("the test folder is writable");
    let build = |more: &str| stage.run(&format!("--device cpu shards build --embeddings photos.npy {more}"));
    build("--out shards/bare").exits_with(ExitCode::Success);
    build("--table table.csv --places some --out shards/some").exits_with(ExitCode::Success);
    build("--table table.csv --places none --out shards/ids").exits_with(ExitCode::Success);
    build("--table table.csv --out shards/all").exits_with(ExitCode::BadData).stderr_has("row 2: `lat` is ``");
    build("--places all --out shards/x").exits_with(ExitCode::Usage).stderr_has("give a --table");

    let [bare, some, ids] = ["bare", "some", "ids"].map(|name| {
        stage.run(&format!("predict shards/{name} --out {name}.csv")).exits_with(ExitCode::Success);
        places(&file(&stage, &format!("{name}.csv")))
    });
    assert_eq!((bare.len(), &*bare[7][0], &*some[7][0]), (150, "7", "photo-1007"));
    assert_eq!(some, ids);
    assert!(bare.iter().zip(&some).all(|(one, other)| one[1..] == other[1..]));

    let ran = stage.run("--device cpu --json shards inspect shards/some");
    assert_eq!(ran.exits_with(ExitCode::Success).json()["rows_with_coordinates"], 100);
    let ran = stage.run("--device cpu shards inspect shards/bare");
    assert!(ran.exits_with(ExitCode::Success).stdout.contains("latitude      none"), "{}", ran.stdout);
    for (name, shown) in [("bare", "150 rows without coordinates"), ("some", "150 rows (100 with coordinates)")] {
        let ran = stage.run(&format!("--device cpu shards verify shards/{name}"));
        assert!(ran.exits_with(ExitCode::Success).stdout.contains(shown), "{}", ran.stdout);
    }
    let refused = "shards/bare: the shards have no coordinates, so only `predict` can use them";
    for line in ["shards verify shards/bare --epochs 1", "--set shards.test=shards/bare eval"] {
        stage.run(&format!("--device cpu {line}")).exits_with(ExitCode::BadData).stderr_has(refused);
    }
    let line = BASE.replace("--run small", "--run other") + " --set shards.train=shards/bare train";
    stage.run(&line).exits_with(ExitCode::BadData).stderr_has(refused);
    let ran = stage.run("--set shards.test=shards/some eval");
    ran.exits_with(ExitCode::BadData).stderr_has("shards/some: only 100 rows have coordinates");
    let ran = stage.run("--json --set shards.test=shards/some --set shards.on_bad_rows=skip eval");
    assert_eq!(ran.exits_with(ExitCode::Success).json()["data"]["rows"], 100);
}
