//! All that is wrong with a configuration, collected and said at once.

use std::fmt;

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// Dotted name of the field, or the file where no field can be named.
    pub key: String,
    /// Where the value came from: `configs/l47.toml:3`, `--set`, `--gpus`.
    pub origin: String,
    /// What is wrong, with what was got and what was wanted.
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

/// Everything that is wrong, in the order of the fields.
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

/// Collects what the sections find wrong with their values.
#[derive(Debug, Default)]
pub(super) struct Checker {
    pub(super) found: Vec<(String, String)>,
}

impl Checker {
    pub(super) fn push(&mut self, key: &str, message: impl Into<String>) {
        self.found.push((key.to_owned(), message.into()));
    }

    /// `value` must lie in `range`; NaN never does.
    pub(super) fn within<T>(&mut self, key: &str, value: T, range: impl std::ops::RangeBounds<T> + fmt::Debug)
    where
        T: PartialOrd + fmt::Display,
    {
        if !range.contains(&value) {
            self.push(key, format!("is {value}, wanted {range:?}"));
        }
    }

    /// `value` must be a finite number above zero.
    pub(super) fn positive(&mut self, key: &str, value: f64) {
        if !(value.is_finite() && value > 0.0) {
            self.push(key, format!("is {value}, wanted a finite number above 0"));
        }
    }

    /// `value` must be a finite number, zero or above.
    pub(super) fn not_negative(&mut self, key: &str, value: f64) {
        if !(value.is_finite() && value >= 0.0) {
            self.push(key, format!("is {value}, wanted a finite number, 0 or above"));
        }
    }
}
