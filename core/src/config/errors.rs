//! Configuration errors, collected and reported together.

use std::fmt;

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
    pub(super) fn within<T>(&mut self, key: &str, value: T, range: impl std::ops::RangeBounds<T> + fmt::Debug)
    where
        T: PartialOrd + fmt::Display,
    {
        if !range.contains(&value) {
            self.push(key, format!("is {value}, wanted {range:?}"));
        }
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
