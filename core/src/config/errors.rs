//! Configuration errors, collected and reported together.

use std::fmt;
use std::ops::{Bound, RangeBounds};

use toml::Value;

/// One error in a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// Dotted name of the field. If the error is not about a field: the name of the file or preset, or the argument of
    /// `--set`.
    pub key: String,
    /// Where the value came from, such as `configs/l47.toml:3`, `--set` or `--gpus`. Empty if the error is about a
    /// whole file or preset.
    pub origin: String,
    /// What is wrong, usually with the value found and the values accepted.
    pub message: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.origin.is_empty() {
            write!(out, "{}: {}", self.key, self.message)
        } else {
            write!(out, "{}: {} (from {})", self.key, self.message, self.origin)
        }
    }
}

/// All errors of a configuration. Unreadable files, invalid `--set` arguments, and unknown or mistyped fields come
/// first. Values that are out of range or contradict each other come last.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", lines(.0))]
pub struct ConfigErrors(pub Vec<ConfigError>);

fn lines(errors: &[ConfigError]) -> String {
    match errors {
        [only] => format!("configuration: {only}"),
        many => {
            let list: String = many.iter().map(|error| format!("\n  {error}")).collect();
            format!("configuration: {} errors:{list}", many.len())
        }
    }
}

/// Says in plain words why `value` does not have the type of a field. `default` is the field's default, and `reason` is
/// the parser's message.
pub(super) fn wanted(default: Option<&Value>, value: &Value, reason: &str) -> String {
    if reason.contains("wanted") {
        return if reason.starts_with("got") { reason.to_owned() } else { format!("got {value}, {reason}") };
    }
    let wanted = match default {
        Some(Value::Integer(_)) => match value {
            Value::Integer(number) if *number < 0 => "a whole number, 0 or above",
            Value::Integer(_) => "a smaller whole number",
            _ => "a whole number",
        },
        Some(Value::Float(_)) => "a number",
        Some(Value::Boolean(_)) => "true or false",
        Some(Value::Array(_)) => "a list of numbers, such as [1, 25, 200]",
        // The parser lists the names that the field accepts, each in backquotes.
        Some(Value::String(_)) if reason.contains("expected") && reason.contains("variant") => {
            let names = reason.split_once("expected").map_or("", |(_, names)| names);
            let quoted: Vec<String> = names.split('`').skip(1).step_by(2).map(|name| format!("\"{name}\"")).collect();
            return format!("got {value}, wanted {}", either(&quoted));
        }
        _ => "text in quotes",
    };
    format!("got {value}, wanted {wanted}")
}

/// Joins alternatives: "a", "b" or "c".
fn either(names: &[String]) -> String {
    match names {
        [] => "another value".to_owned(),
        [only] => only.clone(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

/// Collects the errors that the checks of the sections find.
#[derive(Debug, Default)]
pub(super) struct Checker {
    pub(super) found: Vec<(String, String)>,
}

impl Checker {
    pub(super) fn push(&mut self, key: &str, message: impl Into<String>) {
        self.found.push((key.to_owned(), message.into()));
    }

    /// Records an error unless `value` is in `range`. NaN is in no range.
    pub(super) fn within<T>(&mut self, key: &str, value: T, range: impl RangeBounds<T>)
    where
        T: PartialOrd + fmt::Display,
    {
        if range.contains(&value) {
            return;
        }
        let wanted = match (range.start_bound(), range.end_bound()) {
            (Bound::Included(low), Bound::Included(high)) => format!("{low} to {high}"),
            (Bound::Included(low), Bound::Excluded(high)) => format!("at least {low} and below {high}"),
            (Bound::Included(low), Bound::Unbounded) => format!("{low} or above"),
            _ => unreachable!("all ranges include their first value"),
        };
        self.push(key, format!("is {value}, wanted {wanted}"));
    }

    /// Records an error unless `value` is finite and above zero.
    pub(super) fn positive(&mut self, key: &str, value: f64) {
        if !(value.is_finite() && value > 0.0) {
            self.push(key, format!("is {value}, wanted a finite number above 0"));
        }
    }

    /// Records an error unless `value` is finite and at least zero.
    pub(super) fn not_negative(&mut self, key: &str, value: f64) {
        if !(value.is_finite() && value >= 0.0) {
            self.push(key, format!("is {value}, wanted a finite number, 0 or above"));
        }
    }
}
