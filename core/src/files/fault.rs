//! Injected file system faults, for tests.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// A file system fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The process is killed. If it is writing to a file, half of the bytes reach the file. This operation and every
    /// later one fail.
    Crash,
    /// The machine loses power. Files that were not synced become empty, and a rename is undone if the folder of the
    /// new name was not synced after it. Then everything happens as in [`Fault::Crash`].
    PowerLoss,
    /// The disk is full. From this operation on, creating folders and creating, writing and syncing files fail.
    /// Renaming, removing and syncing folders still succeed.
    DiskFull,
}

/// Whether an operation needs disk space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileOperation {
    /// Needs disk space.
    Write,
    /// Does not need disk space.
    Other,
}

#[derive(Debug, Clone)]
pub(super) struct Faults(Arc<Mutex<FaultState>>);

/// A rename that a power loss would undo, because the folder of the new name has not been synced since.
#[derive(Debug)]
struct UnsyncedRename {
    from: PathBuf,
    to: PathBuf,
    /// Contents of the file that the rename replaced; `None` if it replaced no file.
    replaced: Option<Vec<u8>>,
}

#[derive(Debug)]
struct FaultState {
    fault: Fault,
    /// Number of operations that still succeed before the fault.
    left: u64,
    triggered: bool,
    unsynced: BTreeSet<PathBuf>,
    /// Renames that a power loss would undo, oldest first.
    unsynced_renames: Vec<UnsyncedRename>,
}

impl Faults {
    pub(super) fn new(fault: Fault, operation: u64) -> Self {
        Self(Arc::new(Mutex::new(FaultState {
            fault,
            left: operation,
            triggered: false,
            unsynced: BTreeSet::new(),
            unsynced_renames: Vec::new(),
        })))
    }

    fn state(&self) -> MutexGuard<'_, FaultState> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(super) fn has_triggered(&self) -> bool {
        self.state().triggered
    }

    pub(super) fn unsynced(&self, path: &Path) {
        self.state().unsynced.insert(path.to_owned());
    }

    pub(super) fn synced(&self, path: &Path) {
        self.state().unsynced.remove(path);
    }

    pub(super) fn renamed(&self, from: &Path, to: &Path, replaced: Option<Vec<u8>>) {
        let mut state = self.state();
        let moved = |path: PathBuf| match path.strip_prefix(from) {
            Ok(rest) if rest.as_os_str().is_empty() => to.to_owned(),
            Ok(rest) => to.join(rest),
            Err(_) => path,
        };
        state.unsynced = std::mem::take(&mut state.unsynced).into_iter().map(moved).collect();
        state.unsynced_renames.push(UnsyncedRename { from: from.to_owned(), to: to.to_owned(), replaced });
    }

    pub(super) fn synced_folder(&self, path: &Path) {
        self.state().unsynced_renames.retain(|rename| rename.to.parent() != Some(path));
    }

    /// Counts one operation, and triggers the fault if it is due. Returns an error if the fault makes this operation
    /// fail.
    pub(super) fn allow(&self, kind: FileOperation) -> io::Result<()> {
        let mut state = self.state();
        let triggers = !state.triggered && state.left == 0;
        state.left = state.left.saturating_sub(1);
        if triggers {
            state.triggered = true;
            if state.fault == Fault::PowerLoss {
                state.unsynced.iter().for_each(|path| drop(std::fs::File::create(path)));
                for UnsyncedRename { from, to, replaced } in state.unsynced_renames.iter().rev() {
                    let _ = std::fs::rename(to, from);
                    if let Some(bytes) = replaced {
                        let _ = std::fs::write(to, bytes);
                    }
                }
            }
        }
        match state.fault {
            _ if !state.triggered => Ok(()),
            Fault::DiskFull if kind == FileOperation::Other => Ok(()),
            Fault::DiskFull => Err(io::Error::from_raw_os_error(nix::errno::Errno::ENOSPC as i32)),
            Fault::Crash | Fault::PowerLoss => Err(io::Error::other("process killed (injected fault)")),
        }
    }
}
