//! Writes to stderr and stdout, each in a thread of its own. So the launcher continues even if a terminal stops reading
//! (Ctrl-S), a pipe is full, or a terminal closes.
//!
//! - Log lines and progress go to stderr. If stderr is stuck and its queue is full, further lines are dropped and
//!   counted. Errors of writes to stderr are ignored, because a run must not end when its terminal closes.
//! - Results go to stdout. They are never dropped, and [`wait_for_stdout`] returns the first write error.
//!
//! The thread that writes to stderr also draws the progress bar, and hides the bar while it writes lines. So bar and
//! lines never mix.
//!
//! [`width`], [`wrapped`] and [`table`] fit text and tables into the width of the terminal.

mod backlog;
mod layout;
mod log_lines;
mod progress;
mod streams;

pub use backlog::{Backlog, NextItem};
pub use layout::{TableColumn, table, width, wrapped};
pub use log_lines::{LogFormat, log_line, not_repeated, split_line};
pub use progress::Display;
pub use streams::{LogWriter, flush_stderr, wait_for_stdout, write_stderr, write_stdout};
