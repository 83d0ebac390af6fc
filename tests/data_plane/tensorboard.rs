//! Event files as Python's `tensorboard` package reads them.

use std::path::Path;

use locdiff::tensorboard::Board;
use serde_json::{Value, json};

use crate::python_support::run_python;

fn read_by_tensorboard(folder: &Path) -> Value {
    let printed = run_python("tests/data_plane/read_events.py", &[folder]);
    serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}"))
}

/// A loss that f32 cannot hold.
fn loss(step: u64) -> f64 {
    1.0 / (step as f64 + 3.0)
}

fn train(board: &mut Board, steps: std::ops::RangeInclusive<u64>) {
    for step in steps {
        board.scalars(step, &[("loss", loss(step)), ("learning_rate", 5e-4)]).expect("written");
    }
}

/// What TensorBoard should find of steps 1 to `last`.
fn points(last: u64, value: impl Fn(u64) -> f64) -> Vec<(u64, u32)> {
    (1..=last).map(|step| (step, (value(step) as f32).to_bits())).collect()
}

#[test]
fn tensorboard_reads_scalars_and_text() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut board = Board::open(folder.path(), None).expect("opens");
    let config = "```toml\n[model]\ndegree = 47 # °\n```";
    board.text(0, "config", config).expect("written");
    train(&mut board, 1..=20);
    board.scalars(21, &[("overflow", 1e300), ("norm", f64::INFINITY)]).expect("written");
    let found = read_by_tensorboard(folder.path());
    let infinity = f32::INFINITY.to_bits();
    let scalars = json!({
        "loss": points(20, loss), "learning_rate": points(20, |_| 5e-4),
        "overflow": [[21, infinity]], "norm": [[21, infinity]],
    });
    assert_eq!(found["scalars"], scalars);
    assert_eq!(found["texts"], json!({ "config": [[0, config]] }));
    assert_eq!(found["text_tags"], json!(["config"]));
    assert_eq!(found["other_tags"], 0);
}

#[test]
fn no_step_is_doubled_after_a_crash() {
    let folder = tempfile::tempdir().expect("a folder");
    // Died before the first checkpoint: the run begins anew.
    train(&mut Board::open(folder.path(), None).expect("opens"), 1..=7);
    let mut board = Board::open(folder.path(), None).expect("opens");
    board.text(0, "config", "first").expect("written");
    train(&mut board, 1..=12);
    // Killed in the middle of a record, with a checkpoint at step 10.
    let bytes = std::fs::read(board.path()).expect("readable");
    std::fs::write(board.path(), &bytes[..bytes.len() - 5]).expect("writable");
    for _ in 0..2 {
        train(&mut Board::open(folder.path(), Some(10)).expect("opens"), 11..=15);
    }
    train(&mut Board::open(folder.path(), Some(15)).expect("opens"), 16..=18);
    let found = read_by_tensorboard(folder.path());
    assert_eq!(found["scalars"], json!({ "loss": points(18, loss), "learning_rate": points(18, |_| 5e-4) }));
    assert_eq!(found["texts"], json!({ "config": [[0, "first"]] }));
}
