//! The folder of a launcher's control socket. The name of the folder is `locdiff-` and random characters. The folder
//! lies in the first base folder that can be used: `$XDG_RUNTIME_DIR`, `$TMPDIR` or `/tmp`. Only the user of the
//! launcher can access it.
//!
//! The name is random because process ids are not unique: launchers in two containers may share a base folder and have
//! equal process ids. While a launcher uses its folder, it holds a kernel lock on a file in the folder. If
//! the lock is free, the launcher was killed and left the folder behind. The next launcher removes such folders.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use tempfile::TempDir;
use tokio::net::UnixListener;

use crate::error::{LaunchError, reported};

const PREFIX: &str = "locdiff-";
const LOCK: &str = "lock";
const SOCKET: &str = "control";

/// Length of the longest socket path that the kernel accepts, in bytes.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// How many times to try to create a folder in one base folder. A try fails if another launcher mistakes the new folder
/// for a stale one and removes it before this launcher has locked it.
const TRIES: usize = 3;

/// The socket that workers connect to, in a folder of its own. Dropping a `ControlSocket` removes the folder.
#[derive(Debug)]
pub(super) struct ControlSocket {
    pub(super) listener: UnixListener,
    folder: TempDir,
    _lock: Flock<File>,
}

impl ControlSocket {
    /// Creates the folder and the socket in the first base folder that can be used.
    pub(super) fn bind() -> Result<Self, LaunchError> {
        let named = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let bases = [named("XDG_RUNTIME_DIR"), named("TMPDIR"), Some("/tmp".into())];
        Self::bind_in_first(bases.into_iter().flatten())
    }

    fn bind_in_first(bases: impl IntoIterator<Item = PathBuf>) -> Result<Self, LaunchError> {
        let mut reasons = Vec::new();
        for base in bases {
            match Self::bind_in(&base) {
                Ok(socket) => return Ok(socket),
                Err(error) => {
                    tracing::debug!("cannot put the control socket in {}: {error}", base.display());
                    reasons.push(format!("{}: {error}", base.display()));
                }
            }
        }
        let reasons = reasons.join("; ");
        Err(reported!(Io, "no folder for the control socket; set XDG_RUNTIME_DIR or TMPDIR ({reasons})"))
    }

    fn bind_in(base: &Path) -> io::Result<Self> {
        // An absolute path stays valid even if a worker runs in another working directory.
        let base = std::path::absolute(base)?;
        remove_stale_folders(&base);
        for _ in 0..TRIES {
            let folder =
                tempfile::Builder::new().prefix(PREFIX).permissions(Permissions::from_mode(0o700)).tempdir_in(&base)?;
            let Some(lock) = lock(folder.path())? else { continue };
            let path = folder.path().join(SOCKET);
            if path.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
                return Err(io::Error::other(format!(
                    "the path of a socket may have at most {SOCKET_PATH_BYTES_MAX} bytes"
                )));
            }
            return Ok(Self { listener: UnixListener::bind(&path)?, folder, _lock: lock });
        }
        Err(io::Error::other("other launchers removed the new folder"))
    }

    /// The folder of the socket. Workers also record their step in this folder.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn path(&self) -> PathBuf {
        self.folder.path().join(SOCKET)
    }
}

/// Creates and locks the lock file of a new folder. Returns `None` if another launcher mistakes the folder for a stale
/// one, and locks or removes it first.
fn lock(folder: &Path) -> io::Result<Option<Flock<File>>> {
    let path = folder.join(LOCK);
    let file = match OpenOptions::new().write(true).create_new(true).open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(held) => Ok(path.exists().then_some(held)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(errno.into()),
    }
}

/// Removes the folders that killed launchers of this user have left in `base`. Ignores errors, because a folder that
/// stays does no harm.
fn remove_stale_folders(base: &Path) {
    let user = nix::unistd::getuid().as_raw();
    let entries = std::fs::read_dir(base).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes())) {
        // `DirEntry::metadata` does not follow symbolic links, so `is_dir` is false for a link to a folder.
        let is_own = entry.metadata().is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == user);
        let file = OpenOptions::new().write(true).open(entry.path().join(LOCK));
        let (true, Ok(file)) = (is_own, file) else { continue };
        if let Ok(_held) = Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            tracing::debug!("removing {}, which a killed launcher left behind", entry.path().display());
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folders(base: &Path) -> usize {
        std::fs::read_dir(base).expect("the base folder can be read").count()
    }

    fn bind(bases: &[&Path]) -> Result<ControlSocket, LaunchError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().expect("a runtime starts");
        let _within = runtime.enter();
        ControlSocket::bind_in_first(bases.iter().map(|base| (*base).to_owned()))
    }

    #[test]
    fn unusable_bases_are_skipped_and_all_reasons_are_given() {
        let base = tempfile::tempdir().expect("a temporary folder can be created");
        let long = base.path().join("x".repeat(100));
        std::fs::create_dir(&long).expect("the folder is writable");
        let socket =
            bind(&[Path::new("/nowhere"), Path::new("/proc"), &long, base.path()]).expect("the last base works");
        assert_eq!(socket.path().parent().and_then(Path::parent), Some(base.path()));
        let mode = std::fs::metadata(socket.folder.path()).expect("the folder exists").mode();
        assert_eq!(mode & 0o777, 0o700, "others can access the folder");
        assert_eq!(folders(&long), 0, "the unusable base was not cleaned up");
        drop(socket);
        assert_eq!(folders(base.path()), 1, "the folder of the socket was not removed");
        let error = bind(&[Path::new("/nowhere"), &long]).expect_err("no base works").to_string();
        assert!(error.contains("/nowhere: ") && error.contains("at most 107 bytes"), "{error}");
    }

    #[test]
    fn stale_folders_are_removed_and_live_or_foreign_ones_kept() {
        let base = tempfile::tempdir().expect("a temporary folder can be created");
        let make = |name: &str, lock: bool| {
            let folder = base.path().join(name);
            std::fs::create_dir(&folder).expect("the folder is writable");
            if lock {
                std::fs::write(folder.join(LOCK), "").expect("the folder is writable");
            }
            folder
        };
        let stale = make("locdiff-aaaaaa", true);
        let kept = [make("locdiff-bbbbbb", false), make("other", true)];
        let live = bind(&[base.path()]).expect("the base can be used");
        let second = bind(&[base.path()]).expect("two launchers do not collide");
        assert!(!stale.exists(), "the stale folder was not removed");
        assert!(kept.iter().all(|folder| folder.exists()), "a folder that does not belong to a launcher was removed");
        assert!(live.path().exists() && second.path().exists(), "the folder of a live launcher was removed");
    }
}
