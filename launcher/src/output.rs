//! Output of commands. Text goes to stdout, and errors go to stderr. With `--json`, text and errors both go to stderr,
//! and stdout gets one JSON object.
//!
//! While a command runs, it does not wait until its output is written. At the end of the command, [`finish`] waits
//! until stdout is written.

use std::sync::OnceLock;
use std::time::Duration;

use locdiff_core::exit_code::ExitCode;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use crate::error::exit_code_of;
use crate::terminal::{flush_stderr, wait_for_stdout, write_stderr, write_stdout};

/// How long a command waits at its end for its text to be written. After this time, the command gives up on stderr. It
/// waits on for stdout until the text is written or a signal arrives, unless a signal has already stopped the command.
const LAST_WORDS_LIMIT: Duration = Duration::from_secs(1);

/// Time between checks of whether all text has been written to stdout.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The output of this process, stored so that [`end_process`] can use it.
static OF_PROCESS: OnceLock<Output> = OnceLock::new();

/// The destination of a command's text and result.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    /// Whether `--json` was given.
    pub json: bool,
}

impl Output {
    /// The output of this process. [`end_process`] uses the same output.
    pub fn of_process(json: bool) -> Self {
        *OF_PROCESS.get_or_init(|| Self { json })
    }

    /// Prints text for people: to stderr with `--json`, else to stdout.
    pub fn print(self, text: &str) {
        if self.json { write_stderr(line(text)) } else { write_stdout(line(text)) }
    }

    /// Prints the result as JSON, if `--json` was given.
    pub fn result(self, value: &Value) {
        if self.json {
            write_stdout(line(&value.to_string()));
        }
    }

    /// Prints the error of a failed command. With `--json`, also prints the error as the JSON result, except for the
    /// code `NotReady`: in this case `doctor` has already printed its JSON result.
    pub fn fail(self, code: ExitCode, text: &str) {
        write_stderr(line(&format!("error: {text}")));
        if code != ExitCode::NotReady {
            self.result(&json!({ "ok": false, "exit_code": code.code(), "error": text }));
        }
    }
}

/// A result with `"ok": true` as its first field.
#[derive(Serialize)]
struct Successful<'a, T> {
    ok: bool,
    #[serde(flatten)]
    result: &'a T,
}

/// Converts a struct to the JSON result of a verb, with `"ok": true` as the first field.
pub fn ok(result: &impl Serialize) -> anyhow::Result<Value> {
    Ok(serde_json::to_value(Successful { ok: true, result })?)
}

/// Waits until the whole result is written to stdout, and returns the exit code of the command. If nobody reads stdout,
/// waits until somebody does or a signal arrives. If `code` says that a signal has already stopped the command, waits
/// for a second at most. The exit code is `Interrupted` if a signal ended the wait, `Io` after a write error, and
/// otherwise `code`.
pub fn finish(code: ExitCode) -> ExitCode {
    let written = match wait_for_stdout(LAST_WORDS_LIMIT) {
        // A signal has stopped the command, so the user or the scheduler does not want to wait any longer.
        Ok(false) if matches!(code, ExitCode::Interrupted | ExitCode::Preempted) => Ok(true),
        Ok(false) => wait_for_reader_or_signal(),
        written => written,
    };
    let code = match written {
        Ok(true) => code,
        Ok(false) => ExitCode::Interrupted,
        Err(error) => {
            write_stderr(line(&format!("error: cannot write the output: {error}")));
            ExitCode::Io
        }
    };
    flush_stderr(LAST_WORDS_LIMIT);
    code
}

/// Prints the error of a command and ends the process. Does not wait for other threads, because one of them may be
/// stuck.
pub fn end_process(error: &anyhow::Error) -> ! {
    let code = exit_code_of(error);
    OF_PROCESS.get().unwrap_or(&Output { json: false }).fail(code, &format!("{error:#}"));
    std::process::exit(finish(code).code().into());
}

/// Waits until all text is written to stdout. Returns false if a signal arrives first.
fn wait_for_reader_or_signal() -> std::io::Result<bool> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut interrupts, mut terminations) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        loop {
            tokio::select! {
                _ = interrupts.recv() => return Ok(false),
                _ = terminations.recv() => return Ok(false),
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
            if wait_for_stdout(Duration::ZERO)? {
                return Ok(true);
            }
        }
    })
}

/// Adds a newline if `text` does not end with one.
fn line(text: &str) -> String {
    if text.ends_with('\n') { text.to_owned() } else { format!("{text}\n") }
}
