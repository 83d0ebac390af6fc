//! What can go wrong between ranks. Every failed collective names operation, group and rank.

use std::time::Duration;

use locdiff_core::exit_code::{ExitCode, HasExitCode};

/// An error of [`crate::comm`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommError {
    /// A collective did not end well. Its group is useless from then on, unless it was refused.
    #[error("{operation} of group {group}, rank {rank} of {size}: {failure}")]
    Collective {
        /// Such as `all_reduce`.
        operation: &'static str,
        /// The name of the group.
        group: String,
        /// This process's rank in the group.
        rank: u32,
        /// How many ranks the group has.
        size: u32,
        /// How it ended.
        failure: Failure,
    },
    /// Other ranks did not come to the rendezvous, or could not be connected to: who waited, for whom, how long.
    #[error("{0}")]
    Unreached(String),
    /// This rank's own arguments do not fit: a layout, a rendezvous that others see differently, gradients out of place.
    #[error("{0}")]
    Bad(String),
}

impl HasExitCode for CommError {
    fn exit_code(&self) -> ExitCode {
        ExitCode::WorkerFailed
    }

    /// A broken collective tells of a peer's failure, unless this worker's own call was refused.
    fn is_of_peer(&self) -> bool {
        match self {
            Self::Collective { failure, .. } => !matches!(failure, Failure::Refused { .. }),
            Self::Unreached(_) => true,
            Self::Bad(_) => false,
        }
    }
}

/// How a collective ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Some rank did not take part in time.
    #[error("timed out after {:.1} s: {text}", after.as_secs_f64())]
    TimedOut {
        /// The timeout.
        after: Duration,
        /// What c10d says.
        text: String,
    },
    /// [`super::Group::abort`] was called on this rank.
    #[error("aborted: {text}")]
    Aborted {
        /// What c10d says.
        text: String,
    },
    /// A peer died, or closed its connections after a failure of its own.
    #[error("{text}")]
    Failed {
        /// What c10d says.
        text: String,
    },
    /// Not started, because this rank's arguments do not fit; the group is as before.
    #[error("refused: {problem}")]
    Refused {
        /// What does not fit.
        problem: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_operation_group_and_rank() {
        let failure = Failure::TimedOut { after: Duration::from_secs(2), text: "waited in vain".to_owned() };
        let error =
            CommError::Collective { operation: "all_reduce", group: "data".to_owned(), rank: 1, size: 4, failure };
        assert_eq!(error.to_string(), "all_reduce of group data, rank 1 of 4: timed out after 2.0 s: waited in vain");
    }
}
