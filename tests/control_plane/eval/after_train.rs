//! Tests of `eval.after_train`, the evaluation at the end of training.

use locdiff_core::exit_code::ExitCode;

use super::support::{folder, row, trained};

const BOARD: &str = "checkpoints/small";

#[test]
fn training_ends_with_an_evaluation_that_tensorboard_shows() {
    let (stage, ran) = trained("--set eval.after_train=true --set retrieval.geoclip=shards/nowhere");
    let result = ran.json();
    let evaluated = &result["eval"];
    assert_eq!(evaluated["data"]["step"], 40, "{result}");
    assert!(row(evaluated, "locdiff-h")["acc_2500km"].is_number(), "{result}");
    assert_eq!(row(evaluated, "locdiff")["simulated"], false);
    assert!(folder(&stage).join("report.txt").exists());
    let files = std::fs::read_dir(stage.path().join(BOARD)).expect("the run has event files");
    let paths = files.map(|file| file.expect("the folder can be read").path());
    let events = paths.filter(|path| path.to_string_lossy().contains("tfevents"));
    let contents = events.map(std::fs::read);
    let bytes: Vec<u8> = contents.flat_map(|bytes| bytes.expect("the file can be read")).collect();
    let has = |tag: &str| bytes.windows(tag.len()).any(|window| window == tag.as_bytes());
    assert!(has("test/locdiff/acc_25km") && has("test/locdiff-h/geo_score"), "scores are missing in TensorBoard");
    assert!(
        has("test/locdiff-h/answers") && has("150 photos of 2 views at "),
        "the map or the data summary is missing"
    );
    let hparams = std::fs::read(stage.path().join(format!("{BOARD}/events.out.tfevents.0000000000.hparams")));
    let hparams = hparams.expect("the run has a file of hyperparameters");
    let tag = b"test/locdiff-h/acc_200km";
    assert!(
        hparams.windows(tag.len()).any(|window| window == tag),
        "the hyperparameters do not list the score as a metric"
    );
}

#[test]
fn missing_data_after_training_are_reported_and_the_rest_is_evaluated() {
    let (stage, ran) = trained("--set eval.after_train=true --set shards.test=shards/none");
    ran.stderr_has("not evaluated: no shards at");
    assert!(ran.json()["eval"].is_null() && !folder(&stage).exists());
    // If the retrieval head does not suit the data, or if GeoCLIP's weights are missing, only LocDiff is evaluated.
    for (head, reason) in [
        ("--set retrieval.head=linear --set retrieval.geoclip=shards/train", "retrieval and LocDiff-H are skipped"),
        ("--set retrieval.head=linear --set retrieval.geoclip=shards/nowhere", "shards/nowhere does not exist"),
    ] {
        let (_, ran) = trained(&format!("--set eval.after_train=true {head}"));
        ran.stderr_has(reason).exits_with(ExitCode::Success);
        assert_eq!(ran.json()["eval"]["rows"].as_array().map(Vec::len), Some(1));
    }
}
