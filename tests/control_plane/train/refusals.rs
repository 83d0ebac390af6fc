//! What must not be trained, and what is said of it.

use std::process::Stdio;

use locdiff_core::exit_code::ExitCode;

use super::support::{BASE, run_dir, stage, stage_of, tensors, train};
use crate::stage::{Stage, Worker, eventually, wait};

#[test]
fn no_shards_names_the_command_that_makes_them() {
    let stage = Stage::new(Worker::Real);
    let ran = stage.run("--device cpu train");
    ran.ends_with(ExitCode::NoData).says("shards simulate --out shards/demo/train");
    assert!(!stage.path().join("checkpoints").exists(), "no run was made");
}

#[test]
fn another_degree_is_refused_and_nothing_is_overwritten() {
    let stage = stage();
    train(&stage, "run", "--workers 1 --set train.steps=4").ends_with(ExitCode::Success);
    let before = tensors(&run_dir(&stage, "run"));
    let ran = train(&stage, "run", "--workers 1 --set train.steps=8 --set model.degree=7");
    ran.ends_with(ExitCode::RunDiffers).says("model.degree").says("7").says("11");
    let ran = train(&stage, "run", "--workers 1 --set train.steps=8 --set train.threads=2");
    ran.ends_with(ExitCode::RunDiffers).says("train.threads");
    assert_eq!(tensors(&run_dir(&stage, "run")), before);
    let other = "--workers 1 --set train.steps=4 --set model.degree=7 --set train.init_from=checkpoints/run";
    train(&stage, "other", other).ends_with(ExitCode::RunDiffers).says("model.degree is 11, this run has 7");
    // The same degree starts from what the other run has learnt.
    let same = "--workers 1 --set train.steps=4 --set train.init_from=checkpoints/run";
    train(&stage, "same", same).ends_with(ExitCode::Success);
    // With other noise too, but not in silence.
    let words = "was trained with diffusion.schedule, shift and timesteps [\"shifted-cosine\",\"auto\",200], this run has [\"cosine\",\"auto\",200]";
    train(&stage, "cosine", &format!("{same} --set diffusion.schedule=cosine"))
        .ends_with(ExitCode::Success)
        .says(words);
    let first = |run: &str| super::support::trace(&stage, run)[&1][0];
    assert!(first("same") < first("run"), "{} against {}", first("same"), first("run"));
}

#[test]
fn layouts_that_do_not_divide_say_what_would() {
    let stage = stage();
    for (settings, field, could) in [
        ("--workers 7", "train.global_batch: is 240", "wanted 238 or 245, or 6 or 8 workers"),
        ("--workers 5 --tensor-parallel 5", "widths 144, 72, 36, 288", "wanted --tensor-parallel 1 with 5 workers"),
        (
            "--workers 4 --tensor-parallel 4 --set loss.anchors=66",
            "loss.anchors: is 66",
            "wanted 64 or 68, or --tensor-parallel 1 or 2 with 4 workers",
        ),
    ] {
        let ran = train(&stage, "layout", &format!("{settings} --set train.steps=4"));
        ran.ends_with(ExitCode::Config).says(field).says(could);
    }
    assert!(!run_dir(&stage, "layout").exists(), "no run was made");
}

#[test]
fn run_without_a_checkpoint_is_not_bound_to_its_first_configuration() {
    let stage = stage();
    let ran = train(&stage, "new", "--workers 3 --set train.global_batch=2 --set train.steps=4");
    ran.ends_with(ExitCode::Config).says("train.global_batch: is 2").says("wanted 3");
    assert!(!run_dir(&stage, "new").exists(), "no run was made");
    let ran = train(&stage, "new", "--workers 1 --set train.global_batch=1000 --set train.steps=4");
    ran.ends_with(ExitCode::Config).says("lower train.global_batch");
    train(&stage, "new", "--workers 1 --set train.steps=4").ends_with(ExitCode::Success);
}

#[test]
fn resumed_run_does_not_ask_where_it_came_from() {
    let stage = stage();
    train(&stage, "first", "--workers 1 --set train.steps=2").ends_with(ExitCode::Success);
    let from = "--workers 1 --set train.init_from=checkpoints/first";
    train(&stage, "second", &format!("{from} --set train.steps=2")).ends_with(ExitCode::Success);
    std::fs::remove_dir_all(run_dir(&stage, "first")).expect("removed");
    train(&stage, "second", &format!("{from} --set train.steps=4")).ends_with(ExitCode::Success);
    train(&stage, "third", &format!("{from} --set train.steps=2")).ends_with(ExitCode::NoData);
    let other = "--workers 1 --set train.init_from=checkpoints/second --set model.width_factor=0.5 --set train.steps=2";
    let ran = train(&stage, "fourth", other);
    ran.ends_with(ExitCode::RunDiffers).says("checkpoints/second/step-00000004").says("down1.x.weight");
}

#[test]
fn other_data_are_refused_and_the_runs_configuration_stays() {
    let stage = stage();
    train(&stage, "run", "--workers 1 --set train.steps=4").ends_with(ExitCode::Success);
    let config = || std::fs::read_to_string(run_dir(&stage, "run").join("config.toml")).expect("a configuration");
    let before = config();
    std::fs::rename(stage.path().join("shards/small"), stage.path().join("shards/old")).expect("moved");
    let table = std::fs::read_to_string(stage.path().join("table.csv")).expect("the table");
    std::fs::write(stage.path().join("table.csv"), table.replace("photo-7,", "photo-x,")).expect("written");
    let build = "--device cpu shards build --table table.csv --embeddings embeddings.npy --out shards/small";
    stage.run(build).ends_with(ExitCode::Success);
    let ran = train(&stage, "run", "--workers 1 --set train.steps=8");
    ran.ends_with(ExitCode::DataChanged).says("shards/small").says("fingerprint");
    assert_eq!(config(), before);
}

/// Without a manifest the checkpoint is what knows the data: a number that changes in a page is seen, far from both ends of the
/// file, before the first step.
#[test]
fn page_that_changed_in_data_without_a_manifest_is_refused() {
    let stage = stage_of(8192);
    let folder = stage.path().join("shards/small");
    std::fs::remove_file(folder.join("manifest.json")).expect("removed");
    let settings = |steps: u32| format!("--workers 2 --set model.standardise=false --set train.steps={steps}");
    train(&stage, "run", &settings(2)).ends_with(ExitCode::Success);
    let file = folder.join("part-00000.parquet");
    let whole = std::fs::read(&file).expect("a file");
    // The last page before the footer: the lowest bit of a number of the last row.
    let (end, length) = (whole.len() - 8, u32::from_le_bytes(whole[whole.len() - 8..][..4].try_into().expect("four")));
    let at = end - length as usize - 10;
    assert!(at > 128 << 10, "the file is too small for this test: byte {at}");
    let mut changed = whole.clone();
    changed[at] ^= 1;
    std::fs::write(&file, changed).expect("written");
    let ran = train(&stage, "run", &settings(4));
    ran.ends_with(ExitCode::DataChanged).says("part-00000.parquet: row group 7: column `embedding`").says("xxh3");
    // Whatever has touched the file: the same bytes are the same data.
    std::fs::write(&file, whole).expect("written");
    let ran = train(&stage, "run", &settings(4));
    ran.ends_with(ExitCode::Success);
    assert_eq!((&ran.json()["from_step"], &ran.json()["step"]), (&2.into(), &4.into()));
}

#[test]
fn run_of_a_living_launcher_is_left_alone() {
    let stage = stage();
    let line = format!("{BASE} --run held --workers 1 --set train.steps=100000 train");
    let mut first = stage.command(&line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("runs");
    eventually("training has begun", || run_dir(&stage, "held").join("events.jsonl").exists());
    let ran = train(&stage, "held", "--workers 1 --set train.steps=100000");
    ran.ends_with(ExitCode::RunHeld).says(&first.id().to_string());
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(i32::try_from(first.id()).expect("small")),
        nix::sys::signal::Signal::SIGTERM,
    )
    .expect("alive");
    assert_eq!(wait(&mut first), Some(i32::from(ExitCode::Interrupted.code())));
}

#[test]
fn folder_that_cannot_be_written_is_named() {
    let stage = stage();
    std::fs::write(stage.path().join("checkpoints"), "a file").expect("written");
    let ran = train(&stage, "run", "--workers 1 --set train.steps=4");
    ran.ends_with(ExitCode::Io).says("checkpoints");
    let ran = train(&stage, "run", "--workers 1 --set train.steps=4 --set checkpoint.dir=/proc/runs");
    ran.ends_with(ExitCode::Io).says("/proc/runs");
}

#[test]
fn diverging_run_ends_with_its_reason_and_is_not_repeated() {
    let stage = stage();
    let wild = "--workers 2 --set train.steps=50 --set train.learning_rate=1e30 --set train.clip_norm=0 \
                --set train.nonfinite_steps_max=3 --max-restarts 5";
    let ran = train(&stage, "wild", wild);
    ran.ends_with(ExitCode::Diverged).says("not finite in 3 steps in a row").says("the loss is");
    assert_eq!(super::support::events(&stage, "wild", "attempt").len(), 1, "the same would happen again");
}
