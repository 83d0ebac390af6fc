//! Tests of runs that `train` must refuse, and of the error messages.

use std::process::Stdio;

use locdiff_core::exit_code::ExitCode;

use super::support::{BASE, run_dir, stage, stage_of, tensors, train};
use crate::stage::{Stage, Worker, eventually, wait};

#[test]
fn missing_shards_are_named_with_their_field_and_the_data_that_exists() {
    let stage = Stage::new(Worker::Real);
    std::fs::create_dir_all(stage.path().join("shards/mp16")).expect("the test folder is writable");
    let ran = stage.run("--device cpu train");
    ran.exits_with(ExitCode::NoData)
        .stderr_has("no shards at shards/demo/train (shards.train); shards/ has: mp16; `locdiff-launch demo` makes");
    let ran = stage.run("--device cpu --set shards.train=shards/mp61 train");
    ran.exits_with(ExitCode::NoData).stderr_has("no shards at shards/mp61 (shards.train); shards/ has: mp16");
    assert!(!ran.stderr.contains("simulate"), "{}", ran.stderr);
    assert!(!stage.path().join("checkpoints").exists(), "a run folder was created");
}

#[test]
fn different_degree_is_refused_and_nothing_is_overwritten() {
    let stage = stage();
    train(&stage, "run", "--workers 1 --set train.steps=4").exits_with(ExitCode::Success);
    let before = tensors(&run_dir(&stage, "run"));
    let ran = train(&stage, "run", "--workers 1 --set train.steps=8 --set model.degree=7");
    ran.exits_with(ExitCode::RunDiffers).stderr_has("model.degree").stderr_has("7").stderr_has("11");
    let ran = train(&stage, "run", "--workers 1 --set train.steps=8 --set train.threads=2");
    ran.exits_with(ExitCode::RunDiffers).stderr_has("train.threads");
    assert_eq!(tensors(&run_dir(&stage, "run")), before);
    let other = "--workers 1 --set train.steps=4 --set model.degree=7 --set train.init_from=checkpoints/run";
    train(&stage, "other", other).exits_with(ExitCode::RunDiffers).stderr_has("model.degree is 11, but this run has 7");
    // With the same degree, a new run may start from the weights of the run `run`.
    let same = "--workers 1 --set train.steps=4 --set train.init_from=checkpoints/run";
    train(&stage, "same", same).exits_with(ExitCode::Success);
    // A different noise schedule is allowed, with a warning.
    let warning = "was trained with the diffusion settings [schedule, shift, timesteps] = [\"shifted-cosine\",\"auto\",200], but this run has [\"cosine\",\"auto\",200]";
    train(&stage, "cosine", &format!("{same} --set diffusion.schedule=cosine"))
        .exits_with(ExitCode::Success)
        .stderr_has(warning);
    let first = |run: &str| super::support::trace(&stage, run)[&1][0];
    assert!(first("same") < first("run"), "the first loss is {}, wanted below {}", first("same"), first("run"));
}

#[test]
fn indivisible_layouts_are_refused_with_alternatives() {
    let stage = stage();
    for (settings, field, alternatives) in [
        ("--workers 7 --set train.global_batch=6", "train.global_batch: is 6", "wanted 7 or more, or 6 or 8 workers"),
        ("--workers 5 --tensor-parallel 5", "widths 144, 72, 36, 288", "wanted --tensor-parallel 1 with 5 workers"),
        (
            "--workers 4 --tensor-parallel 4 --set loss.anchors=66",
            "loss.anchors: is 66",
            "wanted 64 or 68, or --tensor-parallel 1 or 2 with 4 workers",
        ),
    ] {
        let ran = train(&stage, "layout", &format!("{settings} --set train.steps=4"));
        ran.exits_with(ExitCode::Config).stderr_has(field).stderr_has(alternatives);
    }
    assert!(!run_dir(&stage, "layout").exists(), "a run folder was created");
}

#[test]
fn run_without_a_checkpoint_may_change_its_configuration() {
    let stage = stage();
    let ran = train(&stage, "new", "--workers 3 --set train.global_batch=2 --set train.steps=4");
    ran.exits_with(ExitCode::Config).stderr_has("train.global_batch: is 2").stderr_has("wanted 3");
    assert!(!run_dir(&stage, "new").exists(), "a run folder was created");
    let ran = train(&stage, "new", "--workers 1 --set train.global_batch=1000 --set train.steps=4");
    ran.exits_with(ExitCode::Config).stderr_has("lower train.global_batch");
    let killed = "--workers 1 --set train.steps=4 --set train.global_batch=120 --max-restarts 0";
    let ran = stage.run(&format!("{BASE} --run new {killed} train --inject kill@rank=0,step=2"));
    ran.exits_with(ExitCode::WorkerFailed);
    assert!(run_dir(&stage, "new").exists(), "the run folder was removed after a worker was killed");
    train(&stage, "new", "--workers 1 --set train.steps=4").exits_with(ExitCode::Success);
}

#[test]
fn resumed_run_does_not_need_the_run_it_started_from() {
    let stage = stage();
    train(&stage, "first", "--workers 1 --set train.steps=2").exits_with(ExitCode::Success);
    let from = "--workers 1 --set train.init_from=checkpoints/first";
    train(&stage, "second", &format!("{from} --set train.steps=2")).exits_with(ExitCode::Success);
    std::fs::remove_dir_all(run_dir(&stage, "first")).expect("the folder exists");
    train(&stage, "second", &format!("{from} --set train.steps=4")).exits_with(ExitCode::Success);
    train(&stage, "third", &format!("{from} --set train.steps=2")).exits_with(ExitCode::NoData);
    let other = "--workers 1 --set train.init_from=checkpoints/second --set model.width_factor=0.5 --set train.steps=2";
    let ran = train(&stage, "fourth", other);
    ran.exits_with(ExitCode::RunDiffers).stderr_has("checkpoints/second/step-00000004").stderr_has("down1.x.weight");
}

#[test]
fn changed_data_are_refused_and_the_configuration_is_kept() {
    let stage = stage();
    train(&stage, "run", "--workers 1 --set train.steps=4").exits_with(ExitCode::Success);
    let config =
        || std::fs::read_to_string(run_dir(&stage, "run").join("config.toml")).expect("the run has a configuration");
    let before = config();
    std::fs::rename(stage.path().join("shards/small"), stage.path().join("shards/old")).expect("the shards exist");
    let table = std::fs::read_to_string(stage.path().join("table.csv")).expect("the table exists");
    let changed = table.replace("photo-7,", "photo-x,");
    std::fs::write(stage.path().join("table.csv"), changed).expect("the test folder is writable");
    let build = "--device cpu shards build --table table.csv --embeddings embeddings.npy --out shards/small";
    stage.run(build).exits_with(ExitCode::Success);
    let ran = train(&stage, "run", "--workers 1 --set train.steps=8");
    ran.exits_with(ExitCode::DataChanged).stderr_has("shards/small").stderr_has("fingerprint");
    assert_eq!(config(), before);
}

/// If the shards have no manifest, the checkpoint contains checksums of the data. So a changed number is detected
/// before the first step, even if the number is far from both ends of the file.
#[test]
fn changed_page_in_data_without_a_manifest_is_refused() {
    let stage = stage_of(8192);
    let folder = stage.path().join("shards/small");
    std::fs::remove_file(folder.join("manifest.json")).expect("the file exists");
    let settings = |steps: u32| format!("--workers 2 --set model.standardise=false --set train.steps={steps}");
    train(&stage, "run", &settings(2)).exits_with(ExitCode::Success);
    let file = folder.join("part-00000.parquet");
    let whole = std::fs::read(&file).expect("the file can be read");
    // In the last page before the footer, flip the lowest bit of a number in the last row.
    let end = whole.len() - 8;
    let length = u32::from_le_bytes(whole[end..][..4].try_into().expect("the slice has four bytes"));
    let at = end - length as usize - 10;
    assert!(at > 128 << 10, "the file is too small: the number is at byte {at}, wanted 128 KiB or more");
    let mut changed = whole.clone();
    changed[at] ^= 1;
    std::fs::write(&file, changed).expect("the test folder is writable");
    let ran = train(&stage, "run", &settings(4));
    ran.exits_with(ExitCode::DataChanged)
        .stderr_has("part-00000.parquet: row group 7: column `embedding`")
        .stderr_has("xxh3");
    // A file with the original bytes is accepted, although its modification time has changed.
    std::fs::write(&file, whole).expect("the test folder is writable");
    let ran = train(&stage, "run", &settings(4));
    ran.exits_with(ExitCode::Success);
    assert_eq!((&ran.json()["from_step"], &ran.json()["step"]), (&2.into(), &4.into()));
}

#[test]
fn run_held_by_a_live_launcher_is_refused() {
    let stage = stage();
    let line = format!("{BASE} --run held --workers 1 --set train.steps=100000 train");
    let mut first =
        stage.command(&line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the launcher can be started");
    eventually("training begins", || run_dir(&stage, "held").join("events.jsonl").exists());
    let ran = train(&stage, "held", "--workers 1 --set train.steps=100000");
    ran.exits_with(ExitCode::RunHeld).stderr_has(&first.id().to_string());
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(i32::try_from(first.id()).expect("process ids are below 2^31")),
        nix::sys::signal::Signal::SIGTERM,
    )
    .expect("the process is alive");
    assert_eq!(wait(&mut first), Some(i32::from(ExitCode::Preempted.code())));
}

#[test]
fn unwritable_checkpoint_folder_is_named() {
    let stage = stage();
    std::fs::write(stage.path().join("checkpoints"), "a file").expect("the test folder is writable");
    let ran = train(&stage, "run", "--workers 1 --set train.steps=4");
    ran.exits_with(ExitCode::Io).stderr_has("checkpoints");
    let ran = train(&stage, "run", "--workers 1 --set train.steps=4 --set checkpoint.dir=/proc/runs");
    ran.exits_with(ExitCode::Io).stderr_has("/proc/runs");
}

#[test]
fn diverging_run_fails_with_a_reason_and_is_not_restarted() {
    let stage = stage();
    let wild = "--workers 2 --set train.steps=50 --set train.learning_rate=1e30 --set train.clip_norm=0 \
                --set train.nonfinite_steps_max=3 --max-restarts 5";
    let ran = train(&stage, "wild", wild);
    ran.exits_with(ExitCode::Diverged).stderr_has("not finite in 3 steps in a row").stderr_has("the loss is");
    assert_eq!(super::support::events(&stage, "wild", "attempt").len(), 1, "the diverging run was restarted");
}
