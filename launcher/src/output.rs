//! Where words go: results to stdout, everything else to stderr; with `--json`, stdout has one JSON object and nothing else.

use std::io::{self, Write};

use locdiff_core::exit_code::ExitCode;
use serde::Serialize;
use serde_json::Value;

use crate::progress::suspended;

/// How this command speaks.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    /// `--json` was given.
    pub json: bool,
}

impl Output {
    /// Says something to people.
    pub fn people(self, text: &str) {
        if self.json { write(io::stderr(), text) } else { write(io::stdout(), text) }
    }

    /// The result for programs.
    pub fn result(self, value: &Value) {
        if self.json {
            write(io::stdout(), &value.to_string());
        }
    }

    /// The last word of a command that failed.
    pub fn error(self, text: &str) {
        write(io::stderr(), &format!("error: {text}"));
    }
}

/// A result for programs, which is a struct, with `ok` beside its fields.
pub fn ok(result: &impl Serialize) -> anyhow::Result<Value> {
    let mut value = serde_json::to_value(result)?;
    value["ok"] = Value::Bool(true);
    Ok(value)
}

/// A reader that has gone away (`| head`) is no error of ours. Anything else is: a result that was not written must not
/// look like one.
fn write(mut stream: impl Write, text: &str) {
    let newline = if text.ends_with('\n') { "" } else { "\n" };
    let written = suspended(|| write!(stream, "{text}{newline}").and_then(|()| stream.flush()));
    if let Err(error) = written
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        let _ = writeln!(io::stderr(), "error: cannot write the result: {error}");
        std::process::exit(ExitCode::Io.code().into());
    }
}
