//! Names of runs, checkpoint folders and files.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use chrono::{DateTime, Utc};
use locdiff_core::protocol::{partial_name, step_name};

/// Name of the file with the run's resolved configuration.
pub const CONFIG: &str = "config.toml";

/// Name of the file that holds the name of the newest checkpoint.
pub const LATEST: &str = "latest";

/// Suffix of the folder names of damaged checkpoints that were set aside.
pub(super) const CORRUPT: &str = ".corrupt";

/// Suffix of the folder names of checkpoints that an earlier attempt committed after the next one had begun.
pub(super) const STALE: &str = ".stale";

/// Prefix of the folder names of checkpoints that are being removed.
pub(super) const REMOVING: &str = ".removing-";

/// The name of a new run: `<preset>-<UTC time>`, such as `l47-20261115-084500`.
pub fn new_run_name(preset: &str, now: SystemTime) -> String {
    format!("{preset}-{}", utc(unix_s(now)).format("%Y%m%d-%H%M%S"))
}

/// Formats a time in UTC, such as `2026-11-15 08:45:00`.
pub fn utc_text(unix_s: u64) -> String {
    utc(unix_s).format("%Y-%m-%d %H:%M:%S").to_string()
}

/// Seconds since 1970, or 0 for a time before 1970.
pub(super) fn unix_s(now: SystemTime) -> u64 {
    now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Converts seconds since 1970 to a date. Returns the beginning of 1970 if the date is out of range.
fn utc(unix_s: u64) -> DateTime<Utc> {
    i64::try_from(unix_s).ok().and_then(|seconds| DateTime::from_timestamp(seconds, 0)).unwrap_or_default()
}

/// The step in the folder name of a checkpoint. `None` if the name does not have the form of [`step_name`].
pub(super) fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (step_name(step) == name).then_some(step)
}

/// The attempt in the name of a folder with parts ([`partial_name`]).
pub(super) fn attempt_of(name: &str) -> Option<u32> {
    let (step, rest) = name.strip_prefix('.')?.split_once('.')?;
    let attempt = rest.strip_prefix("attempt-")?.strip_suffix(".partial")?.parse().ok()?;
    (partial_name(step_of(step)?, attempt) == name).then_some(attempt)
}

/// The step in the name of a damaged checkpoint that was set aside, `step-NNNNNNNN.corrupt` or
/// `step-NNNNNNNN.corrupt.N`. `None` for any other name.
pub(super) fn set_aside_step_of(name: &str) -> Option<u64> {
    let (step, rest) = name.split_once(CORRUPT)?;
    let numbered = rest.is_empty() || rest.strip_prefix('.').is_some_and(|number| number.parse::<u32>().is_ok());
    step_of(step).filter(|_| numbered)
}

/// Whether a file name is not empty, has no path separators, and is not hidden.
pub(super) fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

/// The first of the paths `name`, `name.1`, `name.2`, ... in `folder` that does not exist.
pub(super) fn free_name(folder: &Path, name: &str) -> PathBuf {
    let numbered = (1_u32..).map(|number| folder.join(format!("{name}.{number}")));
    let mut candidates = std::iter::once(folder.join(name)).chain(numbered);
    candidates.find(|path| path.symlink_metadata().is_err()).expect("one of four billion names is free")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn runs_are_named_by_preset_and_utc_time() {
        let at = |seconds| new_run_name("l47", UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "l47-19700101-000000");
        assert_eq!(at(951_782_399), "l47-20000228-235959");
        assert_eq!(at(951_782_400), "l47-20000229-000000");
        assert_eq!(at(1_794_732_300), "l47-20261115-084500");
        assert_eq!(at(4_107_542_399), "l47-21000228-235959");
        assert_eq!(utc_text(4_107_542_400), "2100-03-01 00:00:00");
    }

    #[test]
    fn only_canonical_names_are_checkpoints() {
        assert_eq!(step_of("step-00000012"), Some(12));
        assert_eq!(step_of("step-123456789"), Some(123_456_789));
        for other in ["step-12", "step-000000012", "step-00000012.corrupt", ".step-00000012", "step-+0000012", "latest"]
        {
            assert_eq!(step_of(other), None, "{other}");
        }
        assert_eq!(set_aside_step_of("step-00000012.corrupt"), Some(12));
        assert_eq!(set_aside_step_of("step-00000012.corrupt.3"), Some(12));
        assert_eq!(set_aside_step_of("step-00000012.corrupted"), None);
        assert_eq!(set_aside_step_of("step-00000012"), None);
        for name in ["", ".", "..", "../x", "a/b", ".hidden", "a\0"] {
            assert!(!is_plain(name), "{name:?}");
        }
        assert!(is_plain("weights-00-of-01.safetensors"));
    }
}
