//! Every exit code of `locdiff-launch` and `locdiff-worker`. Scripts rely on them: a number, once given, keeps its meaning.

macro_rules! exit_codes {
    ($($(#[$meaning:meta])* $name:ident = $code:literal,)*) => {
        /// What a process says when it ends.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        pub enum ExitCode {
            $($(#[$meaning])* $name = $code,)*
        }

        impl ExitCode {
            /// All codes, in order, for the documentation and for reading a worker's status back.
            pub const ALL: &[Self] = &[$(Self::$name,)*];
        }
    };
}

exit_codes! {
    /// All went well.
    Success = 0,
    /// A bug, or an error that no other code describes.
    Internal = 1,
    /// The command line could not be understood (clap's own code).
    Usage = 2,
    /// The configuration is wrong: malformed TOML, an unknown or mistyped field, a value out of range.
    Config = 10,
    /// The machine lacks the devices that were asked for.
    Device = 11,
    /// `locdiff-worker` is not beside the launcher, or cannot be executed.
    WorkerMissing = 12,
    /// `locdiff-worker` starts but does not fit: wrong libtorch, a library that does not load, another protocol or build.
    WorkerIncompatible = 13,
    /// A worker failed or died while it ran.
    WorkerFailed = 14,
    /// Workers did not report in time.
    Timeout = 15,
    /// A file or folder could not be read or written.
    Io = 16,
    /// What would be written exists already and `--overwrite` was not given.
    Exists = 17,
    /// `doctor` found that training could not start.
    NotReady = 18,
    /// The verb or option has its place on the command line, but this version does not do it yet.
    NotYet = 19,
    /// The data is whole but not what was wanted: wrong width, missing column, a coordinate or number out of range.
    BadData = 20,
    /// There is no data where the command looked: an empty folder, a manifest that lists a missing file.
    NoData = 21,
    /// Data or weights are damaged: a checksum that differs, a file cut short.
    Corrupt = 22,
    /// The data is not that of the run that would be resumed.
    DataChanged = 23,
    /// Another launcher holds the run.
    RunHeld = 24,
    /// The run was made with a configuration whose model, data order or bits are others.
    RunDiffers = 25,
    /// Training came to numbers that are not finite, and would again.
    Diverged = 26,
    /// Ended by Ctrl-C or SIGTERM.
    Interrupted = 130,
}

impl ExitCode {
    /// The number that the process exits with.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The code that a process exited with, if it is one of ours.
    pub fn from_code(code: i32) -> Option<Self> {
        Self::ALL.iter().copied().find(|known| i32::from(known.code()) == code)
    }
}

/// An expected failure, which knows the code that the whole command should end with.
pub trait HasExitCode: std::error::Error {
    /// The documented exit code.
    fn exit_code(&self) -> ExitCode;

    /// Whether it tells of somebody else's failure: a peer that died, stopped or never came.
    fn is_of_peer(&self) -> bool {
        false
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
    fn every_code_is_distinct_and_reads_back() {
        for code in ExitCode::ALL {
            assert_eq!(ExitCode::from_code(i32::from(code.code())), Some(*code));
        }
        assert_eq!(ExitCode::from_code(77), None);
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
