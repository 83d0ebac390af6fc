//! The result of a check of `doctor`.

use serde::{Deserialize, Serialize};

/// How serious a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Level {
    Ok,
    Warning,
    Error,
}

/// Result of a check: its level, and the text to print.
pub(super) type Finding = (Level, String);
