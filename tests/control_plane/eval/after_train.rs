//! `eval.after_train`: training ends with the table.

use locdiff_launch::exit_code::ExitCode;

use super::support::{folder, row, trained};

#[test]
fn training_ends_with_the_table_and_tensorboard_has_it() {
    let (stage, ran) = trained("--set eval.after_train=true --set retrieval.geoclip=shards/train");
    let result = ran.json();
    let evaluated = &result["eval"];
    assert_eq!(evaluated["data"]["step"], 40, "{result}");
    assert!(row(evaluated, "locdiff-h")["acc_2500km"].is_number(), "{result}");
    assert_eq!(row(evaluated, "locdiff")["simulated"], false);
    assert!(folder(&stage).join("report.txt").exists());
    let files = std::fs::read_dir(stage.path().join("checkpoints/small/tensorboard")).expect("event files");
    let bytes: Vec<u8> =
        files.flat_map(|file| std::fs::read(file.expect("a file").path()).expect("readable")).collect();
    let has = |tag: &str| bytes.windows(tag.len()).any(|window| window == tag.as_bytes());
    assert!(has("test/locdiff/acc_25km") && has("test/locdiff-h/geo_score"), "the numbers reach TensorBoard");
}

#[test]
fn what_is_missing_after_training_is_said_and_the_rest_is_done() {
    let (stage, ran) = trained("--set eval.after_train=true --set shards.test=shards/none");
    ran.says("not evaluated: no shards at");
    assert!(ran.json()["eval"].is_null() && !folder(&stage).exists());
    // The finished run is evaluated by the same command once there is something; its head does not fit, so LocDiff stands alone.
    let (_, ran) =
        trained("--set eval.after_train=true --set retrieval.head=linear --set retrieval.geoclip=shards/train");
    ran.says("no retrieval and no LocDiff-H").ends_with(ExitCode::Success);
    assert_eq!(ran.json()["eval"]["rows"].as_array().map(Vec::len), Some(1));
}
