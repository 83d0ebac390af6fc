//! A worker's life: join the launcher, take a job, answer, end.

mod control;
mod self_check;

use locdiff_launch::exit_code::ExitCode;
use locdiff_launch::protocol::{Failure, Job, Place, ToLauncher, ToWorker};

use crate::native;
use control::Control;

/// Runs the worker that the environment describes.
pub fn run() -> ExitCode {
    let mut control = match Control::join() {
        Ok(control) => control,
        Err(error) => {
            tracing::error!("{error:#}");
            return ExitCode::Usage;
        }
    };
    match work(&mut control) {
        Ok(()) => ExitCode::Success,
        Err(error) => {
            tracing::error!("{error:#}");
            let failure = Failure { message: format!("{error:#}"), of_peer: false };
            // A launcher that has gone away cannot be told.
            let _ = control.send(&ToLauncher::Failed(failure));
            ExitCode::WorkerFailed
        }
    }
}

fn work(control: &mut Control) -> anyhow::Result<()> {
    control.greet(&native::versions()?)?;
    let ToWorker::Start { place, job } = control.receive()?;
    control.watch_launcher()?;
    let result = perform(&place, &job)?;
    Ok(control.send(&ToLauncher::Result(result))?)
}

fn perform(place: &Place, job: &Job) -> anyhow::Result<serde_json::Value> {
    let threads = i32::try_from(place.threads)?;
    tch::set_num_threads(threads);
    match job {
        Job::Probe => Ok(serde_json::json!({})),
        Job::SelfCheck => Ok(serde_json::to_value(self_check::run(place)?)?),
    }
}
