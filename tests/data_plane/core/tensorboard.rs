//! Event files that this program writes are read back with Python's `tensorboard` package.

use std::path::Path;

use locdiff_core::draw::{Picture, answers_map};
use locdiff_core::tensorboard::{Board, Histogram, Hyperparameter, Hyperparameters};
use serde_json::{Value, json};

use crate::python_support::run_python;

fn read_by_tensorboard(folder: &Path) -> Value {
    let printed = run_python("tests/data_plane/read_events.py", &[folder]);
    serde_json::from_str(&printed).unwrap_or_else(|error| panic!("Python printed no JSON ({error}): {printed}"))
}

/// An example of a loss. For most steps, f32 cannot represent its value exactly.
fn loss(step: u64) -> f64 {
    1.0 / (step as f64 + 3.0)
}

fn write_steps(board: &mut Board, steps: std::ops::RangeInclusive<u64>) {
    for step in steps {
        board.scalars(step, &[("loss", loss(step)), ("learning_rate", 5e-4)]).expect("the event file can be written");
    }
}

/// The curve that TensorBoard should show for steps 1 to `last`. Each point is a step and the bits of its value as f32.
fn points(last: u64, value: impl Fn(u64) -> f64) -> Vec<(u64, u32)> {
    (1..=last).map(|step| (step, (value(step) as f32).to_bits())).collect()
}

#[test]
fn tensorboard_reads_scalars_and_text() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let mut board = Board::open(folder.path(), None).expect("the event file can be written");
    let config = "```toml\n[model]\ndegree = 47 # °\n```";
    board.text(0, "config", config).expect("the event file can be written");
    write_steps(&mut board, 1..=20);
    board.scalars(21, &[("overflow", 1e300), ("norm", f64::INFINITY)]).expect("the event file can be written");
    let found = read_by_tensorboard(folder.path());
    let infinity = f32::INFINITY.to_bits();
    let scalars = json!({
        "loss": points(20, loss), "learning_rate": points(20, |_| 5e-4),
        "overflow": [[21, infinity]], "norm": [[21, infinity]],
    });
    assert_eq!(found["scalars"], scalars);
    assert_eq!(found["texts"], json!({ "config": [[0, config]] }));
    assert_eq!(found["other_tags"], json!([]));
}

fn pixels_crc(rgb: &[u8]) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(rgb);
    crc.sum()
}

/// An image in which different PNG filters are best for different rows. Rows 0 to 7 are constant. Rows 8 to 15 are a
/// horizontal gradient. Rows 16 to 23 repeat one irregular row. All later rows are irregular and differ.
fn pixels(width: u32, height: u32) -> Vec<u8> {
    let channel = |x: u32, y: u32, channel: u32| match y / 8 {
        0 => 7,
        1 => x * 3 + channel * 50,
        2 => x * x * 91 + channel,
        _ => ((x * 40_503) >> 3) ^ y,
    };
    let places = (0..height).flat_map(|y| (0..width).map(move |x| (x, y)));
    places.flat_map(|(x, y)| (0..3).map(move |which| channel(x, y, which) as u8)).collect()
}

fn hyperparameters(rate: f64) -> Hyperparameters {
    let values = [
        ("train.learning_rate", Hyperparameter::Number(rate)),
        ("loss.kl_weight", Hyperparameter::Text("auto".to_owned())),
        ("eval.refine", Hyperparameter::Flag(true)),
    ];
    let values = values.map(|(name, value)| (name.to_owned(), value)).into();
    let shown_first = vec!["train.learning_rate".to_owned()];
    Hyperparameters { values, shown_first, metrics: vec!["loss".to_owned()] }
}

#[test]
fn tensorboard_reads_histograms_and_pictures() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let mut board = Board::open(folder.path(), None).expect("the event file can be written");
    let first = Histogram::even(-1.0, 2.0, &[5, 0, 7]);
    let constant = Histogram::even(0.0, 0.0, &[0, 9]);
    board
        .histograms(3, &[("weights/a".to_owned(), first), ("weights/b".to_owned(), constant)])
        .expect("the event file can be written");
    let rgb = pixels(37, 32);
    board.image(4, "answers", &Picture::new(37, 32, &rgb)).expect("the event file can be written");
    board.image(9, "answers", &answers_map(&[])).expect("the event file can be written");
    let found = read_by_tensorboard(folder.path());
    let rows = json!({
        "weights/a": [[3, [[-1.0, 0.0, 5.0], [0.0, 1.0, 0.0], [1.0, 2.0, 7.0]]]],
        "weights/b": [[3, [[0.0, 0.0, 0.0], [0.0, 0.0, 9.0]]]],
    });
    assert_eq!(found["histograms"], rows);
    assert_eq!(found["images"]["answers"][0], json!([4, [37, 32, pixels_crc(&rgb)]]));
    assert_eq!(found["images"]["answers"][1][1].as_array().expect("the image has a size")[..2], [1280, 680]);
    assert_eq!(found["other_tags"], json!([]));
}

#[test]
fn tensorboard_reads_hyperparameters() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    hyperparameters(1e-3).save(folder.path()).expect("the file can be written");
    let mut board = Board::open(folder.path(), Some(0)).expect("the event file can be written");
    write_steps(&mut board, 1..=3);
    board.mark_ended().expect("the event file can be written");
    let found = read_by_tensorboard(folder.path());
    let names = ["eval.refine", "loss.kl_weight", "train.learning_rate"];
    let values = json!({ "eval.refine": true, "loss.kl_weight": "auto", "train.learning_rate": 1e-3 });
    let hparams = &found["hparams"];
    assert_eq!((&hparams["names"], &hparams["values"]), (&json!(names), &values));
    assert_eq!(hparams["shown_first"], json!(["train.learning_rate"]));
    assert_eq!((&hparams["metrics"], &hparams["status"]), (&json!(["loss"]), &json!(1)));
    // The run continues with another learning rate. The new value replaces the old value, and the mark that
    // the run has ended is removed.
    hyperparameters(5e-4).save(folder.path()).expect("the file can be written");
    let mut board = Board::open(folder.path(), Some(3)).expect("the event file can be written");
    write_steps(&mut board, 4..=5);
    let found = read_by_tensorboard(folder.path());
    assert_eq!(found["hparams"]["values"]["train.learning_rate"], 5e-4);
    assert_eq!(found["hparams"]["status"], Value::Null);
    let steps = json!({ "_hparams_/experiment": [0], "_hparams_/session_start_info": [0] });
    assert_eq!(found["hparams"]["steps"], steps);
    board.mark_ended().expect("the event file can be written");
    let found = read_by_tensorboard(folder.path());
    assert_eq!((&found["hparams"]["status"], &found["scalars"]["loss"]), (&json!(1), &json!(points(5, loss))));
}

#[test]
fn no_step_is_duplicated_after_a_crash() {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    // A run dies at step 7, before its first checkpoint, and starts again at step 1.
    write_steps(&mut Board::open(folder.path(), None).expect("the event file can be written"), 1..=7);
    let mut board = Board::open(folder.path(), None).expect("the event file can be written");
    board.text(0, "config", "first").expect("the event file can be written");
    write_steps(&mut board, 1..=12);
    write_pictures(&mut board, 12);
    // The run is killed at step 12 while it writes a record. It then resumes twice from the checkpoint of step 10.
    let bytes = std::fs::read(board.path()).expect("the file can be read");
    std::fs::write(board.path(), &bytes[..bytes.len() - 5]).expect("the file can be written");
    for _ in 0..2 {
        let mut board = Board::open(folder.path(), Some(10)).expect("the event file can be written");
        write_steps(&mut board, 11..=13);
        write_pictures(&mut board, 13);
        write_steps(&mut board, 14..=15);
        write_pictures(&mut board, 15);
        board.mark_ended().expect("the event file can be written");
    }
    write_steps(&mut Board::open(folder.path(), Some(15)).expect("the event file can be written"), 16..=18);
    let found = read_by_tensorboard(folder.path());
    assert_eq!(found["scalars"], json!({ "loss": points(18, loss), "learning_rate": points(18, |_| 5e-4) }));
    assert_eq!(found["texts"], json!({ "config": [[0, "first"]] }));
    assert_eq!(found["hparams"]["steps"], json!({}), "the end mark was not removed");
    for (kind, tag) in [("histograms", "weights/a"), ("images", "map")] {
        let steps: Vec<&Value> =
            found[kind][tag].as_array().expect("the tag has events").iter().map(|event| &event[0]).collect();
        assert_eq!(steps, [13, 15], "wrong steps for the {kind}");
    }
}

/// Writes a histogram and an image for one step.
fn write_pictures(board: &mut Board, step: u64) {
    board
        .histograms(step, &[("weights/a".to_owned(), Histogram::even(0.0, 1.0, &[step]))])
        .expect("the event file can be written");
    board.image(step, "map", &Picture::new(8, 1, &[step as u8; 24])).expect("the event file can be written");
}
