//! Injected file system faults, for tests.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// A file system fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The process is killed during an operation. If the operation writes to a file, half of the bytes reach the file.
    /// This operation and every later operation fail.
    Crash,
    /// The machine loses power. Files that were not synced become empty. If a folder was not synced since a file or
    /// folder was created in it, that file or folder vanishes. If a folder was not synced since something was renamed
    /// into it, the rename is undone. Everything else happens as in [`Fault::Crash`].
    PowerLoss,
    /// The disk is full. From this operation on, folders cannot be created, and files cannot be created, written or
    /// synced. Renaming and removing still work, and folders can still be synced.
    DiskFull,
    /// The process is stopped just before an operation, and wakes up later. [`Files::pausing`] says what happens in the
    /// meantime.
    ///
    /// [`Files::pausing`]: super::Files::pausing
    Pause,
}

/// Whether an operation needs disk space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileOperation {
    /// An operation that needs disk space.
    Write,
    /// An operation that does not need disk space.
    Other,
}

#[derive(Debug, Clone)]
pub(super) struct Faults(Arc<Mutex<FaultState>>);

/// A creation or rename that a power loss would undo, because the parent folder has not been synced since.
#[derive(Debug)]
enum NameChange {
    /// A new file or folder.
    Created(PathBuf),
    /// A rename.
    Renamed {
        from: PathBuf,
        to: PathBuf,
        /// Contents of the file that the rename replaced; `None` if it replaced no file.
        replaced: Option<Vec<u8>>,
    },
}

impl NameChange {
    fn new_name(&mut self) -> &mut PathBuf {
        match self {
            Self::Created(path) | Self::Renamed { to: path, .. } => path,
        }
    }

    fn undo(&self) {
        // Ignore errors: the file or folder may be gone already.
        match self {
            Self::Created(path) if path.is_dir() => drop(std::fs::remove_dir_all(path)),
            Self::Created(path) => drop(std::fs::remove_file(path)),
            Self::Renamed { from, to, replaced } => {
                let _ = std::fs::rename(to, from);
                if let Some(bytes) = replaced {
                    let _ = std::fs::write(to, bytes);
                }
            }
        }
    }
}

/// What others do while the process is stopped.
pub(super) struct Meanwhile(pub(super) Box<dyn FnOnce() + Send>);

impl std::fmt::Debug for Meanwhile {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Meanwhile")
    }
}

#[derive(Debug)]
struct FaultState {
    fault: Fault,
    /// Number of operations that still succeed before the fault.
    left: u64,
    triggered: bool,
    /// What happens during [`Fault::Pause`].
    meanwhile: Option<Meanwhile>,
    unsynced: BTreeSet<PathBuf>,
    /// Changes that a power loss would undo, oldest first.
    unsynced_names: Vec<NameChange>,
}

/// The path of a file or folder after `from` was renamed to `to`.
fn moved(path: &Path, from: &Path, to: &Path) -> PathBuf {
    match path.strip_prefix(from) {
        Ok(rest) if rest.as_os_str().is_empty() => to.to_owned(),
        Ok(rest) => to.join(rest),
        Err(_) => path.to_owned(),
    }
}

impl Faults {
    pub(super) fn new(fault: Fault, operation: u64, meanwhile: Option<Meanwhile>) -> Self {
        Self(Arc::new(Mutex::new(FaultState {
            fault,
            left: operation,
            triggered: false,
            meanwhile,
            unsynced: BTreeSet::new(),
            unsynced_names: Vec::new(),
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

    pub(super) fn created(&self, path: &Path) {
        self.state().unsynced_names.push(NameChange::Created(path.to_owned()));
    }

    pub(super) fn renamed(&self, from: &Path, to: &Path, replaced: Option<Vec<u8>>) {
        let mut state = self.state();
        state.unsynced = std::mem::take(&mut state.unsynced).iter().map(|path| moved(path, from, to)).collect();
        state.unsynced_names.push(NameChange::Renamed { from: from.to_owned(), to: to.to_owned(), replaced });
    }

    pub(super) fn synced_folder(&self, folder: &Path) {
        let mut state = self.state();
        // Go from the newest change to the oldest one, because a rename may move names that earlier changes made.
        let (mut kept, mut renames) = (Vec::new(), Vec::new());
        for mut change in std::mem::take(&mut state.unsynced_names).into_iter().rev() {
            let now = |path: &Path, renames: &[(PathBuf, PathBuf, bool)], only_durable: bool| {
                let later = renames.iter().rev().filter(|(.., is_durable)| *is_durable || !only_durable);
                later.fold(path.to_owned(), |path, (from, to, _)| moved(&path, from, to))
            };
            let is_durable = now(change.new_name(), &renames, false).parent() == Some(folder);
            if let NameChange::Renamed { from, to, .. } = &change {
                renames.push((from.clone(), to.clone(), is_durable));
            }
            if !is_durable {
                // Later renames that are durable survive a crash, so apply them to the paths of this change.
                *change.new_name() = now(change.new_name(), &renames, true);
                if let NameChange::Renamed { from, .. } = &mut change {
                    *from = now(from, &renames, true);
                }
                kept.push(change);
            }
        }
        kept.reverse();
        state.unsynced_names = kept;
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
                state.unsynced_names.iter().rev().for_each(NameChange::undo);
            }
        }
        if let Some(Meanwhile(others)) = state.meanwhile.take_if(|_| triggers) {
            drop(state);
            others();
            return Ok(());
        }
        match state.fault {
            _ if !state.triggered => Ok(()),
            Fault::Pause => Ok(()),
            Fault::DiskFull if kind == FileOperation::Other => Ok(()),
            Fault::DiskFull => Err(io::Error::from_raw_os_error(nix::errno::Errno::ENOSPC as i32)),
            Fault::Crash | Fault::PowerLoss => Err(io::Error::other("process killed (injected fault)")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::files::{Fault, FileError, Files};

    /// Makes changes in a new folder, and then simulates a power loss. Returns the names of all files and folders that
    /// are left in the folder and its subfolders.
    fn left(changes: impl Fn(&Files, &Path) -> Result<(), FileError>) -> Vec<String> {
        let (folder, other) = (tempfile::tempdir(), tempfile::tempdir());
        let (folder, other) = (folder.expect("a folder can be created"), other.expect("a folder can be created"));
        let files = Files::failing(Fault::PowerLoss, 100);
        changes(&files, folder.path()).expect("the folder is writable");
        while !files.has_failed() {
            let _ = files.sync_folder(other.path());
        }
        let mut names = Vec::new();
        let mut folders = vec![folder.path().to_owned()];
        while let Some(next) = folders.pop() {
            for entry in Files::real().entries(&next).expect("the folder can be read") {
                names
                    .push(entry.strip_prefix(folder.path()).expect("the entry is in the folder").display().to_string());
                folders.extend(entry.is_dir().then_some(entry));
            }
        }
        names.sort();
        names
    }

    #[test]
    fn names_vanish_unless_their_folder_was_synced_after_them() {
        let write = |files: &Files, path: &Path| files.write_new(path, b"text").map(drop);
        assert!(left(|files, at| write(files, &at.join("a"))).is_empty(), "a file whose name was not synced survived");
        let kept = left(|files, at| {
            write(files, &at.join("a"))?;
            files.sync_folder(at)?;
            write(files, &at.join("b"))
        });
        assert_eq!(kept, ["a"]);
        let renamed = left(|files, at| {
            write(files, &at.join("a"))?;
            files.sync_folder(at)?;
            files.rename(&at.join("a"), &at.join("b"))
        });
        assert_eq!(renamed, ["a"], "a rename that was not synced survived");
    }

    #[test]
    fn folder_that_was_moved_for_good_still_loses_the_names_in_it() {
        let moved = |is_synced: bool| {
            left(move |files, at| {
                files.create_folder(&at.join("partial"))?;
                files.write_new(&at.join("partial/.a"), b"text")?;
                files.sync_folder(&at.join("partial"))?;
                files.write_new(&at.join("partial/b"), b"text")?;
                files.rename(&at.join("partial/.a"), &at.join("partial/a"))?;
                if is_synced {
                    files.sync_folder(&at.join("partial"))?;
                }
                files.rename(&at.join("partial"), &at.join("whole"))?;
                files.sync_folder(at)
            })
        };
        assert_eq!(moved(false), ["whole", "whole/.a"]);
        assert_eq!(moved(true), ["whole", "whole/a", "whole/b"]);
    }
}
