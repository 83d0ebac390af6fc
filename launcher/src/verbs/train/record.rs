//! Describes a failed attempt, for `failure.json` and `events.jsonl`.

use serde_json::{Value, json};

use crate::error::{LaunchError, exit_code_of};
use crate::verbs::restarts::FailedAttempt;

/// Begins the line of an error that names the command with which the run is resumed.
pub(in crate::verbs) const RESUME_HINT: &str = "  resume with: ";

/// The root cause of a failure, in one line.
pub(super) fn first_cause(error: &anyhow::Error) -> String {
    let gang = error.downcast_ref::<LaunchError>().and_then(LaunchError::gang);
    let text = gang.map_or_else(|| format!("{error:#}"), |gang| gang.first_cause.clone());
    text.lines().next().unwrap_or_default().to_owned()
}

/// The record of a failure for `failure.json` and `events.jsonl`.
pub(super) fn failure_record(error: &anyhow::Error, restarts: u32) -> Value {
    let known = error.downcast_ref::<LaunchError>();
    let mut record = json!({
        "error": format!("{error:#}"), "exit_code": exit_code_of(error).code(), "restarts": restarts,
        "kind": FailedAttempt::new(error).kind,
    });
    if let (Some(fields), Ok(Value::Object(gang))) =
        (record.as_object_mut(), serde_json::to_value(known.and_then(LaunchError::gang)))
    {
        fields.extend(gang);
    }
    record
}

/// The command that resumes the run: `arguments` without `--inject`. If the arguments do not name the run,
/// `--run NAME` is added.
pub(super) fn resume_command(arguments: impl Iterator<Item = String>, run: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    let mut arguments = arguments.peekable();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--inject" => drop(arguments.next()),
            other if other.starts_with("--inject=") => {}
            _ => words.push(quoted(&argument)),
        }
    }
    let names_run = |word: &String| {
        let word = word.trim_start_matches('\'').trim_start_matches("--set=");
        word == "--run" || word.starts_with("--run=") || word.starts_with("checkpoint.run=")
    };
    if !words.iter().any(names_run) {
        words.splice(1.min(words.len())..1.min(words.len()), ["--run".to_owned(), quoted(run)]);
    }
    words.join(" ")
}

/// Puts a word in quotes if a shell needs the quotes.
pub(in crate::verbs) fn quoted(word: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./=:,@+".contains(letter);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_to_resume_names_the_run_and_injects_nothing() {
        let resume = |line: &str| resume_command(line.split(' ').map(str::to_owned), "demo-1");
        assert_eq!(resume("x --workers 2 train --inject kill@rank=1,step=7"), "x --run demo-1 --workers 2 train");
        assert_eq!(resume("x --run mine train --inject=kill@rank=1,step=7"), "x --run mine train");
        assert_eq!(resume("x train --set checkpoint.run=mine"), "x train --set checkpoint.run=mine");
        assert_eq!(resume("x train --set a=\"b\""), "x --run demo-1 train --set 'a=\"b\"'");
    }
}
