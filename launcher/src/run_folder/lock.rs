//! The lock of a run: a kernel lock (`flock`) on the file `lock` in the run's folder. The kernel releases the lock when
//! the process ends, even if the process was killed.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::Path;

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::error::{LaunchError, reported};

/// Name of the lock file.
const LOCK: &str = "lock";

/// The lock of a run, or of the folder `eval` of a run. Dropping a `RunLock` releases the lock.
#[derive(Debug)]
pub struct RunLock {
    _held: Flock<File>,
}

impl RunLock {
    /// Takes the lock, or returns `None` if another launcher holds it.
    pub fn try_take(run: &Path) -> Result<Option<Self>, LaunchError> {
        match Self::take(run) {
            Err(error) if error.exit_code() == ExitCode::RunHeld => Ok(None),
            taken => taken.map(Some),
        }
    }

    /// Takes the lock. If another launcher holds the lock, the error names that launcher.
    pub fn take(run: &Path) -> Result<Self, LaunchError> {
        let path = run.join(LOCK);
        let io = LaunchError::at(&path);
        // Do not truncate the file before this process has the lock, because the file names the holder.
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(&io)?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(mut held) => {
                write_holder(&mut held).map_err(io)?;
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
                    "{} is held by another launcher ({holder}); wait until it ends, or use another run with \
                     `--run NAME`",
                    run.display()
                ))
            }
            Err((_, errno)) => Err(io(errno.into())),
        }
    }
}

fn write_holder(file: &mut File) -> std::io::Result<()> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "pid {} on {}", std::process::id(), host.trim())?;
    file.flush()
}
