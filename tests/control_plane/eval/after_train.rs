//! `eval.after_train`: training ends with the table.

use locdiff_core::exit_code::ExitCode;

use super::support::{folder, row, trained};

const BOARD: &str = "checkpoints/small/tensorboard";

#[test]
fn training_ends_with_the_table_and_tensorboard_has_it() {
    let (stage, ran) = trained("--set eval.after_train=true --set retrieval.geoclip=shards/nowhere");
    let result = ran.json();
    let evaluated = &result["eval"];
    assert_eq!(evaluated["data"]["step"], 40, "{result}");
    assert!(row(evaluated, "locdiff-h")["acc_2500km"].is_number(), "{result}");
    assert_eq!(row(evaluated, "locdiff")["simulated"], false);
    assert!(folder(&stage).join("report.txt").exists());
    let files = std::fs::read_dir(stage.path().join(BOARD)).expect("event files");
    let bytes: Vec<u8> =
        files.flat_map(|file| std::fs::read(file.expect("a file").path()).expect("readable")).collect();
    let has = |tag: &str| bytes.windows(tag.len()).any(|window| window == tag.as_bytes());
    assert!(has("test/locdiff/acc_25km") && has("test/locdiff-h/geo_score"), "the numbers reach TensorBoard");
    assert!(has("test/locdiff-h/answers") && has("150 photos of 2 views"), "the map, and what it is of");
    let hparams = std::fs::read(stage.path().join(format!("{BOARD}/events.out.tfevents.0000000000.hparams")));
    let hparams = hparams.expect("hyperparameters");
    let tag = b"test/locdiff-h/acc_200km";
    assert!(hparams.windows(tag.len()).any(|window| window == tag), "runs are compared by what they reach");
}

#[test]
fn what_is_missing_after_training_is_said_and_the_rest_is_done() {
    let (stage, ran) = trained("--set eval.after_train=true --set shards.test=shards/none");
    ran.says("not evaluated: no shards at");
    assert!(ran.json()["eval"].is_null() && !folder(&stage).exists());
    // The head does not fit, or what it needs is not there: LocDiff stands alone.
    for (head, reason) in [
        ("--set retrieval.head=linear --set retrieval.geoclip=shards/train", "no retrieval and no LocDiff-H"),
        ("--set retrieval.head=linear --set retrieval.geoclip=shards/nowhere", "there is nothing at shards/nowhere"),
    ] {
        let (_, ran) = trained(&format!("--set eval.after_train=true {head}"));
        ran.says(reason).ends_with(ExitCode::Success);
        assert_eq!(ran.json()["eval"]["rows"].as_array().map(Vec::len), Some(1));
    }
}
