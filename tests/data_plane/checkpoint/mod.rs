//! Checkpoints of real tensors are written in the background and committed. After any failure, the newest committed
//! checkpoint can still be read back bit for bit.

mod export;
mod export_python;
mod hostile;

use std::collections::BTreeMap;
use std::path::Path;

use locdiff::checkpoint::{
    Background, Checkpoint, CheckpointError, Division, EMA, FIRST_MOMENTS, Part, STATE, Snapshot, WEIGHTS,
    divisions_metadata, load_tensors, piece_name, write_json, write_tensors,
};
use locdiff_core::config::RunConfig;
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::{Fault, Files};
use locdiff_core::protocol::{CheckpointFile, partial_name};
use locdiff_launch::error::LaunchError;
use locdiff_launch::run_folder::RunFolder;
use serde_json::json;
use tch::{Device, Kind, Tensor};

pub(crate) type NamedTensors = Vec<(String, Tensor)>;

/// Tensors of every supported type and of unusual shapes, with values that depend on `seed`.
pub(crate) fn tensors(seed: i64) -> NamedTensors {
    let numbers = |shape: &[i64], kind| {
        let count: i64 = shape.iter().product();
        (Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.37 + seed).reshape(shape).to_kind(kind)
    };
    vec![
        ("half.weight".into(), numbers(&[3, 5], Kind::Half)),
        ("weight".into(), numbers(&[7, 11], Kind::Float)),
        ("transposed".into(), numbers(&[4, 6], Kind::Float).tr()),
        ("count".into(), Tensor::from(seed)),
        ("brain".into(), numbers(&[9], Kind::BFloat16)),
        ("double".into(), numbers(&[2, 1, 2], Kind::Double)),
        ("none".into(), numbers(&[0, 4], Kind::Float)),
    ]
}

/// Asserts that both lists have tensors of the same names, types, shapes and bits. The order may differ.
#[track_caller]
pub(crate) fn assert_same(got: &[(String, Tensor)], want: &[(String, Tensor)]) {
    assert_eq!(got.len(), want.len());
    for (name, want) in want {
        let (_, got) =
            got.iter().find(|(other, _)| other == name).unwrap_or_else(|| panic!("tensor {name} is missing"));
        assert_eq!((got.kind(), got.size()), (want.kind(), want.size()), "tensor {name} has the wrong type or shape");
        assert!(got.equal(want), "the values of tensor {name} differ");
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a temporary folder can be created")
}

#[test]
fn tensors_round_trip_bit_for_bit_and_the_safetensors_crate_reads_them() {
    let folder = folder();
    let metadata = BTreeMap::from([("step".to_owned(), "7 \"quoted\"".to_owned())]);
    let written = write_tensors(&Files::real(), folder.path(), "x.safetensors", &tensors(3), &metadata)
        .expect("the file can be written");
    assert_same(&load_tensors(folder.path(), &written).expect("all checksums match"), &tensors(3));
    let path = folder.path().join("x.safetensors");
    assert_same(&Tensor::read_safetensors(&path).expect("the safetensors crate can read the file"), &tensors(3));
    let bytes = std::fs::read(&path).expect("the file is readable");
    assert_eq!(written.bytes, bytes.len() as u64);
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("the slice has eight bytes"));
    assert_eq!(header % 8, 0, "the data is not aligned to 8 bytes");
    assert!(String::from_utf8_lossy(&bytes).contains("\"step\":\"7 \\\"quoted\\\"\""));
}

/// Writes and reads a tensor that is larger than any buffer of the reader and the writer. The size of the tensor is not
/// a multiple of a buffer size.
#[test]
fn tensors_larger_than_any_buffer_round_trip() {
    let folder = folder();
    let large = Tensor::arange(1_300_003, (Kind::Float, Device::Cpu)).sin();
    let tensors = [("large".to_owned(), large.shallow_clone()), ("after".to_owned(), large.narrow(0, 5, 3))];
    let written =
        write_tensors(&Files::real(), folder.path(), "x", &tensors, &BTreeMap::new()).expect("the file can be written");
    assert_same(&load_tensors(folder.path(), &written).expect("all checksums match"), &tensors);
}

#[test]
fn invalid_tensors_are_refused_before_a_file_is_created() {
    let folder = folder();
    let zeros = |kind| Tensor::zeros([2], (kind, Device::Cpu));
    let refused = |tensors: &[(String, Tensor)]| {
        let error = write_tensors(&Files::real(), folder.path(), "x", tensors, &BTreeMap::new())
            .expect_err("the input is invalid");
        assert_eq!(error.exit_code(), ExitCode::BadData, "{error}");
        assert!(!folder.path().join("x").exists());
        error.to_string()
    };
    assert!(refused(&[("flags".into(), zeros(Kind::Bool))]).contains("`flags` has the type Bool"));
    assert!(refused(&[("a/b".into(), zeros(Kind::Float))]).contains("not a valid tensor name"));
    let twice = [("a".to_owned(), zeros(Kind::Float)), ("a".to_owned(), zeros(Kind::Half))];
    assert!(refused(&twice).contains("two tensors are named `a`"));
}

/// The files that one of two ranks writes for a checkpoint. Rank 1 writes the first moments, rank 0 everything else.
fn snapshot(step: u64, attempt: u32, rank: u32) -> Snapshot {
    let seed = (step * 10) as i64;
    let part = |name: &str, seed| Part::Tensors {
        name: piece_name(name, 0, 1),
        tensors: tensors(seed),
        metadata: BTreeMap::new(),
    };
    let parts = match rank {
        0 => vec![
            part(WEIGHTS, seed),
            part(EMA, seed + 1),
            Part::Json { name: STATE.into(), value: json!({ "step": step }) },
        ],
        _ => vec![part(FIRST_MOMENTS, seed + 2)],
    };
    Snapshot { step, attempt, score: Some(step as f64), parts, ready: None }
}

/// Saves a checkpoint: two ranks write their files in background threads, and then the launcher commits the checkpoint.
fn save(files: &Files, run: &RunFolder, step: u64) -> Result<(), SaveError> {
    let attempt = run.attempt().expect("an attempt was begun");
    let writer =
        |_| Background::new(files.clone(), run.path().to_owned(), Device::Cpu).expect("a writer can be created");
    let mut ranks: Vec<Background> = (0..2).map(writer).collect();
    let mut parts = Vec::new();
    for (rank, background) in ranks.iter_mut().enumerate() {
        background.submit(snapshot(step, attempt, rank as u32)).map_err(SaveError::Rank)?;
        parts.push(background.wait().map_err(SaveError::Rank)?.expect("one was submitted"));
    }
    run.commit(attempt, step, &parts).map_err(SaveError::Launcher)?;
    Ok(())
}

#[derive(Debug)]
enum SaveError {
    Rank(CheckpointError),
    Launcher(LaunchError),
}

impl SaveError {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Rank(error) => error.exit_code(),
            Self::Launcher(error) => error.exit_code(),
        }
    }
}

fn open(dir: &Path, files: Files) -> Result<RunFolder, LaunchError> {
    let mut config = RunConfig::default();
    config.checkpoint.keep = 1;
    let mut run = RunFolder::open(files, dir, "run", &config)?.folder;
    run.begin_attempt(1)?;
    Ok(run)
}

fn assert_loads(folder: &Path, step: u64) {
    let checkpoint = Checkpoint::open(folder).expect("all checksums match");
    assert_eq!(checkpoint.manifest().step, step);
    let seed = (step * 10) as i64;
    for (name, seed) in [(WEIGHTS, seed), (EMA, seed + 1), (FIRST_MOMENTS, seed + 2)] {
        assert_same(&checkpoint.tensors(name).expect("all checksums match"), &tensors(seed));
    }
    assert_eq!(checkpoint.json(STATE).expect("all checksums match"), json!({ "step": step }));
}

/// Saves checkpoints 1 and 2, and then checkpoint 3 with a fault at one file operation. Repeats this for each file
/// operation of the save. Asserts that the newest checkpoint is then 2 or 3, that it loads bit for bit, and that the
/// next save works. If saving checkpoint 3 reported success, the newest checkpoint must be 3.
fn fail_everywhere(fault: Fault) {
    for operation in 0_u64.. {
        assert!(operation < 500, "the save still reached operation {operation}, wanted fewer than 500 operations");
        let home = folder();
        let run = open(home.path(), Files::real()).expect("the run folder can be opened");
        save(&Files::real(), &run, 1).expect("nothing fails");
        save(&Files::real(), &run, 2).expect("nothing fails");
        drop(run);
        let files = Files::failing(fault, operation);
        let ended = open(home.path(), files.clone()).map_err(SaveError::Launcher).and_then(|run| save(&files, &run, 3));
        if let Err(error) = &ended {
            assert_eq!(
                error.exit_code(),
                ExitCode::Io,
                "{fault:?} at operation {operation}: wrong exit code for {error:?}"
            );
        }
        let run = open(home.path(), Files::real()).expect("the run folder can be opened again");
        let point = run.resume_point().expect("the run folder is readable");
        assert!(
            point.set_aside.is_empty(),
            "{fault:?} at operation {operation}: checkpoints were set aside: {:?}",
            point.set_aside
        );
        let newest = point.checkpoint.expect("checkpoint 2 was committed");
        let step = newest.manifest.step;
        assert!(
            step == 3 || (step == 2 && ended.is_err()),
            "{fault:?} at operation {operation}: the newest checkpoint has step {step}"
        );
        assert_loads(&newest.path, step);
        save(&Files::real(), &run, 4).expect("nothing fails");
        assert_loads(&home.path().join("run/step-00000004"), 4);
        if !files.has_failed() {
            assert!(
                operation > 30 && ended.is_ok(),
                "no operation failed, but the save gave {ended:?} or took only {operation} operations"
            );
            return;
        }
    }
}

#[test]
fn crash_at_any_operation_leaves_the_newest_whole_checkpoint_loadable() {
    fail_everywhere(Fault::Crash);
}

#[test]
fn power_loss_at_any_operation_leaves_the_newest_whole_checkpoint_loadable() {
    fail_everywhere(Fault::PowerLoss);
}

#[test]
fn full_disk_at_any_operation_leaves_the_newest_whole_checkpoint_loadable() {
    fail_everywhere(Fault::DiskFull);
}

#[test]
fn background_writer_takes_one_snapshot_at_a_time_and_reports_each_once() {
    let home = folder();
    let mut background =
        Background::new(Files::real(), home.path().to_owned(), Device::Cpu).expect("a writer can be created");
    assert_eq!(background.wait().expect("no snapshot is being written"), None);
    assert_eq!(background.submit(snapshot(1, 0, 0)).expect("no earlier snapshot failed"), None);
    let first = background
        .submit(snapshot(2, 0, 1))
        .expect("no earlier snapshot failed")
        .expect("`submit` waits for the first snapshot");
    assert_eq!((first.step, first.files.len(), first.score), (1, 3, Some(1.0)));
    let mut second = None;
    while second.is_none() {
        second = background.poll().expect("the file can be written");
        std::thread::yield_now();
    }
    assert_eq!(second.map(|parts| (parts.step, parts.files.len())), Some((2, 1)));
    assert_eq!(background.poll().expect("no snapshot is being written"), None);
    let nothing = Snapshot { step: 3, attempt: 0, score: None, parts: Vec::new(), ready: None };
    background.submit(nothing).expect("no earlier snapshot failed");
    assert_eq!(background.wait().expect("there is no file to write").map(|parts| parts.files.len()), Some(0));
    assert!(!home.path().join(partial_name(3, 0)).exists());
}

#[test]
fn failed_background_write_is_reported_and_leaves_no_part() {
    let home = folder();
    let files = Files::failing(Fault::DiskFull, 4);
    let mut background = Background::new(files, home.path().to_owned(), Device::Cpu).expect("a writer can be created");
    background.submit(snapshot(1, 0, 0)).expect("no earlier snapshot failed");
    let error = background.wait().expect_err("the disk is full");
    assert_eq!(error.exit_code(), ExitCode::Io);
    assert!(error.to_string().contains("No space left on device"), "{error}");
    let left = std::fs::read_dir(home.path().join(partial_name(1, 0))).expect("the writer created the folder").count();
    assert_eq!(left, 0, "files were left on the full disk");
}

/// Writes a file of tensors, lets `change` damage the file, and returns the error from loading the file.
fn error_after(change: impl FnOnce(&Path)) -> CheckpointError {
    let folder = folder();
    let want = write_tensors(&Files::real(), folder.path(), "x", &tensors(1), &BTreeMap::new())
        .expect("the file can be written");
    change(&folder.path().join("x"));
    load_tensors(folder.path(), &want).expect_err("the file is damaged")
}

#[test]
fn damage_is_detected_while_reading() {
    let edit = |at: usize| {
        move |path: &Path| {
            let mut bytes = std::fs::read(path).expect("the file is readable");
            let at = at.min(bytes.len() - 1);
            bytes[at] ^= 4;
            std::fs::write(path, bytes).expect("the file can be written");
        }
    };
    for at in [0, 3, 9, 40, 700, 900, usize::MAX] {
        assert_eq!(error_after(edit(at)).exit_code(), ExitCode::Corrupt, "wrong exit code after damage to byte {at}");
    }
    let error = error_after(|path| {
        std::fs::File::options()
            .write(true)
            .open(path)
            .expect("the file was just written")
            .set_len(50)
            .expect("the file can be truncated")
    });
    assert!(error.exit_code() == ExitCode::Corrupt && error.to_string().contains("50 bytes"), "{error}");
    let error = error_after(|path| std::fs::remove_file(path).expect("the file exists"));
    assert!(error.exit_code() == ExitCode::Corrupt && error.to_string().contains("is missing"), "{error}");
    let error = error_after(|path| {
        std::fs::remove_file(path).expect("the file exists");
        std::fs::create_dir(path).expect("the folder can be created");
    });
    assert_eq!(error.exit_code(), ExitCode::Io, "{error}");
    let elsewhere = CheckpointFile { name: "../x".into(), bytes: 1, xxh3: String::new() };
    assert_eq!(
        load_tensors(Path::new("/tmp"), &elsewhere).expect_err("the file is outside the folder").exit_code(),
        ExitCode::Corrupt
    );
}

#[test]
fn pieces_are_joined_and_missing_ones_are_named() {
    let home = folder();
    let run = open(home.path(), Files::real()).expect("the run folder can be opened");
    let partial = run.path().join(partial_name(1, 0));
    Files::real().create_folder(&partial).expect("the folder can be created");
    let name = piece_name(EMA, 1, 2);
    let rows = |name: &str, first: f32| {
        vec![(name.to_owned(), Tensor::from_slice(&[first, first + 1.0, first + 2.0, first + 3.0]).view([2, 2]))]
    };
    let division = BTreeMap::from([("x".to_owned(), Division { dim: 0, sections: 1 })]);
    let whole = |piece: u32, first: f32, metadata: &BTreeMap<String, String>| {
        let name = piece_name(WEIGHTS, piece, 2);
        write_tensors(&Files::real(), &partial, &name, &rows("x", first), metadata).expect("the file can be written")
    };
    let files = vec![
        whole(0, 0.0, &divisions_metadata(&division)),
        whole(1, 4.0, &divisions_metadata(&division)),
        write_tensors(&Files::real(), &partial, &name, &tensors(1), &BTreeMap::new()).expect("the file can be written"),
        write_json(&Files::real(), &partial, STATE, &json!({})).expect("the file can be written"),
    ];
    let parts = locdiff_core::protocol::PartsWritten { step: 1, attempt: 0, files, score: None };
    run.commit(0, 1, &[parts]).expect("all parts were written");
    let checkpoint = Checkpoint::open(&run.path().join("step-00000001")).expect("all checksums match");
    let joined = checkpoint.tensors(WEIGHTS).expect("both pieces exist");
    let want = Tensor::arange(8, (Kind::Float, Device::Cpu)).view([4, 2]);
    assert!(joined.len() == 1 && joined[0].0 == "x" && joined[0].1.equal(&want), "{joined:?}");
    let error = checkpoint.tensors(EMA).expect_err("a piece is missing");
    assert!(error.to_string().contains("does not list ema-00-of-02.safetensors"), "{error}");
    let error = checkpoint.tensors(FIRST_MOMENTS).expect_err("all pieces are missing");
    assert!(error.to_string().contains("does not list first-moments-00-of-01.safetensors"), "{error}");
    assert_eq!(error.exit_code(), ExitCode::BadData);
}

#[test]
#[cfg_attr(not(locdiff_cuda), ignore = "needs the CUDA variant and a GPU")]
fn gpu_tensors_are_copied_in_the_background() {
    let home = folder();
    let gpu = Device::Cuda(0);
    let mut background = Background::new(Files::real(), home.path().to_owned(), gpu).expect("a writer can be created");
    // The tensor is larger than the pinned buffer through which it is copied.
    let large = Tensor::arange(5_000_001, (Kind::Float, gpu));
    let mut ready = locdiff::native::cuda::CudaEvent::new().expect("CUDA can create an event");
    ready
        .record(&locdiff::native::cuda::CudaStream::current().expect("CUDA has a current stream"))
        .expect("the stream exists");
    let part = Part::Tensors {
        name: piece_name(WEIGHTS, 0, 1),
        tensors: vec![("large".into(), large.shallow_clone()), ("small".into(), large.narrow(0, 7, 3))],
        metadata: BTreeMap::new(),
    };
    let snapshot = Snapshot { step: 1, attempt: 0, score: None, parts: vec![part], ready: Some(ready) };
    background.submit(snapshot).expect("no earlier snapshot failed");
    let written = background.wait().expect("the file can be written").expect("a snapshot was submitted");
    let found = load_tensors(&home.path().join(partial_name(1, 0)), &written.files[0]).expect("the file is valid");
    assert!(
        found[0].1.equal(&large.to_device(Device::Cpu)) && found[1].1.equal(&Tensor::from_slice(&[7.0_f32, 8.0, 9.0]))
    );
}
