//! Errors of jobs, and the failure message that is sent to the launcher.

use std::error::Error;
use std::fmt::{Display, Formatter, Result};

use locdiff_core::exit_code::{ExitCode, FailureKind, HasExitCode};
use locdiff_core::protocol::Failure;

/// An expected error, which has an exit code. Any other error stays a plain `anyhow::Error`; the worker then exits with
/// [`ExitCode::WorkerFailed`].
#[derive(Debug)]
pub(super) struct JobError(Box<dyn HasExitCode + Send + Sync>);

impl<E: HasExitCode + Send + Sync + 'static> From<E> for JobError {
    fn from(error: E) -> Self {
        Self(Box::new(error))
    }
}

impl Display for JobError {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        self.0.fmt(out)
    }
}

impl Error for JobError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

/// The failure that is reported to the launcher.
pub(super) fn failure(error: &anyhow::Error) -> Failure {
    let expected = error.downcast_ref::<JobError>().map(|error| &error.0);
    let code = expected.map_or(ExitCode::WorkerFailed, |error| error.exit_code());
    let of_peer = expected.is_some_and(|error| error.is_caused_by_peer());
    let kind = expected.map_or(FailureKind::Crash, |error| error.failure_kind());
    Failure { message: format!("{error:#}"), of_peer, exit_code: code.code(), kind }
}

#[cfg(test)]
mod tests {
    use locdiff_core::files::FileError;

    use super::*;
    use crate::comm::{CollectiveFailure, CommError};
    use crate::train::TrainError;

    fn failure_of(error: impl Into<JobError>) -> Failure {
        failure(&anyhow::Error::new(error.into()))
    }

    #[test]
    fn failed_collective_is_blamed_on_a_peer_wherever_training_notices_it() {
        let broken = || CommError::Collective {
            operation: "all_reduce",
            group: "data".into(),
            rank: 0,
            size: 2,
            failure: CollectiveFailure::Failed { text: "connection closed by peer".into() },
        };
        let noticed = [
            TrainError::Comm(broken()),
            TrainError::Loss(crate::loss::LossError::Comm(broken())),
            TrainError::Model(crate::model::ModelError::Comm(broken())),
            TrainError::Infer(crate::infer::InferError::Model(crate::model::ModelError::Comm(broken()))),
        ];
        for error in noticed {
            assert!(failure_of(error).of_peer);
        }
        assert!(failure_of(broken()).of_peer);
        let own = failure_of(TrainError::Config("wrong".into()));
        assert_eq!((own.of_peer, own.exit_code, own.message.as_str()), (false, ExitCode::Config.code(), "wrong"));
        let bug = failure(&anyhow::anyhow!("a bug"));
        assert_eq!((bug.of_peer, bug.exit_code, bug.kind), (false, ExitCode::WorkerFailed.code(), FailureKind::Crash));
    }

    #[test]
    fn cuda_errors_and_outages_are_tried_again_wherever_training_notices_them() {
        use crate::checkpoint::CheckpointError;
        use crate::native::NativeError;
        use crate::shards::ShardsError;
        let broken = || NativeError { operation: "copy", text: "CUDA error: an illegal memory access".into() };
        let io = |errno: nix::errno::Errno| FileError { path: "part-0".into(), error: errno.into() };
        let eio = nix::errno::Errno::EIO;
        for (error, kind) in [
            (TrainError::Native(broken()), FailureKind::Crash),
            (TrainError::Shards(ShardsError::Native(broken())), FailureKind::Crash),
            (TrainError::Checkpoint(CheckpointError::Native(broken())), FailureKind::Crash),
            (TrainError::Shards(ShardsError::Io(io(eio))), FailureKind::Outage),
            (TrainError::Infer(crate::infer::InferError::Shards(ShardsError::Io(io(eio)))), FailureKind::Outage),
            (TrainError::Checkpoint(CheckpointError::Io(io(eio))), FailureKind::Outage),
            (TrainError::Checkpoint(CheckpointError::Io(io(nix::errno::Errno::ENOSPC))), FailureKind::Final),
            (TrainError::Diverged("nan".into()), FailureKind::Final),
            (TrainError::Config("wrong".into()), FailureKind::Final),
        ] {
            let text = error.to_string();
            assert_eq!(failure_of(error).kind, kind, "{text}");
        }
    }
}
