//! Output of commands: text to stdout, errors to stderr. With `--json`, text also goes to stderr, and stdout gets one
//! JSON object.

use std::io::{self, Write};

use locdiff_core::exit_code::ExitCode;
use serde::Serialize;
use serde_json::Value;

use crate::progress::with_bar_hidden;

/// Where a command writes its text and its result.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    /// `--json` was given.
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

/// Converts a struct to the JSON result and puts `"ok": true` first.
pub fn ok(result: &impl Serialize) -> anyhow::Result<Value> {
    Ok(serde_json::to_value(Successful { ok: true, result })?)
}

/// A closed pipe (`| head`) is not an error. Any other write error ends the process, so that a lost result does not
/// look like a success.
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
