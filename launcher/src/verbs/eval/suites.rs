//! `eval --suite`: the paper's experiments. The suites `main` and `generative` are evaluations with published rows, and
//! the module `evaluation` runs them.
//!
//! - `generalizability`: evaluates a run with its gallery and with even grids.
//! - `of_runs`: evaluates several runs, for the suites `losses` and `degree`.
//! - `time`: times sampling and retrieval.
//! - `gallery_bias`: counts the gallery points near test places.
//! - `perturbation`: measures the drift of noisy codes.

mod gallery_bias;
mod generalizability;
mod of_runs;
mod perturbation;
mod time;

use serde_json::Value;

use crate::cli::{EvalRequest, Global, Suite};
use crate::error::{LaunchError, refuse};
use crate::output::Output;

/// Fails if the command line has a flag that the suite does not use.
pub(super) fn refuse_ignored(suite: Suite, request: &EvalRequest, global: &Global) -> Result<(), LaunchError> {
    let (uses, what): (&[&str], _) = match suite {
        Suite::Main | Suite::Generative => (&["--run", "--hybrid", "--tune", "--exclude-km"], "evaluates one run"),
        Suite::Generalizability => {
            (&["--run", "--exclude-km", "--grids"], "evaluates one run, always with retrieval and without LocDiff-H")
        }
        Suite::Losses | Suite::Degree => (&["--runs"], "evaluates LocDiff in the runs that --runs names"),
        Suite::Time => (&["--run"], "times random images"),
        Suite::GalleryBias => (&["--run"], "counts all gallery points"),
        Suite::Perturbation => (&[], "evaluates no run"),
    };
    let given = [
        ("--run", global.run.is_some()),
        ("--hybrid", request.hybrid),
        ("--tune", request.tune),
        ("--exclude-km", request.exclude_km.is_some()),
        ("--runs", !request.runs.is_empty()),
        ("--grids", !request.grids.is_empty()),
    ];
    let ignored: Vec<&str> = given
        .into_iter()
        .filter_map(|(flag, is_given)| Some(flag).filter(|flag| is_given && !uses.contains(flag)))
        .collect();
    if !ignored.is_empty() {
        refuse!(Usage, "eval --suite {} {what}; leave out {}", suite.name(), ignored.join(" and "));
    }
    Ok(())
}

/// Runs a suite that needs more than one evaluation of a run, or none. `None`: the suite is one evaluation.
pub(super) fn run(
    suite: Suite,
    request: &EvalRequest,
    global: &Global,
    output: Output,
) -> Option<anyhow::Result<Value>> {
    Some(match suite {
        Suite::Main | Suite::Generative => return None,
        Suite::Generalizability => generalizability::run(request, global, output),
        Suite::GalleryBias => gallery_bias::run(global, output),
        Suite::Perturbation => perturbation::run(global, output),
        Suite::Losses | Suite::Degree => of_runs::run(suite, &request.runs, global, output),
        Suite::Time => time::run(global, output),
    })
}
