//! Finds the worker program, and explains why it cannot be started.

use std::fmt::Display;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::error::{LaunchError, reported};

/// Path of `locdiff-worker`, which must be in the folder of the launcher's executable.
pub(super) fn worker_path() -> Result<PathBuf, LaunchError> {
    let launcher = std::env::current_exe().map_err(|error| worker_missing("locdiff-worker", error))?;
    let path = launcher.with_file_name("locdiff-worker");
    match std::fs::metadata(&path) {
        Ok(metadata) if metadata.is_file() && metadata.permissions().mode() & 0o111 != 0 => Ok(path),
        Ok(_) => Err(worker_missing(path, "not an executable file")),
        Err(error) => Err(worker_missing(path, error)),
    }
}

fn worker_missing(path: impl AsRef<Path>, reason: impl Display) -> LaunchError {
    reported!(
        WorkerMissing,
        "no worker at {}: {reason}; build it with `make build`, or install both programs into one folder",
        path.as_ref().display()
    )
}

/// The error for a worker that could not be started.
pub(super) fn spawn_error(worker: &Path, error: std::io::Error) -> LaunchError {
    let is_not_executable =
        matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::InvalidInput);
    // ENOEXEC has no `ErrorKind`.
    if is_not_executable || error.raw_os_error() == Some(nix::errno::Errno::ENOEXEC as i32) {
        return worker_missing(worker, error);
    }
    LaunchError::at(worker)(error)
}
