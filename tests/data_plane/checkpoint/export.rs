//! An export is a single file that holds the averaged weights and what else a prediction needs. Any safetensors library
//! can read it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use locdiff::checkpoint::{EMA, STATE, export, load_export, piece_name, write_json, write_tensors};
use locdiff_core::config::RunConfig;
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::exported::ExportMetadata;
use locdiff_core::files::{Fault, Files, measure};
use locdiff_core::protocol::{ExportJob, PartsWritten, RunParts, partial_name};
use locdiff_launch::run_folder::RunFolder;
use serde_json::{Value, json};
use tch::Tensor;

use crate::checkpoint::{assert_same, tensors};

/// Makes a run with one checkpoint and returns the folder of the checkpoint. The configuration in the checkpoint
/// differs from the configuration of the run.
fn run(dir: &Path) -> PathBuf {
    let mut config = RunConfig::default();
    let mut run = RunFolder::open(Files::real(), dir, "run", &config).expect("the run folder can be opened").folder;
    let attempt = run.begin_attempt(1).expect("the run folder is writable");
    let partial = run.path().join(partial_name(9, attempt));
    let files = Files::real();
    files.create_folder(&partial).expect("the folder can be created");
    config.model.degree = 23;
    let written = vec![
        write_tensors(&files, &partial, &piece_name(EMA, 0, 1), &tensors(4), &BTreeMap::new())
            .expect("the file can be written"),
        write_json(&files, &partial, STATE, &state(&config)).expect("the file can be written"),
    ];
    let parts = PartsWritten { step: 9, attempt, files: written, score: Some(12.5) };
    run.commit(attempt, 9, &[parts]).expect("all parts were written");
    run.path().join("step-00000009")
}

/// The part of `state.json` that an export needs.
pub(super) fn state(config: &RunConfig) -> Value {
    json!({ "degree": config.model.degree, "embedding_width": 24, "kept_dimensions": null, "config": config })
}

fn job(checkpoint: &Path, out: &Path, overwrite: bool) -> ExportJob {
    let run = RunParts { config: Some("[eval]\nsamples = 3\n".to_owned()), ..RunParts::default() };
    ExportJob { checkpoint: checkpoint.into(), run, out: out.into(), overwrite }
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
    assert_eq!((&metadata["format"], &metadata["step"]), (&json!("locdiff-export-2"), &json!("9")));
    assert_eq!(
        (&metadata["run_config"], &metadata["embedding_width"]),
        (&json!("[eval]\nsamples = 3\n"), &json!("24"))
    );
    let manifest = measure(&checkpoint.join("manifest.json")).expect("the checkpoint has a manifest");
    assert_eq!((&metadata["checkpoint"], &metadata["xxh3"]), (&json!(manifest.xxh3), &json!(result.xxh3)));
    assert_eq!((&metadata["degree"], &metadata["score"]), (&json!("23"), &json!("12.5")));
    assert_eq!(metadata["revision"], locdiff_core::REVISION);
    let config: RunConfig = serde_json::from_str(metadata["config"].as_str().expect("metadata values are strings"))
        .expect("the export has a valid configuration");
    assert_eq!(config.model.degree, 23, "the configuration came from the job, not from the checkpoint");
}

#[test]
fn every_flipped_and_every_missing_byte_of_an_export_is_detected() {
    let home = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a folder can be created");
    let (checkpoint, out) = (run(home.path()), home.path().join("model.safetensors"));
    export(&Files::real(), &job(&checkpoint, &out, false)).expect("the checkpoint is whole");
    let whole = std::fs::read(&out).expect("the file is readable");
    assert_same(&load_export(&out).expect("the file is whole"), &tensors(4));
    let found = ExportMetadata::verified(&out).expect("the file is whole");
    assert_eq!((found.step, found.score, found.model.degree), (9, Some(12.5), 23));
    let refused = |bytes: &[u8], what: &str| {
        std::fs::write(&out, bytes).expect("the file can be written");
        let error = ExportMetadata::verified(&out).expect_err(what);
        assert!(matches!(error.exit_code(), ExitCode::Corrupt | ExitCode::BadData), "{what}: {error}");
        assert!(error.to_string().contains("model.safetensors: "), "{what}: {error}");
        assert!(load_export(&out).is_err(), "{what}: the worker reads it");
    };
    let data = whole.len() - 512;
    for position in (0..data).step_by(23).chain(data..whole.len()) {
        let mut bytes = whole.clone();
        bytes[position] ^= 1 << (position % 8);
        refused(&bytes, &format!("byte {position} of {} is flipped", whole.len()));
    }
    for length in [0, 7, 8, 9, 1000, whole.len() - 1] {
        refused(&whole[..length], &format!("only {length} bytes are left"));
    }
    refused(&[&*whole, b"x"].concat(), "one byte more");
    let text = String::from_utf8_lossy(&whole).replace("\"step\":\"9\"", "\"step\":\"8\"");
    refused(text.as_bytes(), "the metadata is edited");
}

#[test]
fn exports_of_other_versions_and_foreign_files_are_refused_with_the_way_out() {
    let home = tempfile::tempdir().expect("a temporary folder can be created");
    let path = home.path().join("model.safetensors");
    let refused = |header: &str, code: ExitCode, part: &str| {
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        std::fs::write(&path, bytes).expect("the file can be written");
        let error = ExportMetadata::verified(&path).expect_err("the file is no export");
        assert!(error.exit_code() == code && error.to_string().contains(part), "{header}: {error}");
    };
    let old = r#"{"__metadata__":{"format":"locdiff-export-1","step":"9","config":"{}"}}"#;
    refused(old, ExitCode::BadData, "is from an older version and lacks what a prediction needs; export the run again");
    refused(
        &old.replace("-1", "-3"),
        ExitCode::BadData,
        "wanted \"locdiff-export-2\"; use the version of locdiff-launch",
    );
    for foreign in ["{}", r#"{"__metadata__":{"format":"pt"}}"#, r#"{"x":{"dtype":"F32"}}"#] {
        refused(foreign, ExitCode::BadData, "is not an export of locdiff-launch, or damaged; export the run again");
    }
    refused(&old.replace("-1", "-2"), ExitCode::Corrupt, "another program has rewritten the file");
    for hostile in ["", "{", r#"{"__metadata__":3}"#, r#"{"__metadata__":{"format":2}}"#] {
        refused(hostile, ExitCode::Corrupt, "the header cannot be parsed");
    }
    std::fs::write(&path, u64::MAX.to_le_bytes()).expect("the file can be written");
    let error = ExportMetadata::verified(&path).expect_err("the header is longer than the file").to_string();
    assert!(error.contains("not a safetensors file, or cut short"), "{error}");
    let error = ExportMetadata::verified(home.path()).expect_err("it is a folder");
    assert_eq!(error.exit_code(), ExitCode::Io, "{error}");
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
