//! A file system that breaks on purpose, for tests.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// How files fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The process is killed: the operation is cut (half of a write arrives), nothing happens after it.
    Crash,
    /// The machine loses power: the same, and files that were not brought to the disk are empty.
    PowerLoss,
    /// No space: this and every later write fails, while names can still be changed and removed.
    DiskFull,
}

/// What an operation needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Space.
    Write,
    /// None.
    Other,
}

#[derive(Debug, Clone)]
pub(super) struct Faults(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    fault: Fault,
    /// Operations until it strikes.
    left: u64,
    struck: bool,
    unsynced: BTreeSet<PathBuf>,
}

impl Faults {
    pub(super) fn new(fault: Fault, operation: u64) -> Self {
        Self(Arc::new(Mutex::new(State { fault, left: operation, struck: false, unsynced: BTreeSet::new() })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(super) fn has_struck(&self) -> bool {
        self.state().struck
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

    /// Counts one operation; an error where it fails.
    pub(super) fn allow(&self, kind: Kind) -> io::Result<()> {
        let mut state = self.state();
        let strikes = !state.struck && state.left == 0;
        state.left = state.left.saturating_sub(1);
        if strikes {
            state.struck = true;
            if state.fault == Fault::PowerLoss {
                state.unsynced.iter().for_each(|path| drop(std::fs::File::create(path)));
            }
        }
        match state.fault {
            _ if !state.struck => Ok(()),
            Fault::DiskFull if kind == Kind::Other => Ok(()),
            Fault::DiskFull => Err(io::Error::from_raw_os_error(nix::errno::Errno::ENOSPC as i32)),
            Fault::Crash | Fault::PowerLoss => Err(io::Error::other("this process was killed (on purpose)")),
        }
    }
}
