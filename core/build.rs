//! Sets `LOCDIFF_REVISION` to the git revision, or to "unknown" outside a checkout.

use std::path::Path;
use std::process::Command;

fn main() {
    let revision = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=LOCDIFF_REVISION={revision}");
    println!("cargo::rerun-if-changed=build.rs");
    // `HEAD` changes when another branch is checked out, and `logs/HEAD` changes on every commit. `--git-path` also
    // finds these files in a worktree.
    for name in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--git-path", name]).filter(|path| Path::new(path).exists()) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
