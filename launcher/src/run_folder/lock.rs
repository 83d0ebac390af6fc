//! Who holds a run: a lock of the kernel on `RUN/lock`, which ends with the process, however it ends.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::Path;

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::error::{LaunchError, reported};

/// Name of the file.
const LOCK: &str = "lock";

/// A run, or a folder of one, that nobody else can write to as long as this lives.
#[derive(Debug)]
pub struct Hold {
    _held: Flock<File>,
}

impl Hold {
    /// Takes the lock, without looking at the configuration of the run; none where another launcher has it.
    pub fn try_take(run: &Path) -> Result<Option<Self>, LaunchError> {
        match Self::take(run) {
            Err(error) if error.exit_code() == ExitCode::RunHeld => Ok(None),
            taken => taken.map(Some),
        }
    }

    /// Takes the lock, or says who has it.
    pub fn take(run: &Path) -> Result<Self, LaunchError> {
        let path = run.join(LOCK);
        let io = LaunchError::at(&path);
        // Not emptied before it is ours: it names the holder.
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(&io)?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(mut held) => {
                sign(&mut held).map_err(io)?;
                Ok(Self { _held: held })
            }
            Err((mut file, Errno::EWOULDBLOCK)) => {
                let mut holder = String::new();
                let _ = file.read_to_string(&mut holder);
                let holder = match holder.trim() {
                    "" => "it has not said its process id yet".to_owned(),
                    known => known.to_owned(),
                };
                Err(reported!(
                    RunHeld,
                    "run {} is held by another launcher ({holder}); wait until it has ended, or name another run with `--run NAME`",
                    run.display()
                ))
            }
            Err((_, errno)) => Err(io(errno.into())),
        }
    }
}

fn sign(file: &mut File) -> std::io::Result<()> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "pid {} on {}", std::process::id(), host.trim())?;
    file.flush()
}
