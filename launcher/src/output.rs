//! Output of commands. Text goes to stdout, and errors go to stderr. With `--json`, text and errors both go to stderr,
//! and stdout gets one JSON object.

use std::io::{self, Write};

use locdiff_core::exit_code::ExitCode;
use serde::Serialize;
use serde_json::Value;

use crate::progress::with_bar_hidden;

/// The destination of a command's text and result.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    /// Whether `--json` was given.
    pub json: bool,
}

impl Output {
    /// Prints text for people: to stderr with `--json`, else to stdout.
    pub fn print(self, text: &str) {
        if self.json { write(io::stderr(), text) } else { write(io::stdout(), text) }
    }

    /// Prints the result as JSON, if `--json` was given.
    pub fn result(self, value: &Value) {
        if self.json {
            write(io::stdout(), &value.to_string());
        }
    }

    /// Prints the error of a failed command to stderr.
    pub fn error(self, text: &str) {
        write(io::stderr(), &format!("error: {text}"));
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

/// Writes `text` and, if it is missing, a newline. A closed pipe (`| head`) is not an error. Any other write error ends
/// the process with the exit code `Io`, so that a command whose result was lost does not look successful.
fn write(mut stream: impl Write, text: &str) {
    let newline = if text.ends_with('\n') { "" } else { "\n" };
    let written = with_bar_hidden(|| write!(stream, "{text}{newline}").and_then(|()| stream.flush()));
    if let Err(error) = written
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        let _ = writeln!(io::stderr(), "error: cannot write the output: {error}");
        std::process::exit(ExitCode::Io.code().into());
    }
}
