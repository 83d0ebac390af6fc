//! Prints a backtrace of the main thread on request, so that a report can tell where a stuck worker hangs.

use std::backtrace::Backtrace;
use std::ffi::c_int;
use std::io::Write as _;

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// The signal that requests a backtrace.
pub const BACKTRACE_SIGNAL: Signal = Signal::SIGUSR2;

/// Largest number of frames to print.
const FRAMES_MAX: usize = 24;

/// Installs a signal handler that prints a backtrace to stderr on [`BACKTRACE_SIGNAL`]. The backtrace shows the main
/// thread, because the kernel prefers this thread when a signal is sent to the process.
pub fn print_on_request() -> nix::Result<()> {
    let action = SigAction::new(SigHandler::Handler(print), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler is not async-signal-safe, because it allocates memory and takes locks. It may deadlock, but
    // it cannot corrupt memory, because locks guard malloc and stderr. A deadlock does no harm: the launcher requests a
    // backtrace only from a worker that seems stuck, and kills this worker at most a second later.
    unsafe { sigaction(BACKTRACE_SIGNAL, &action) }.map(drop)
}

extern "C" fn print(_: c_int) {
    let text = Backtrace::force_capture().to_string();
    // Leave out the lines with file names, which begin with "at": they would double the length.
    let frames: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.starts_with("at ")).collect();
    // Skip the first frames, which belong to this handler and end with `restore_rt`. In a program without symbols, this
    // name is missing, and all frames are kept.
    let first = frames.iter().position(|line| line.contains("restore_rt")).map_or(0, |index| index + 1);
    let text: String = frames[first..].iter().take(FRAMES_MAX).map(|line| format!("  {line}\n")).collect();
    let _ = std::io::stderr().write_all(format!("stuck at:\n{text}").as_bytes());
}
