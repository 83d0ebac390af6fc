//! Tests of `checkpoint list`, `verify` and `export` with the real binary, and of the lock of a run.

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::Files;
use locdiff_core::protocol::{CheckpointFile, PartsWritten, partial_name};
use locdiff_launch::run_folder::RunFolder;
use serde_json::json;

use super::save;
use crate::stage::{Stage, Worker};

fn run_in(stage: &Stage, name: &str) -> RunFolder {
    let mut config = locdiff_core::config::RunConfig::default();
    config.checkpoint.keep = 5;
    let dir = stage.path().join("checkpoints");
    let mut folder = RunFolder::open(Files::real(), &dir, name, &config).expect("the run can be opened").folder;
    folder.begin_attempt(1).expect("an attempt can begin");
    for (step, score) in [(10, Some(3.5)), (20, Some(9.0)), (30, None)] {
        save(&Files::real(), &folder, step, score).expect("the checkpoint can be committed");
    }
    folder
}

#[test]
fn checkpoints_are_listed_and_verified_without_a_worker() {
    let stage = Stage::new(Worker::None);
    stage.run("checkpoint list").exits_with(ExitCode::NoData).stderr_has("no runs in checkpoints");
    stage.run("checkpoint verify nowhere").exits_with(ExitCode::NoData).stderr_has("no run `nowhere` in checkpoints");
    // The run stays locked during the whole test. The verbs that only read must work nevertheless.
    let held = run_in(&stage, "first");
    for named in ["", "first", "checkpoints/first", "--run first"] {
        let ran = stage.run(&format!("checkpoint list {named} --json"));
        let json = ran.exits_with(ExitCode::Success).json();
        let rows = json["rows"].as_array().expect("the result has rows");
        assert_eq!(rows.iter().map(|row| row["step"].as_u64()).collect::<Vec<_>>(), [Some(10), Some(20), Some(30)]);
        assert_eq!((&rows[1]["best"], &rows[1]["score"]), (&true.into(), &9.0.into()), "{json}");
        assert_eq!((&rows[0]["best"], &rows[0]["state"]), (&false.into(), &"present".into()), "{json}");
        assert!(rows[0]["bytes"].as_u64() > Some(500) && rows[0]["committed_unix_s"].as_u64() > Some(0), "{json}");
    }
    stage.run("checkpoint list").exits_with(ExitCode::Success);
    let verified = stage.run("checkpoint verify --json").exits_with(ExitCode::Success).json();
    assert_eq!((&verified["ok"], &verified["rows"][2]["state"]), (&true.into(), &"whole".into()), "{verified}");

    let part = held.path().join("step-00000020/part-0");
    let mut bytes = std::fs::read(&part).expect("the file can be read");
    bytes[3] ^= 16;
    std::fs::write(&part, bytes).expect("the test folder is writable");
    let listed = stage.run("checkpoint list --json").exits_with(ExitCode::Success).json();
    assert_eq!(listed["rows"][1]["state"], "present", "`list` must compare only file lengths: {listed}");
    let ran = stage.run("checkpoint verify");
    ran.exits_with(ExitCode::Corrupt)
        .stderr_has("1 of 3 checkpoints are damaged")
        .stderr_has("step-00000020: part-0 has checksum ");
    assert!(held.path().join("step-00000020").exists(), "the damaged checkpoint was renamed");
}

#[test]
fn export_needs_a_whole_checkpoint_and_an_unused_name() {
    let stage = Stage::new(Worker::None);
    let held = run_in(&stage, "first");
    std::fs::write(stage.path().join("there"), "mine").expect("the test folder is writable");
    stage.run("checkpoint export first --out there").exits_with(ExitCode::Exists).stderr_has("--overwrite");
    stage.run("checkpoint export none --out x").exits_with(ExitCode::NoData).stderr_has("no run `none` in checkpoints");
    std::fs::remove_file(held.path().join("step-00000030/part-0")).expect("the file exists");
    let damaged = held.path().join("step-00000030");
    let ran = stage.run(&format!("checkpoint export {} --out x", damaged.display()));
    ran.exits_with(ExitCode::Corrupt).stderr_has("part-0 is missing");
    let ran = stage.run("checkpoint export first --out x --device cpu");
    ran.exits_with(ExitCode::WorkerMissing).stderr_has("step-00000030: part-0 is missing; skipped");
    assert_eq!(std::fs::read(stage.path().join("there")).expect("the file can be read"), b"mine");
    assert!(damaged.exists());
}

/// A safetensors file with one f32 tensor.
fn safetensors(name: &str, numbers: &[f32]) -> Vec<u8> {
    let info = json!({ "dtype": "F32", "shape": [numbers.len()], "data_offsets": [0, 4 * numbers.len()] });
    let mut header = json!({ name: info }).to_string();
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    bytes
}

#[test]
fn newest_whole_checkpoint_is_exported() {
    let stage = Stage::new(Worker::Real);
    let mut config = locdiff_core::config::RunConfig::default();
    config.model.degree = 23;
    let dir = stage.path().join("checkpoints");
    let mut folder = RunFolder::open(Files::real(), &dir, "first", &config).expect("the run can be opened").folder;
    let attempt = folder.begin_attempt(1).expect("an attempt can begin");
    for step in [1, 2] {
        let partial = folder.path().join(partial_name(step, attempt));
        Files::real().create_folder(&partial).expect("the parent folder exists");
        let name = "ema-00-of-01.safetensors".to_owned();
        let bytes = safetensors("input.weight", &[step as f32, 0.5]);
        let written = Files::real().write_new(&partial.join(&name), &bytes).expect("the test folder is writable");
        let mut files = vec![CheckpointFile { name, bytes: written.bytes, xxh3: written.xxh3 }];
        let state = json!({ "degree": 23, "embedding_width": 2, "config": config }).to_string();
        let name = "state.json".to_owned();
        let written = Files::real().write_new(&partial.join(&name), state.as_bytes()).expect("the folder is writable");
        files.push(CheckpointFile { name, bytes: written.bytes, xxh3: written.xxh3 });
        let parts = [PartsWritten { step, attempt, files, score: None }];
        folder.commit(attempt, step, &parts).expect("the checkpoint can be committed");
    }
    let damaged = folder.path().join("step-00000002/ema-00-of-01.safetensors");
    std::fs::write(damaged, "damaged").expect("the test folder is writable");
    std::fs::create_dir(stage.path().join("out")).expect("the test folder is writable");
    let ran = stage.run("checkpoint export first --out out/model.safetensors --json --device cpu");
    let json = ran.exits_with(ExitCode::Success).stderr_has("step-00000002: ").stderr_has("skipped").json();
    assert_eq!((&json["step"], &json["degree"], &json["tensors"]), (&1.into(), &23.into(), &1.into()), "{json}");
    let bytes = std::fs::read(stage.path().join("out/model.safetensors")).expect("the file can be read");
    assert_eq!(bytes[bytes.len() - 8..], [1_f32.to_le_bytes(), 0.5_f32.to_le_bytes()].concat());
    let text = String::from_utf8_lossy(&bytes);
    for part in ["\"input.weight\"", "locdiff-export-2", "\\\"degree\\\":23"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(folder.path().join("step-00000002").exists(), "the damaged checkpoint was renamed");
    stage.run("checkpoint export first --out out/model.safetensors --device cpu").exits_with(ExitCode::Exists);
    let one = "checkpoint export checkpoints/first/step-00000001 --out out/model.safetensors --overwrite --device cpu";
    stage.run(one).exits_with(ExitCode::Success);
}

/// Another process takes the lock and is then killed.
#[test]
fn run_lock_is_released_when_its_process_is_killed() {
    let stage = Stage::new(Worker::None);
    drop(run_in(&stage, "first"));
    let lock = stage.path().join("checkpoints/first/lock");
    let script = "import fcntl, os, sys, time\n\
                  file = open(sys.argv[1], 'r+')\n\
                  fcntl.flock(file, fcntl.LOCK_EX)\n\
                  file.truncate(0); file.write('pid %d on elsewhere' % os.getpid()); file.flush()\n\
                  print('held', flush=True)\n\
                  time.sleep(600)\n";
    let mut holder = std::process::Command::new("python3")
        .args(["-c", script])
        .arg(&lock)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("python3 is installed");
    let mut line = String::new();
    let mut output = std::io::BufReader::new(holder.stdout.take().expect("stdout is a pipe"));
    std::io::BufRead::read_line(&mut output, &mut line).expect("the pipe can be read");
    let config = locdiff_core::config::RunConfig::default();
    let open = || RunFolder::open(Files::real(), &stage.path().join("checkpoints"), "first", &config);
    let error = open().expect_err("another launcher holds the run");
    let pid = format!("pid {} on elsewhere", holder.id());
    assert!(error.exit_code() == ExitCode::RunHeld && error.to_string().contains(&pid), "{error}");
    holder.kill().expect("the process is alive");
    holder.wait().expect("the process is a child of the test");
    open().expect("the lock is free again");
}
