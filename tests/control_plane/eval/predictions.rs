//! Tests of `eval --predictions`, which scores predictions from other tools with the code that also scores LocDiff.

use std::fmt::Write as _;
use std::process::Stdio;

use locdiff_core::exit_code::ExitCode;
use nix::sys::signal::Signal;

use super::support::{ACCURACIES, read, row, stage};
use crate::stage::{Ran, Stage, Worker, eventually, has_thread, signal, wait};

#[test]
fn own_predictions_reproduce_the_table_and_invalid_ones_are_refused() {
    let stage = stage();
    let table = stage.run("--json eval");
    table.exits_with(ExitCode::Success);
    let answers = "checkpoints/small/eval/predictions-locdiff.csv";
    let by_shards = format!("--json --device cpu --set shards.test=shards/test eval --predictions {answers}");
    let ran = stage.run(&by_shards);
    ran.exits_with(ExitCode::Success);
    let by_truth = "--json --device cpu --set eval.truth=checkpoints/small/eval/truth.csv eval --predictions";
    let again = stage.run(&format!("{by_truth} {answers}"));
    again.exits_with(ExitCode::Success);
    let (table, ran, again) = (table.json(), ran.json(), again.json());
    for key in ACCURACIES.iter().chain(&["acc_25km_lo", "median_km", "mean_km_hi", "geo_score"]) {
        let want = &row(&table, "locdiff")[*key];
        assert!(want.is_number() && ran["rows"][0][*key] == *want && again["rows"][0][*key] == *want, "{key}: {ran}");
    }
    let text = read(&stage, "predictions-locdiff.csv");
    let lines: Vec<&str> = text.lines().collect();
    let wrong = [
        ("nan", text.replacen(lines[3].split(',').nth(1).expect("each row has a latitude"), "NaN", 1), "row 2"),
        ("short", lines[..lines.len() - 1].join("\n"), "1 of 150 rows in"),
        ("twice", format!("{text}{}\n", lines[1]), "photo-1000"),
        ("extra", format!("{text}nobody,1,2\n"), "`nobody`"),
        (
            "length",
            lines[..5].iter().map(|line| line.split_once(',').expect("two columns").1).collect::<Vec<_>>().join("\n"),
            "4 rows",
        ),
    ];
    for (name, text, reason) in wrong {
        std::fs::write(stage.path().join(format!("{name}.csv")), text).expect("the test folder is writable");
        let ran = stage.run(&format!("{by_truth} {name}.csv"));
        ran.exits_with(ExitCode::BadData).stderr_has(&format!("{name}.csv")).stderr_has(reason);
    }
    stage.run(&format!("{by_truth} none.csv")).exits_with(ExitCode::Io).stderr_has("none.csv");
}

#[test]
fn id_column_has_many_accepted_names_and_matching_by_order_is_reported() {
    let stage = stage();
    stage.run("--json eval").exits_with(ExitCode::Success);
    let text = read(&stage, "predictions-locdiff.csv");
    let (_, rows) = text.split_once('\n').expect("the file has a header");
    let shuffled: Vec<&str> = rows.lines().rev().collect();
    let scored = |name: &str, header: &str, rows: String| {
        std::fs::write(stage.path().join(name), format!("{header}\n{rows}\n")).expect("the test folder is writable");
        stage.run(&format!("--json --device cpu --set shards.test=shards/test eval --predictions {name}"))
    };
    let score = |ran: &Ran| {
        let found = ran.exits_with(ExitCode::Success).json();
        (found["matched_by"].clone(), found["rows"][0]["geo_score"].clone())
    };
    let want = score(&scored("own.csv", "id,lat,lon", rows.trim_end().to_owned()));
    for column in ["image_id", "IMG_ID", "Filename", "file", "img"] {
        let ran = scored("shuffled.csv", &format!("{column},lat,lon"), shuffled.join("\n"));
        assert_eq!(score(&ran), want, "{column}");
        assert!(!ran.stderr.contains("matched by order"), "{}", ran.stderr);
    }
    let ran = scored("unknown.csv", "photograph,lat,lon", shuffled.join("\n"));
    ran.exits_with(ExitCode::BadData).stderr_has("unknown.csv").stderr_has("`photograph`").stderr_has("image_id or");
    let bare = rows.lines().map(|line| line.split_once(',').expect("a row has an id").1).collect::<Vec<_>>().join("\n");
    let ran = scored("bare.csv", "lat,lon", bare);
    assert_eq!(score(&ran), ("order".into(), want.1.clone()));
    ran.stderr_has("matched by order");
}

#[test]
fn predictions_with_a_truth_file_need_no_worker() {
    let stage = Stage::new(Worker::None);
    for (name, text) in [
        ("truth.csv", "id,lat,lon\na,0,0\nb,10,10\nc,-20,50\n"),
        ("mine.csv", "id,lat,lon\nc,-20,50\na,0,0\nb,10,11\n"),
    ] {
        std::fs::write(stage.path().join(name), text).expect("the test folder is writable");
    }
    let score = "--json eval --predictions mine.csv --set";
    let ran = stage.run(&format!("{score} eval.truth=truth.csv"));
    let found = ran.exits_with(ExitCode::Success).json();
    assert_eq!((&found["ok"], &found["matched_by"]), (&true.into(), &"id".into()), "{found}");
    let row = &found["rows"][0];
    assert!(row["acc_1km"].as_f64().is_some_and(|percent| (percent - 66.667).abs() < 0.001), "{found}");
    assert_eq!(
        (&row["density"], &row["dataset"]),
        (&serde_json::Value::Null, &"truth.csv".into()),
        "wanted no density, because three rows are too few, and the dataset truth.csv"
    );
    // If the truth is in shards, a worker must read it.
    std::fs::create_dir(stage.path().join("shards")).expect("the parent folder exists");
    std::fs::write(stage.path().join("shards/a.parquet"), "").expect("the test folder is writable");
    stage.run(&format!("{score} shards.test=shards")).exits_with(ExitCode::WorkerMissing);
}

#[test]
fn interrupt_stops_scoring_at_once() {
    let stage = Stage::new(Worker::None);
    // With this many rows, a thousand resamples take much longer than the delivery of a signal.
    let mut text = String::from("id,lat,lon\n");
    for row in 0..300_000 {
        let _ = writeln!(text, "{row},{},{}", row % 179 - 89, row % 359 - 179);
    }
    std::fs::write(stage.path().join("truth.csv"), text).expect("the test folder is writable");
    for (interrupt, code) in [(Signal::SIGINT, ExitCode::Interrupted), (Signal::SIGTERM, ExitCode::Preempted)] {
        let mut command = stage.command("--json --set eval.truth=truth.csv eval --predictions truth.csv");
        let mut launcher = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the launcher exists");
        eventually("scoring begins", || has_thread(launcher.id(), "computing"));
        signal(launcher.id(), interrupt);
        assert_eq!(wait(&mut launcher), Some(code.code().into()), "{interrupt}");
    }
}
