//! Injected file system faults, for tests.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// A file system fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The process is killed. Half of the current write reaches the file, and every later operation fails.
    Crash,
    /// The machine loses power. As for a crash, and files that were not synced become empty.
    PowerLoss,
    /// The disk is full. This write and all later ones fail; files can still be renamed and removed.
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

#[derive(Debug)]
struct FaultState {
    fault: Fault,
    /// Operations that still succeed before the fault.
    left: u64,
    triggered: bool,
    unsynced: BTreeSet<PathBuf>,
}

impl Faults {
    pub(super) fn new(fault: Fault, operation: u64) -> Self {
        Self(Arc::new(Mutex::new(FaultState { fault, left: operation, triggered: false, unsynced: BTreeSet::new() })))
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

    pub(super) fn renamed(&self, from: &Path, to: &Path) {
        let mut state = self.state();
        let moved = |path: PathBuf| match path.strip_prefix(from) {
            Ok(rest) if rest.as_os_str().is_empty() => to.to_owned(),
            Ok(rest) => to.join(rest),
            Err(_) => path,
        };
        state.unsynced = std::mem::take(&mut state.unsynced).into_iter().map(moved).collect();
    }

    /// Counts one operation, and returns an error if the fault affects it.
    pub(super) fn allow(&self, kind: FileOperation) -> io::Result<()> {
        let mut state = self.state();
        let triggers = !state.triggered && state.left == 0;
        state.left = state.left.saturating_sub(1);
        if triggers {
            state.triggered = true;
            if state.fault == Fault::PowerLoss {
                state.unsynced.iter().for_each(|path| drop(std::fs::File::create(path)));
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
