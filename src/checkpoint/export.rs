//! Exports the averaged weights of a checkpoint as one safetensors file, with the metadata that other programs need to
//! use the file.

use std::collections::BTreeMap;
use std::path::Path;

use locdiff_core::config::RunConfig;
use locdiff_core::files::{Files, WRITING, parent};
use locdiff_core::protocol::{ExportJob, Exported};

use super::error::CheckpointError;
use super::reader::Checkpoint;
use super::writer::write_tensors;
use super::{EMA, STATE};

/// Name and version of the export format, stored in the metadata of the file.
const FORMAT: &str = "locdiff-export-1";

/// Writes the export to `job.out`. An existing file is replaced only if `job.overwrite` is set. The export is written
/// under a temporary name and then renamed. So a failure leaves no incomplete file at `job.out` and does not damage an
/// existing file.
pub fn export(files: &Files, job: &ExportJob) -> Result<Exported, CheckpointError> {
    let out = &job.out;
    match out.symlink_metadata() {
        Ok(found) if found.is_dir() => return Err(CheckpointError::bad(out, "is a folder; name a file instead")),
        Ok(_) if !job.overwrite => return Err(CheckpointError::Exists(out.clone())),
        _ => {}
    }
    let Some(name) = out.file_name().map(|name| name.to_string_lossy()) else {
        return Err(CheckpointError::bad(out, "does not end in a file name; name a file instead"));
    };
    let checkpoint = Checkpoint::open(&job.checkpoint)?;
    let tensors = checkpoint.tensors(EMA)?;
    let config = configuration(&checkpoint, job)?;
    let metadata = metadata(&checkpoint, &config)?;
    files.create_folders(parent(out))?;
    let temporary = parent(out).join(format!(".{name}{WRITING}"));
    let written = put_in_place(files, &temporary, out, &tensors, &metadata);
    if written.is_err() {
        let _ = files.remove_file(&temporary);
    }
    let (bytes, xxh3) = written?;
    Ok(Exported {
        out: out.clone(),
        checkpoint: job.checkpoint.clone(),
        step: checkpoint.manifest().step,
        score: checkpoint.manifest().score,
        degree: config.model.degree,
        tensors: tensors.len(),
        numbers: tensors.iter().map(|(_, tensor)| tensor.numel()).sum(),
        bytes,
        xxh3,
    })
}

fn put_in_place(
    files: &Files,
    temporary: &Path,
    out: &Path,
    tensors: &[(String, tch::Tensor)],
    metadata: &BTreeMap<String, String>,
) -> Result<(u64, String), CheckpointError> {
    let name = temporary.file_name().unwrap_or_default().to_string_lossy();
    let written = write_tensors(files, parent(temporary), &name, tensors, metadata)?;
    files.rename(temporary, out)?;
    files.sync_folder(parent(out))?;
    Ok((written.bytes, written.xxh3))
}

/// The configuration in the checkpoint's `state.json` or, if the checkpoint has no configuration, the
/// configuration of the job.
fn configuration(checkpoint: &Checkpoint, job: &ExportJob) -> Result<RunConfig, CheckpointError> {
    if checkpoint.file(STATE).is_none() {
        return Ok(job.config.clone());
    }
    match checkpoint.json(STATE)?.get("config") {
        None => Ok(job.config.clone()),
        Some(config) => serde_json::from_value(config.clone()).map_err(|error| {
            CheckpointError::bad(&job.checkpoint.join(STATE), format!("cannot parse `config`: {error}"))
        }),
    }
}

fn metadata(checkpoint: &Checkpoint, config: &RunConfig) -> Result<BTreeMap<String, String>, CheckpointError> {
    let manifest = checkpoint.manifest();
    let text = serde_json::to_string(config).map_err(|error| CheckpointError::Internal(error.to_string()))?;
    let mut metadata = BTreeMap::from([
        ("format".to_owned(), FORMAT.to_owned()),
        ("step".to_owned(), manifest.step.to_string()),
        ("version".to_owned(), manifest.version.clone()),
        ("revision".to_owned(), manifest.revision.clone()),
        ("degree".to_owned(), config.model.degree.to_string()),
        ("config".to_owned(), text),
    ]);
    if checkpoint.file(STATE).is_some() {
        let kept = &checkpoint.json(STATE)?["kept_dimensions"];
        metadata.extend((!kept.is_null()).then(|| ("kept_dimensions".to_owned(), kept.to_string())));
    }
    metadata.extend(manifest.score.map(|score| ("score".to_owned(), score.to_string())));
    Ok(metadata)
}
