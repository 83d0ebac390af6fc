//! Tests of densities: the likelihood and the calibration in `eval`, and the densities that `predict` writes.

use std::collections::BTreeMap;
use std::process::Stdio;

use arrow_array::cast::AsArray as _;
use arrow_array::types::{Float32Type, UInt8Type, UInt64Type};
use locdiff_core::exit_code::ExitCode;
use locdiff_core::geo::order_and_cell;
use nix::sys::signal::Signal;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::Value;

use super::support::{folder, read, stage};
use crate::small_shards;
use crate::stage::{Stage, eventually, signal, wait};

/// A stage with a calibrated run.
pub(super) fn calibrated() -> Stage {
    let stage = stage();
    small_shards::build(&stage, "validation", 4000..4400, 1, false);
    stage.run("--set shards.validation=shards/validation eval --calibrate").exits_with(ExitCode::Success);
    stage
}

#[track_caller]
fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is not a number"))
}

#[test]
fn fitted_temperature_beats_all_others_and_eval_checks_the_calibration() {
    let stage = calibrated();
    let saved: Value = serde_json::from_str(&read(&stage, "calibration.json")).expect("the file is valid JSON");
    let (best, tried) = (&saved["density"], saved["density"]["tried"].as_array().expect("temperatures were tried"));
    let at = tried.iter().position(|pair| pair[0] == best["temperature"]).expect("the temperature was tried");
    assert!((1..tried.len() - 1).contains(&at), "the best temperature is at the end of the range: {best}");
    for neighbour in [at - 1, at + 1] {
        assert!(number(&tried[neighbour][1]) > number(&best["nll"]), "{best}");
    }

    let ran = stage.run("--json eval");
    ran.exits_with(ExitCode::Success).stderr_has("% of true places within").stderr_has("calibration.svg");
    let (result, table) = (ran.json(), serde_json::from_str::<Value>(&read(&stage, "table.json")));
    assert_eq!(table.expect("the file is valid JSON")["calibration"], result["calibration"]);
    for (row, level) in result["calibration"]["rows"].as_array().expect("the levels").iter().zip([0.5, 0.9]) {
        let [share, lo, hi] = ["share", "lo", "hi"].map(|key| number(&row[key]));
        assert_eq!(number(&row["level"]), level);
        assert!(lo <= share && share <= hi && (share - level).abs() < 0.2, "{row}");
    }
    let fifths = result["calibration"]["fifths"].as_array().expect("the fifths");
    assert_eq!(fifths.iter().map(|fifth| number(&fifth["photos"])).sum::<f64>(), 150.0);
    let likelihood = &result["likelihood"];
    let [nll, lo, hi, even] = ["nll", "nll_lo", "nll_hi", "even_nll"].map(|key| number(&likelihood[key]));
    assert!(lo < nll && nll < hi && nll < even - 0.5 && (even - 20.05).abs() < 0.01, "{likelihood}");
    assert_eq!(likelihood["temperature"], best["temperature"]);
    let svg = read(&stage, "calibration.svg");
    assert!(svg.starts_with("<svg") && svg.contains("LocDiff (L = 8)"), "{svg}");
    let page = read(&stage, "report.html");
    assert!(page.contains("id=\"calibration\""), "the page has no section about the calibration");
    agrees_with_predict(&stage);
    // Neither the number of workers nor the kind of task changes a likelihood.
    let ran = stage.run("--json --workers 2 eval");
    assert_eq!(ran.exits_with(ExitCode::Success).json()["likelihood"], *likelihood);

    // Another number of samples needs another calibration.
    let ran = stage.run("--json --set eval.samples=5 eval");
    ran.exits_with(ExitCode::Success).stderr_has("the calibration is not checked").stderr_has("`samples`");
    assert_eq!((&ran.json()["calibration"], &ran.json()["likelihood"]), (&Value::Null, &Value::Null));
    assert!(!folder(&stage).join("calibration.svg").exists(), "the plot of an earlier evaluation is left");
    std::fs::write(folder(&stage).join("calibration.json"), "{").expect("the test folder is writable");
    stage.run("eval").exits_with(ExitCode::Corrupt).stderr_has("calibration.json");
}

/// Checks that the density of a report photo at the last denoising step is the one that `predict` gives.
fn agrees_with_predict(stage: &Stage) {
    stage.run("predict shards/test --out out.csv --density density.parquet").exits_with(ExitCode::Success);
    let predicted = densities(stage, "density.parquet");
    let file: Value = serde_json::from_str(&read(stage, "images.json")).expect("the file is valid JSON");
    let images = file["images"].as_array().expect("the file has a list");
    assert_eq!(images.len(), 12);
    let ends = |order: u32, cell: u64| [cell, cell + 1].map(|cell| cell << (2 * (12 - order)));
    for image in images {
        let finer = &predicted[image["id"].as_str().expect("an id is text")];
        let last = image["steps"].as_array().and_then(|steps| steps.last()).expect("there are steps");
        for cell in last["cells"].as_array().expect("a step has cells") {
            let (order, own) = order_and_cell(cell[0].as_u64().expect("it is the number of a cell"));
            let [first, end] = ends(order, own);
            let within = finer.iter().filter(|(order, cell, _)| {
                let [from, to] = ends(u32::from(*order), *cell);
                from >= first && to <= end
            });
            let wanted: f64 = within.map(|(_, _, probability)| f64::from(*probability)).sum();
            assert!((number(&cell[1]) - wanted).abs() < 1.1e-5, "{cell}: {wanted} in the file of `predict`");
        }
    }
}

/// For each id of a file of densities: the order, the number and the probability of each cell.
pub(super) fn densities(stage: &Stage, name: &str) -> BTreeMap<String, Vec<(u8, u64, f32)>> {
    let file = std::fs::File::open(stage.path().join(name)).expect("the file was written");
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).and_then(|builder| builder.build());
    let mut found: BTreeMap<String, Vec<(u8, u64, f32)>> = BTreeMap::new();
    for batch in reader.expect("the file is valid Parquet") {
        let batch = batch.expect("the file is valid Parquet");
        let column = |name: &str| batch.column_by_name(name).unwrap_or_else(|| panic!("no column {name}"));
        let (ids, orders) = (column("id").as_string::<i32>(), column("order").as_primitive::<UInt8Type>());
        let cells = column("cell").as_primitive::<UInt64Type>();
        let probabilities = column("probability").as_primitive::<Float32Type>();
        for row in 0..batch.num_rows() {
            assert!(cells.value(row) < 12 << (2 * orders.value(row)), "there is no such cell");
            let cell = (orders.value(row), cells.value(row), probabilities.value(row));
            found.entry(ids.value(row).to_owned()).or_default().push(cell);
        }
    }
    found
}

#[test]
fn densities_are_complete_and_the_same_with_any_number_of_workers_and_after_a_kill() {
    let stage = calibrated();
    small_shards::build(&stage, "many", 1000..2500, 1, false);
    stage.run("predict shards/many --out whole.csv --density whole.parquet").exits_with(ExitCode::Success);
    let found = densities(&stage, "whole.parquet");
    assert_eq!(found.len(), 1500);
    for (id, cells) in found {
        let sum: f64 = cells.iter().map(|(_, _, probability)| f64::from(*probability)).sum();
        assert!(cells.len() > 12 && (sum - 1.0).abs() < 1e-4, "{id}: {} cells, {sum}", cells.len());
    }

    let mut command = stage.command("--workers 2 predict shards/many --out out.csv --density new/density.parquet");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the launcher can start");
    let partial = stage.path().join("out.csv.partial");
    eventually("a piece is complete", || partial.join("piece-00000000").exists());
    signal(child.id(), Signal::SIGKILL);
    wait(&mut child);
    assert!(!stage.path().join("new/density.parquet").exists(), "the prediction ended before it was killed");
    let ran = stage.run("predict shards/many --out out.csv");
    ran.exits_with(ExitCode::Exists).stderr_has("another value of `temperature`");
    let ran = stage.run("--json predict shards/many --out out.csv --density new/density.parquet");
    assert_eq!(ran.exits_with(ExitCode::Success).json()["density"], "new/density.parquet");
    let bytes = |name: &str| std::fs::read(stage.path().join(name)).expect("the file was written");
    assert!(bytes("whole.parquet") == bytes("new/density.parquet"), "the densities differ");
    assert!(bytes("whole.csv") == bytes("out.csv"), "the answers differ");
    assert!(!partial.exists());
}

#[test]
fn densities_without_a_temperature_or_with_a_bad_name_are_refused() {
    let stage = stage();
    let refused = |line: &str, code: ExitCode, words: &str| {
        stage.run(&format!("predict shards/test {line}")).exits_with(code).stderr_has(words);
        assert!(!stage.path().join("a.csv.partial").exists(), "{line}: a refused command left a folder");
    };
    refused("--out a.csv --density d.parquet", ExitCode::NoData, "`eval --calibrate` measures the radii");
    refused("--out a.csv --density d.csv", ExitCode::Usage, "ends in .parquet");
    refused("--out a.parquet --density ./a.parquet", ExitCode::Usage, "name the same file");
    for density in ["a.csv.partial/density.parquet", "a.csv/d.parquet"] {
        refused(&format!("--out a.csv --density {density}"), ExitCode::Usage, "in the folder of --out");
    }
    refused("--density d.parquet", ExitCode::Usage, "--out");
    std::fs::write(stage.path().join("d.parquet"), "x").expect("the test folder is writable");
    refused("--out a.csv --density d.parquet", ExitCode::Exists, "use --overwrite");
}
