//! A worker's life: join the launcher, take a job, answer, end.

mod bench_collectives;
mod bench_shards;
mod bench_shdd;
mod control;
mod eval;
mod meet;
mod self_check;
mod shards;
mod train;

use anyhow::bail;
use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::files::Files;
use locdiff_core::protocol::{Failure, Job, ToLauncher, ToWorker};
use serde_json::json;

use crate::checkpoint::{self, CheckpointError};
use crate::comm::CommError;
use crate::eval::{EvalError, choose, perturbation, score};
use crate::native;
use crate::shards::ShardsError;
use crate::train::TrainError;
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
            let code = exit_code(&error);
            let failure =
                Failure { message: format!("{error:#}"), of_peer: is_of_peer(&error), exit_code: code.code() };
            // A launcher that has gone away cannot be told.
            let _ = control.send(&ToLauncher::Failed(failure));
            code
        }
    }
}

/// A broken collective tells of somebody else's failure, unless this worker's own call was refused.
fn is_of_peer(error: &anyhow::Error) -> bool {
    let of_comm = |cause: &(dyn std::error::Error + 'static)| cause.downcast_ref().is_some_and(CommError::is_of_peer);
    let of_training = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref().and_then(TrainError::comm).is_some_and(CommError::is_of_peer)
    };
    error.chain().any(|cause| of_comm(cause) || of_training(cause))
}

/// Expected errors carry their own code; whatever else happens is a worker that failed.
fn exit_code(error: &anyhow::Error) -> ExitCode {
    let expected = error.chain().find_map(|cause| {
        let train = cause.downcast_ref().map(TrainError::exit_code);
        let shards = || cause.downcast_ref().map(ShardsError::exit_code);
        let eval = || cause.downcast_ref().map(EvalError::exit_code);
        train.or_else(shards).or_else(eval).or_else(|| cause.downcast_ref().map(CheckpointError::exit_code))
    });
    expected.unwrap_or(ExitCode::WorkerFailed)
}

fn work(control: &mut Control) -> anyhow::Result<()> {
    control.greet(&native::versions()?)?;
    let ToWorker::Start { place, meeting, job } = control.receive()? else {
        bail!("the launcher's first message is not a start");
    };
    let messages = control.watch_launcher()?;
    tch::set_num_threads(i32::try_from(place.threads)?);
    let result = match job {
        Job::Probe => json!({}),
        Job::SelfCheck => serde_json::to_value(self_check::run(&place)?)?,
        Job::BenchCollectives { bytes_max } => {
            let communicator = meet::meet(control, &messages, &place, &meeting)?;
            serde_json::to_value(bench_collectives::run(&communicator, bytes_max)?)?
        }
        Job::Shards(job) => shards::run(&job, &place)?,
        Job::Export(job) => checkpoint::export(&Files::real(), &job)?,
        Job::Train(job) => train::run(&job, control, &messages, &place, &meeting)?,
        Job::Eval(job) => eval::run(&job, control, &place)?,
        Job::Score(job) => score::run(&job)?,
        Job::Choose(job) => choose::run(&job)?,
        Job::Predictions(job) => score::run_predictions(&job)?,
        Job::Gallery(job) => eval::embed_gallery(&job, &place)?,
        Job::BenchShdd => serde_json::to_value(bench_shdd::run(&place)?)?,
        Job::Perturbation { points } => {
            let share = perturbation::Share { rank: place.rank, world: place.world, threads: place.threads };
            serde_json::to_value(perturbation::run(points, share)?)?
        }
    };
    Ok(control.send(&ToLauncher::Result(result))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Failure as CommFailure;
    use crate::infer::InferError;

    #[test]
    fn broken_exchange_is_of_a_peer_wherever_training_notices_it() {
        let broken = || CommError::Collective {
            operation: "all_reduce",
            group: "data".into(),
            rank: 0,
            size: 2,
            failure: CommFailure::Failed { text: "connection closed by peer".into() },
        };
        let noticed = [
            TrainError::Comm(broken()),
            TrainError::Loss(crate::loss::LossError::Comm(broken())),
            TrainError::Model(crate::model::ModelError::Comm(broken())),
            TrainError::Infer(InferError::Model(crate::model::ModelError::Comm(broken()))),
        ];
        for error in noticed {
            assert!(is_of_peer(&error.into()));
        }
        assert!(is_of_peer(&broken().into()));
        let own = TrainError::Config("wrong".into()).into();
        assert_eq!((is_of_peer(&own), exit_code(&own)), (false, ExitCode::Config));
    }
}
