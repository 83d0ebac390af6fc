//! The exit codes of `locdiff-launch` and `locdiff-worker`, and the kinds of failure. Scripts rely on the codes: never
//! change the meaning of a number.

use std::fmt;
use std::io::{self, ErrorKind};

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

macro_rules! exit_codes {
    ($($(#[$meaning:meta])* $name:ident = $code:literal,)*) => {
        /// Exit code of a process.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        pub enum ExitCode {
            $($(#[$meaning])* $name = $code,)*
        }

        impl ExitCode {
            /// All codes in ascending order.
            pub const ALL: &[Self] = &[$(Self::$name,)*];
        }
    };
}

exit_codes! {
    /// Success.
    Success = 0,
    /// A bug, or an error that no other code describes.
    Internal = 1,
    /// Invalid command line (clap's exit code).
    Usage = 2,
    /// Invalid configuration: malformed TOML, an unknown or mistyped field, or a value out of range.
    Config = 10,
    /// The machine lacks a requested device.
    Device = 11,
    /// `locdiff-worker` is not in the launcher's folder, or cannot be executed.
    WorkerMissing = 12,
    /// `locdiff-worker` does not work with this launcher: it has the wrong libtorch, fails to load a library, or is
    /// from another build.
    WorkerIncompatible = 13,
    /// A worker failed or died during its job.
    WorkerFailed = 14,
    /// Workers did not connect in time.
    Timeout = 15,
    /// A file or folder could not be read or written.
    Io = 16,
    /// The output exists already, and `--overwrite` was not given.
    Exists = 17,
    /// `doctor` found a problem that prevents training.
    NotReady = 18,
    /// The command or option is not implemented in this version.
    NotYet = 19,
    /// The data is intact but unsuitable: wrong width, missing column, a coordinate or number out of range.
    BadData = 20,
    /// Something that the command needs does not exist: shards, a file that a manifest lists, a run, a checkpoint, or
    /// GeoCLIP's weights.
    NoData = 21,
    /// Damaged data or weights: a checksum mismatch or a truncated file.
    Corrupt = 22,
    /// The data differs from the data of the run to resume.
    DataChanged = 23,
    /// Another launcher is using the run.
    RunHeld = 24,
    /// The run to resume was configured with another model, data order or precision.
    RunDiffers = 25,
    /// Training diverged: too many gradients in a row were not finite. A restart would not help.
    Diverged = 26,
    /// Stopped by SIGTERM or SIGUSR1, which schedulers send before they take a machine away. The same command resumes
    /// the run.
    Preempted = 75,
    /// Stopped by Ctrl-C.
    Interrupted = 130,
}

impl ExitCode {
    /// The exit status.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The exit code with the number `code`; `None` if no exit code has this number.
    pub fn from_code(code: i32) -> Option<Self> {
        Self::ALL.iter().copied().find(|known| i32::from(known.code()) == code)
    }
}

/// An expected error, which determines the exit code of the whole command.
pub trait HasExitCode: std::error::Error {
    /// The exit code of the command.
    fn exit_code(&self) -> ExitCode;

    /// Whether the error was caused by another worker, which died, stopped or never connected.
    fn is_caused_by_peer(&self) -> bool {
        false
    }

    /// The error that this error wraps. [`HasExitCode::failure_kind`] asks the wrapped error for the kind.
    fn wrapped(&self) -> Option<&dyn HasExitCode> {
        None
    }

    /// The kind of this failure, which decides whether and how the launcher tries again.
    fn failure_kind(&self) -> FailureKind {
        match self.wrapped() {
            _ if self.is_caused_by_peer() => FailureKind::Lost,
            Some(wrapped) => wrapped.failure_kind(),
            None => FailureKind::of_code(self.exit_code()),
        }
    }
}

/// The kind of a failure, which decides whether and how the launcher tries again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureKind {
    /// A restart would fail in the same way. Examples: invalid configuration, bad or damaged data, divergence, a full
    /// disk.
    Final,
    /// A worker was killed, stopped responding, or lost its peers.
    Lost,
    /// A worker panicked, exited, crashed, or got an error from CUDA. The second failure of the same sort at the same
    /// step is final.
    Crash,
    /// Storage or network failed, perhaps only temporarily.
    Outage,
    /// The state of a replica differs from the state of the others. The second such failure of the same rank is final.
    Corruption {
        /// The rank whose state is wrong.
        rank: u32,
    },
}

/// System errors of storage or network that may be temporary.
const OUTAGES: [Errno; 7] = [
    Errno::EIO,
    Errno::ESTALE,
    Errno::ETIMEDOUT,
    Errno::EREMOTEIO,
    Errno::EHOSTUNREACH,
    Errno::ENETUNREACH,
    Errno::ECONNRESET,
];

impl FailureKind {
    /// The kind of an error, judged by its exit code alone.
    pub fn of_code(code: ExitCode) -> Self {
        match code {
            ExitCode::WorkerFailed | ExitCode::Internal => Self::Crash,
            ExitCode::Timeout => Self::Lost,
            _ => Self::Final,
        }
    }

    /// The kind of an I/O error. [`ErrorKind::TimedOut`] without an errno is an outage that the operating system does
    /// not see, such as an outage of an S3 server.
    pub fn of_io(error: &io::Error) -> Self {
        let is_outage = match error.raw_os_error() {
            Some(number) => OUTAGES.contains(&Errno::from_raw(number)),
            None => error.kind() == ErrorKind::TimedOut,
        };
        if is_outage { Self::Outage } else { Self::Final }
    }
}

impl fmt::Display for FailureKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Final => out.write_str("final"),
            Self::Lost => out.write_str("lost"),
            Self::Crash => out.write_str("crash"),
            Self::Outage => out.write_str("outage"),
            Self::Corruption { rank } => write!(out, "corruption of rank {rank}"),
        }
    }
}

impl From<ExitCode> for std::process::ExitCode {
    fn from(code: ExitCode) -> Self {
        Self::from(code.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_distinct_and_survives_a_round_trip() {
        for code in ExitCode::ALL {
            assert_eq!(ExitCode::from_code(i32::from(code.code())), Some(*code));
        }
        assert_eq!(ExitCode::from_code(77), None);
    }

    #[test]
    fn temporary_errors_of_storage_are_outages_and_a_full_disk_is_final() {
        let kind = |errno: Errno| FailureKind::of_io(&io::Error::from(errno));
        for errno in [Errno::EIO, Errno::ESTALE, Errno::ETIMEDOUT] {
            assert_eq!(kind(errno), FailureKind::Outage, "{errno}");
        }
        for errno in [Errno::ENOSPC, Errno::EDQUOT, Errno::EROFS, Errno::EACCES, Errno::ENOENT] {
            assert_eq!(kind(errno), FailureKind::Final, "{errno}");
        }
        assert_eq!(FailureKind::of_io(&io::Error::new(ErrorKind::TimedOut, "503")), FailureKind::Outage);
        assert_eq!(FailureKind::of_io(&io::Error::new(ErrorKind::PermissionDenied, "403")), FailureKind::Final);
    }

    #[test]
    fn operations_page_lists_every_code() {
        let page = include_str!("../../docs/OPERATIONS.md");
        for code in ExitCode::ALL {
            let row = format!("| {} | {code:?} |", code.code());
            assert!(page.contains(&row), "docs/OPERATIONS.md lacks {row}");
        }
        let rows =
            page.lines().filter(|line| line.split('|').nth(1).is_some_and(|cell| cell.trim().parse::<u8>().is_ok()));
        assert_eq!(rows.count(), ExitCode::ALL.len());
    }
}
