//! What is said of the rows that are evaluated, and of the numbers beside them.

use locdiff_core::exit_code::ExitCode;

use super::support::{read, stage};
use crate::small_shards;

#[test]
fn truth_of_other_rows_is_refused_and_is_none_of_tunings() {
    let stage = stage();
    stage.run("--json eval").ends_with(ExitCode::Success);
    let truth = read(&stage, "truth.csv");
    std::fs::write(stage.path().join("truth.csv"), &truth).expect("written");
    std::fs::write(stage.path().join("more.csv"), format!("{truth}photo-7,1,2\nphoto-8,1,2\n")).expect("written");
    let fewer: Vec<&str> = truth.lines().take(150).collect();
    std::fs::write(stage.path().join("fewer.csv"), fewer.join("\n")).expect("written");
    stage.run("--set eval.truth=truth.csv eval").ends_with(ExitCode::Success);
    let ran = stage.run("--set eval.truth=more.csv eval");
    ran.ends_with(ExitCode::BadData).says("more.csv: 2 of its 152 rows are not in shards/test: `photo-7`, `photo-8`");
    let ran = stage.run("--set eval.truth=fewer.csv eval");
    ran.ends_with(ExitCode::BadData).says("fewer.csv").says("photo-1149");
    // It is the truth of the test rows; settings are chosen on others.
    small_shards::build(&stage, "validation", 2000..2100, 2, true);
    let ran = stage.run("--set eval.truth=truth.csv --set shards.validation=shards/validation eval --tune");
    ran.ends_with(ExitCode::Success);
}

#[test]
fn photo_that_is_like_nothing_is_named_by_its_row_and_id() {
    let stage = stage();
    small_shards::build(&stage, "good", 1000..1150, 1, false);
    let path = stage.path().join("embeddings.npy");
    let mut bytes = std::fs::read(&path).expect("just built of it");
    let row_bytes = small_shards::WIDTH * 4;
    let start = bytes.len() - 50 * row_bytes;
    bytes[start..start + row_bytes].fill(0);
    std::fs::write(&path, bytes).expect("written");
    let build = "--device cpu shards build --table table.csv --embeddings embeddings.npy --out shards/zero";
    stage.run(build).ends_with(ExitCode::Success);
    let ran = stage.run("--workers 2 --set shards.test=shards/zero eval --hybrid");
    ran.ends_with(ExitCode::BadData).says("shards/zero: row 100 (photo-1100)");
}

#[test]
fn published_rows_are_printed_as_published_or_left_out() {
    let stage = stage();
    let ran = stage.run("--json eval --suite main");
    let found = ran.ends_with(ExitCode::Success).json();
    assert!(found["rows"].as_array().expect("rows").iter().any(|row| row["source"] == "published"), "{found}");
    let line = ran.stderr.lines().find(|line| line.starts_with("ISNs GWS15k")).expect("a published row");
    assert!(line.split_whitespace().any(|cell| cell == "0.05"), "{line}");
    let ran = stage.run("--json --set eval.thresholds_km=[1,100] eval --suite main");
    let found = ran.ends_with(ExitCode::Success).says("no published rows").json();
    assert!(found["rows"].as_array().expect("rows").iter().all(|row| row["source"] == "computed"), "{found}");
}
