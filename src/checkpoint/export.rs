//! Exports the averaged weights of a checkpoint as one safetensors file. Its metadata has everything else that a
//! prediction needs, and a checksum of the whole file.

use std::path::Path;

use locdiff_core::exported::{ExportMetadata, ExportReader};
use locdiff_core::files::{Files, WRITING, parent};
use locdiff_core::protocol::{CheckpointFile, ExportJob, Exported};

use super::EMA;
use super::error::CheckpointError;
use super::reader::Checkpoint;
use super::writer::write_tensors;

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
    let manifest = checkpoint.manifest();
    let metadata = ExportMetadata {
        step: manifest.step,
        version: manifest.version.clone(),
        revision: manifest.revision.clone(),
        checkpoint: checkpoint.xxh3().to_owned(),
        score: manifest.score,
        model: checkpoint.model_state()?,
        run: job.run.clone(),
    };
    files.create_folders(parent(out))?;
    let temporary = parent(out).join(format!(".{name}{WRITING}"));
    let written = put_in_place(files, &temporary, out, &tensors, &metadata);
    if written.is_err() {
        let _ = files.remove_file(&temporary);
    }
    let CheckpointFile { bytes, xxh3, .. } = written?;
    Ok(Exported {
        out: out.clone(),
        checkpoint: job.checkpoint.clone(),
        step: metadata.step,
        score: metadata.score,
        degree: metadata.model.degree,
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
    metadata: &ExportMetadata,
) -> Result<CheckpointFile, CheckpointError> {
    let name = temporary.file_name().unwrap_or_default().to_string_lossy();
    let written = write_tensors(files, parent(temporary), &name, tensors, &metadata.strings())?;
    // The checksum is known when everything else is written.
    let position = ExportReader::open(temporary)?.checksum_position();
    files.replace_bytes(temporary, position, written.xxh3.as_bytes())?;
    files.rename(temporary, out)?;
    files.sync_folder(parent(out))?;
    Ok(written)
}
