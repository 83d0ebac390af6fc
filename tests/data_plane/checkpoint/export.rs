//! An export is a single file that holds the averaged weights. Any safetensors library can read it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use locdiff::checkpoint::{EMA, STATE, export, piece_name, write_json, write_tensors};
use locdiff_core::config::RunConfig;
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::{Fault, Files};
use locdiff_core::protocol::{ExportJob, PartsWritten, partial_name};
use locdiff_launch::run_folder::RunFolder;
use serde_json::{Value, json};
use tch::Tensor;

use crate::checkpoint::{assert_same, tensors};

/// Makes a run with one checkpoint and returns the folder of the checkpoint. The configuration in the checkpoint
/// differs from the configuration of the run.
fn run(dir: &Path) -> PathBuf {
    let mut config = RunConfig::default();
    let mut run = RunFolder::open(Files::real(), dir, "run", &config).expect("the run folder can be opened").folder;
    let attempt = run.begin_attempt().expect("the run folder is writable");
    let partial = run.path().join(partial_name(9, attempt));
    let files = Files::real();
    files.create_folder(&partial).expect("the folder can be created");
    config.model.degree = 23;
    let written = vec![
        write_tensors(&files, &partial, &piece_name(EMA, 0, 1), &tensors(4), &BTreeMap::new())
            .expect("the file can be written"),
        write_json(&files, &partial, STATE, &json!({ "config": config })).expect("the file can be written"),
    ];
    let parts = PartsWritten { step: 9, attempt, files: written, score: Some(12.5) };
    run.commit(attempt, 9, &[parts]).expect("all parts were written");
    run.path().join("step-00000009")
}

fn job(checkpoint: &Path, out: &Path, overwrite: bool) -> ExportJob {
    ExportJob { checkpoint: checkpoint.into(), config: RunConfig::default(), out: out.into(), overwrite }
}

fn metadata(path: &Path) -> Value {
    let bytes = std::fs::read(path).expect("the file is readable");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("the slice has eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("the value is JSON");
    header["__metadata__"].clone()
}

#[test]
fn export_has_the_averaged_weights_and_the_configuration() {
    let home = tempfile::tempdir().expect("a temporary folder can be created");
    let (checkpoint, out) = (run(home.path()), home.path().join("new/model.safetensors"));
    let result = export(&Files::real(), &job(&checkpoint, &out, false)).expect("the checkpoint is whole");
    assert_eq!((result.step, result.tensors, result.degree), (9, 7, 23));
    assert_same(&Tensor::read_safetensors(&out).expect("the safetensors crate can read the file"), &tensors(4));
    let metadata = metadata(&out);
    assert_eq!((&metadata["format"], &metadata["step"]), (&json!("locdiff-export-1"), &json!("9")));
    assert_eq!((&metadata["degree"], &metadata["score"]), (&json!("23"), &json!("12.5")));
    assert_eq!(metadata["revision"], locdiff_core::REVISION);
    let config: RunConfig = serde_json::from_str(metadata["config"].as_str().expect("metadata values are strings"))
        .expect("the export has a valid configuration");
    assert_eq!(config.model.degree, 23, "the configuration came from the job, not from the checkpoint");
}

#[test]
fn export_is_atomic_and_replaces_a_file_only_with_overwrite() {
    let home = tempfile::tempdir().expect("a temporary folder can be created");
    let (checkpoint, out) = (run(home.path()), home.path().join("model.safetensors"));
    std::fs::write(&out, "mine").expect("the file can be written");
    let error = export(&Files::real(), &job(&checkpoint, &out, false)).expect_err("the file exists");
    assert!(error.exit_code() == ExitCode::Exists && error.to_string().contains("--overwrite"), "{error}");
    let error = export(&Files::real(), &job(&checkpoint, home.path(), true)).expect_err("the path is a folder");
    assert_eq!(error.exit_code(), ExitCode::BadData, "{error}");
    for fault in [Fault::Crash, Fault::DiskFull] {
        for operation in 0.. {
            let files = Files::failing(fault, operation);
            let ended = export(&files, &job(&checkpoint, &out, true));
            let whole = Tensor::read_safetensors(&out).is_ok();
            assert!(
                whole || std::fs::read(&out).expect("the file is readable") == b"mine",
                "{fault:?} at operation {operation} damaged the file"
            );
            if ended.is_ok() {
                assert!(
                    whole && operation >= 3,
                    "{fault:?} at operation {operation}: the file is damaged, or the export took under 3 operations"
                );
                break;
            }
            std::fs::write(&out, "mine").expect("the file can be written");
        }
    }
}

#[test]
fn damaged_part_is_not_exported() {
    let home = tempfile::tempdir().expect("a temporary folder can be created");
    let (checkpoint, out) = (run(home.path()), home.path().join("model.safetensors"));
    let path = checkpoint.join(piece_name(EMA, 0, 1));
    let mut bytes = std::fs::read(&path).expect("the file is readable");
    *bytes.last_mut().expect("the file is not empty") ^= 1;
    std::fs::write(&path, bytes).expect("the file can be written");
    let error = export(&Files::real(), &job(&checkpoint, &out, false)).expect_err("the file is damaged");
    assert!(error.exit_code() == ExitCode::Corrupt && error.to_string().contains("ema-00-of-01"), "{error}");
    assert!(!out.exists());
}
