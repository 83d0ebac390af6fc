//! Writes the parts of a checkpoint and returns the length and checksum of each file. Each tensor is copied piece by
//! piece to a small buffer and written from there.
//!
//! The background writer copies tensors from a GPU through pinned memory, because a copy into pageable memory would
//! keep all other threads from launching kernels.

use std::collections::BTreeMap;
use std::path::Path;

use locdiff_core::files::{FileWriter, Files, Written};
use locdiff_core::protocol::CheckpointFile;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::error::CheckpointError;
use super::header::{Header, TensorEntry};
use crate::native::host::pinned_bytes;

/// Number of bytes of a tensor that are copied and written at once.
const PIECE_BYTES: usize = 1 << 20;

/// Number of bytes that are copied from a GPU at once.
const FETCHED_BYTES: i64 = 16 << 20;

/// Pinned buffer through which tensors are copied from a GPU.
#[derive(Debug)]
pub(super) struct Staging(Tensor);

impl Staging {
    pub(super) fn new() -> Result<Self, CheckpointError> {
        Ok(Self(pinned_bytes(FETCHED_BYTES as usize)?))
    }
}

/// Writes tensors as one safetensors file and fsyncs it. The caller must fsync the folder.
pub fn write_tensors(
    files: &Files,
    folder: &Path,
    name: &str,
    tensors: &[(String, Tensor)],
    metadata: &BTreeMap<String, String>,
) -> Result<CheckpointFile, CheckpointError> {
    write_fetched(files, folder, (name, tensors), metadata, None)
}

/// Like [`write_tensors`]. If `staging` is given, tensors on a GPU are copied through it on the current stream.
pub(super) fn write_fetched(
    files: &Files,
    folder: &Path,
    (name, tensors): (&str, &[(String, Tensor)]),
    metadata: &BTreeMap<String, String>,
    staging: Option<&Staging>,
) -> Result<CheckpointFile, CheckpointError> {
    let path = folder.join(name);
    let mut order: Vec<&(String, Tensor)> = tensors.iter().collect();
    // Tensors with wide elements come first, so that the data of every tensor is aligned. The sort is stable, so
    // tensors with equally wide elements keep their order.
    order.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.kind().elt_size_in_bytes()));
    let mut header = Header { metadata: metadata.clone(), tensors: Vec::with_capacity(order.len()) };
    for (name, tensor) in &order {
        if header.tensors.iter().any(|entry| entry.name == *name) {
            return Err(CheckpointError::bad(&path, format!("two tensors are named `{name}`")));
        }
        let entry = TensorEntry::new(name, tensor.kind(), tensor.size());
        header.tensors.push(entry.map_err(|error| CheckpointError::bad(&path, error))?);
    }
    let mut writer = files.create(&path)?;
    writer.put(&header.encode())?;
    for (_, tensor) in order {
        match staging.filter(|_| tensor.device().is_cuda()) {
            Some(staging) => put_from_gpu(&mut writer, tensor, staging)?,
            None => put_tensor(&mut writer, tensor)?,
        }
    }
    Ok(file_entry(name, writer.finish()?))
}

/// Copies a tensor from the GPU piece by piece and writes each piece.
fn put_from_gpu(writer: &mut FileWriter, tensor: &Tensor, staging: &Staging) -> Result<(), CheckpointError> {
    let bytes = tensor.f_detach()?.f_contiguous()?.f_view([-1])?.f_view_dtype(Kind::Uint8)?;
    let length = bytes.size()[0];
    for begin in (0..length).step_by(FETCHED_BYTES as usize) {
        let count = FETCHED_BYTES.min(length - begin);
        let mut fetched = staging.0.f_narrow(0, 0, count)?;
        fetched.f_copy_(&bytes.f_narrow(0, begin, count)?)?;
        put_tensor(writer, &fetched)?;
    }
    Ok(())
}

fn put_tensor(writer: &mut FileWriter, tensor: &Tensor) -> Result<(), CheckpointError> {
    let flat = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?.f_view([-1])?;
    let element_bytes = flat.kind().elt_size_in_bytes();
    let (elements, piece_elements) = (flat.numel(), PIECE_BYTES / element_bytes);
    let mut buffer = vec![0_u8; PIECE_BYTES.min(elements * element_bytes)];
    for begin in (0..elements).step_by(piece_elements) {
        let count = piece_elements.min(elements - begin);
        let bytes = &mut buffer[..count * element_bytes];
        flat.f_narrow(0, begin as i64, count as i64)?.f_copy_data_u8(bytes, count)?;
        writer.put(bytes)?;
    }
    Ok(())
}

/// Writes a JSON file and fsyncs it. The caller must fsync the folder.
pub fn write_json(files: &Files, folder: &Path, name: &str, value: &Value) -> Result<CheckpointFile, CheckpointError> {
    let text = serde_json::to_vec_pretty(value).map_err(|error| CheckpointError::Internal(error.to_string()))?;
    Ok(file_entry(name, files.write_new(&folder.join(name), &text)?))
}

fn file_entry(name: &str, written: Written) -> CheckpointFile {
    CheckpointFile { name: name.to_owned(), bytes: written.bytes, xxh3: written.xxh3 }
}
