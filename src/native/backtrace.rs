//! Prints a backtrace of the main thread on request, so that a report can tell where a stuck worker hangs.

use std::backtrace::Backtrace;
use std::ffi::c_int;
use std::io::Write as _;

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// The signal that requests a backtrace.
pub const BACKTRACE_SIGNAL: Signal = Signal::SIGUSR2;

/// Largest number of frames to print.
const FRAMES_MAX: usize = 24;

/// Installs a handler for [`BACKTRACE_SIGNAL`], which prints a backtrace to stderr. The kernel prefers the main thread
/// for signals to the process.
pub fn print_on_request() -> nix::Result<()> {
    let action = SigAction::new(SigHandler::Handler(print), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler allocates memory and takes locks, which is not async-signal-safe: it may deadlock, but it
    // cannot corrupt memory, because malloc and stderr are guarded by locks. The launcher requests a backtrace only from
    // a worker that is stuck and that it kills half a second later.
    unsafe { sigaction(BACKTRACE_SIGNAL, &action) }.map(drop)
}

extern "C" fn print(_: c_int) {
    let text = Backtrace::force_capture().to_string();
    // Lines with file names begin with "at" and would double the length.
    let frames: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.starts_with("at ")).collect();
    // The first frames belong to this handler. A program without symbols does not show where they end.
    let first = frames.iter().position(|line| line.contains("restore_rt")).map_or(0, |index| index + 1);
    let text: String = frames[first..].iter().take(FRAMES_MAX).map(|line| format!("  {line}\n")).collect();
    let _ = std::io::stderr().write_all(format!("stuck at:\n{text}").as_bytes());
}
