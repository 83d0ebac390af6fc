//! The streams stderr and stdout, each written by a thread of its own. So a terminal that stops reading (Ctrl-S, a full
//! pipe) or closes never stops the launcher.
//!
//! - Log lines and progress go to stderr. While stderr is stuck, they are dropped and counted. Write errors of stderr
//!   are ignored: a run does not end because nobody watches it.
//! - Results go to stdout. They are never dropped, and [`wait_for_stdout`] returns the first write error.
//!
//! The thread of stderr also draws the progress bar, and hides it while it writes lines. So they never mix.

mod backlog;
mod progress;
mod streams;

pub use backlog::{Backlog, NextItem};
pub use progress::Display;
pub use streams::{LogWriter, flush_stderr, wait_for_stdout, write_stderr, write_stdout};
