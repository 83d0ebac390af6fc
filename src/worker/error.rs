//! Why a job failed, whatever the type of the error.

use std::error::Error;
use std::fmt::{Display, Formatter, Result};

use locdiff_core::exit_code::{ExitCode, HasExitCode};
use locdiff_core::protocol::Failure;

/// An expected error, which knows its exit code. Anything else stays a plain `anyhow::Error`: a worker that failed.
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

/// What the launcher is told.
pub(super) fn failure(error: &anyhow::Error) -> Failure {
    let expected = error.downcast_ref::<JobError>().map(|error| &error.0);
    let code = expected.map_or(ExitCode::WorkerFailed, |error| error.exit_code());
    let of_peer = expected.is_some_and(|error| error.is_of_peer());
    Failure { message: format!("{error:#}"), of_peer, exit_code: code.code() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{CommError, Failure as CommFailure};
    use crate::train::TrainError;

    fn told(error: impl Into<JobError>) -> Failure {
        failure(&anyhow::Error::new(error.into()))
    }

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
            TrainError::Infer(crate::infer::InferError::Model(crate::model::ModelError::Comm(broken()))),
        ];
        for error in noticed {
            assert!(told(error).of_peer);
        }
        assert!(told(broken()).of_peer);
        let own = told(TrainError::Config("wrong".into()));
        assert_eq!((own.of_peer, own.exit_code, own.message.as_str()), (false, ExitCode::Config.code(), "wrong"));
        let bug = failure(&anyhow::anyhow!("a bug"));
        assert_eq!((bug.of_peer, bug.exit_code), (false, ExitCode::WorkerFailed.code()));
    }
}
