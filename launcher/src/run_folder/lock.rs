//! The lock of a run is on the file `lock` in its folder. The lock of a checkpoint that is being evaluated is on its
//! manifest. Both are kernel locks (`flock`), which the kernel releases when the process ends, even if the process was
//! killed.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::protocol::CHECKPOINT_MANIFEST;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::status::host;
use crate::error::{LaunchError, reported};

/// Name of the lock file.
const LOCK: &str = "lock";

/// Text in the lock file that marks its holder as an evaluation.
const EVALUATION: &str = ", for an evaluation";

/// How long to wait for an evaluation that holds the lock of a run.
const EVALUATION_TIMEOUT: Duration = Duration::from_secs(10);

/// The lock of a run, or of the folder `eval` of a run. Dropping a `RunLock` releases the lock.
#[derive(Debug)]
pub struct RunLock {
    _held: Flock<File>,
}

impl RunLock {
    /// Takes the lock for an evaluation. The evaluation holds the lock only during a short write. Returns `None` if
    /// another launcher holds the lock.
    pub fn try_take_for_evaluation(run: &Path) -> Result<Option<Self>, LaunchError> {
        match Self::try_take(run, EVALUATION) {
            Err(error) if error.exit_code() == ExitCode::RunHeld => Ok(None),
            taken => taken.map(Some),
        }
    }

    /// Takes the lock. If another process holds the lock, fails with an error that names the holder. If the holder is
    /// an evaluation, first waits up to 10 s, because an evaluation holds the lock only for a moment.
    pub fn take(run: &Path) -> Result<Self, LaunchError> {
        let began = Instant::now();
        loop {
            match Self::try_take(run, "") {
                Err(error)
                    if error.exit_code() == ExitCode::RunHeld
                        && error.to_string().contains(EVALUATION)
                        && began.elapsed() < EVALUATION_TIMEOUT =>
                {
                    std::thread::sleep(Duration::from_millis(20));
                }
                taken => return taken,
            }
        }
    }

    fn try_take(run: &Path, purpose: &str) -> Result<Self, LaunchError> {
        let path = run.join(LOCK);
        let io = LaunchError::at(&path);
        // Do not truncate the file before this process has the lock, because the file names the holder.
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(&io)?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(mut held) => {
                write_holder(&mut held, purpose).map_err(io)?;
                Ok(Self { _held: held })
            }
            Err((mut file, Errno::EWOULDBLOCK)) => {
                let mut holder = String::new();
                let _ = file.read_to_string(&mut holder);
                let holder = match holder.trim() {
                    "" => "its process id is not written yet".to_owned(),
                    known => known.to_owned(),
                };
                Err(reported!(
                    RunHeld,
                    "{} is held by another launcher ({holder}); wait until it ends, or train another run with \
                     `--run NAME` or `train --new`",
                    run.display()
                ))
            }
            Err((_, errno)) => Err(io(errno.into())),
        }
    }
}

fn write_holder(file: &mut File, purpose: &str) -> std::io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "pid {} on {}{purpose}", std::process::id(), host())?;
    file.flush()
}

/// A checkpoint that this process reads. While a `CheckpointUse` lives, the launcher that trains the run does not
/// remove the checkpoint. A `CheckpointUse` is a kernel lock on the checkpoint's manifest, so it also works between
/// processes and machines.
#[derive(Debug)]
pub struct CheckpointUse {
    /// `None` if the manifest cannot be opened or the file system has no locks.
    _held: Option<Flock<File>>,
}

impl CheckpointUse {
    /// Protects the checkpoint in `folder` from being removed. Returns `None` if the checkpoint is being removed or was
    /// removed.
    pub fn share(folder: &Path) -> Option<Self> {
        let used = Self::lock(folder, FlockArg::LockSharedNonblock)?;
        // The checkpoint may have been removed before it was locked.
        folder.join(CHECKPOINT_MANIFEST).exists().then_some(used)
    }

    /// Locks a checkpoint in order to remove it. Returns `None` if another process is reading the checkpoint.
    pub(super) fn claim(folder: &Path) -> Option<Self> {
        Self::lock(folder, FlockArg::LockExclusiveNonblock)
    }

    fn lock(folder: &Path, mode: FlockArg) -> Option<Self> {
        let path = folder.join(CHECKPOINT_MANIFEST);
        // On NFS, only a file that is open for writing can be locked exclusively.
        let opened = OpenOptions::new().read(true).write(true).open(&path).or_else(|_| File::open(&path));
        let Ok(file) = opened else { return Some(Self { _held: None }) };
        match Flock::lock(file, mode) {
            Ok(held) => Some(Self { _held: Some(held) }),
            Err((_, Errno::EWOULDBLOCK)) => None,
            Err(_) => Some(Self { _held: None }),
        }
    }
}
