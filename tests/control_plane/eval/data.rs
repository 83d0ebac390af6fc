//! Tests of truth files, of photos that cannot be evaluated, and of the published rows in the results table.

use locdiff_core::exit_code::ExitCode;

use super::support::{read, stage};
use crate::small_shards;

#[test]
fn truth_must_match_the_test_rows_and_is_not_used_for_tuning() {
    let stage = stage();
    stage.run("--json eval").exits_with(ExitCode::Success);
    let truth = read(&stage, "truth.csv");
    std::fs::write(stage.path().join("truth.csv"), &truth).expect("the test folder is writable");
    let more = format!("{truth}photo-7,1,2\nphoto-8,1,2\n");
    std::fs::write(stage.path().join("more.csv"), more).expect("the test folder is writable");
    let fewer: Vec<&str> = truth.lines().take(150).collect();
    std::fs::write(stage.path().join("fewer.csv"), fewer.join("\n")).expect("the test folder is writable");
    stage.run("--set eval.truth=truth.csv eval").exits_with(ExitCode::Success);
    let ran = stage.run("--set eval.truth=more.csv eval");
    ran.exits_with(ExitCode::BadData)
        .stderr_has("more.csv: 2 of its 152 rows are not in shards/test: `photo-7`, `photo-8`");
    let ran = stage.run("--set eval.truth=fewer.csv eval");
    ran.exits_with(ExitCode::BadData).stderr_has("fewer.csv").stderr_has("photo-1149");
    // The truth file contains the test rows. `eval --tune` reads the validation rows, so it ignores `eval.truth`.
    small_shards::build(&stage, "validation", 2000..2100, 2, true);
    let ran = stage.run("--set eval.truth=truth.csv --set shards.validation=shards/validation eval --tune");
    ran.exits_with(ExitCode::Success);
}

#[test]
fn test_photos_are_read_as_means_of_views() {
    let stage = stage();
    let ran = stage.run("eval");
    let views = read(&stage, "predictions-locdiff.csv");
    assert!(ran.stdout.contains("of 2 views") && !ran.stdout.contains("means"), "{}", ran.stdout);
    let ran = stage.run("--set shards.mean_views=2 eval");
    assert!(ran.stdout.contains("of 2 views (means of 2)"), "{}", ran.stdout);
    assert_ne!(read(&stage, "predictions-locdiff.csv"), views, "the views were not averaged");
}

#[test]
fn photo_with_a_zero_embedding_is_named_by_row_and_id() {
    let stage = stage();
    small_shards::build(&stage, "good", 1000..1150, 1, false);
    let path = stage.path().join("embeddings.npy");
    let mut bytes = std::fs::read(&path).expect("the embeddings exist");
    let row_bytes = small_shards::WIDTH * 4;
    let start = bytes.len() - 50 * row_bytes;
    bytes[start..start + row_bytes].fill(0);
    std::fs::write(&path, bytes).expect("the test folder is writable");
    let build = "--device cpu shards build --table table.csv --embeddings embeddings.npy --out shards/zero";
    stage.run(build).exits_with(ExitCode::Success);
    let ran = stage.run("--workers 2 --set shards.test=shards/zero eval --hybrid");
    ran.exits_with(ExitCode::BadData).stderr_has("shards/zero: row 100 (photo-1100)");
}

#[test]
fn published_rows_are_printed_as_published_or_left_out() {
    let stage = stage();
    let ran = stage.run("--json eval --suite main");
    let found = ran.exits_with(ExitCode::Success).json();
    let rows = found["rows"].as_array().expect("the result has rows");
    assert!(rows.iter().any(|row| row["source"] == "published"), "the result has no published rows: {found}");
    let line = ran.stderr.lines().find(|line| line.starts_with("ISNs GWS15k")).expect("the paper has this row");
    assert!(line.split_whitespace().any(|cell| cell == "0.05"), "{line}");
    let newer = rows.iter().find(|row| row["method"] == "GeoRanker 2025").expect("the table has newer systems");
    assert_eq!((&newer["origin"], &newer["acc_1km"]), (&"second-hand".into(), &18.8.into()));
    ran.stderr_has("GeoRanker 2025 Im2GPS3k ***").stderr_has("*** not in the paper");
    let ran = stage.run("--json eval --suite generative");
    let found = ran.exits_with(ExitCode::Success).stderr_has("LocDiff (L = 47) YFCC-4k *").json();
    let rows = found["rows"].as_array().expect("the result has rows");
    let density = |source: &str, dataset: &str| {
        rows.iter().find(|row| row["source"] == source && row["dataset"] == dataset).map(|row| row["density"].as_f64())
    };
    assert!(density("computed", "shards/test").flatten().is_some_and(|density| density > 0.0), "{found}");
    assert_eq!(density("published", "OSV-5M"), Some(None), "the paper has no density of vMF");
    assert!(rows.iter().any(|row| row["density"] == 1.072), "{found}");
    // Among the other scores, published rows have density and coverage.
    let other = ran.stderr.split("other scores").nth(1).expect("the terminal has 80 columns");
    assert!(
        other.lines().any(|line| line.starts_with("RFM S2 YFCC-4k *") && line.ends_with("1.060     0.926")),
        "{other}"
    );
    let ran = stage.run("--json --set eval.thresholds_km=[1,100] eval --suite main");
    let found = ran.exits_with(ExitCode::Success).stderr_has("published rows are left out").json();
    let rows = found["rows"].as_array().expect("the result has rows");
    assert!(rows.iter().all(|row| row["source"] == "computed"), "the result has rows that are not computed: {found}");
}
