//! Errors of communication between ranks. The error of a collective names the operation, the group and the rank.

use std::time::Duration;

use locdiff_core::exit_code::{ExitCode, HasExitCode};

/// An error from [`crate::comm`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommError {
    /// A collective failed. Its group cannot be used afterwards, unless `failure` is [`CollectiveFailure::Refused`].
    #[error("{operation} of group {group}, rank {rank} of {size}: {failure}")]
    Collective {
        /// Name of the operation, such as `all_reduce`.
        operation: &'static str,
        /// Name of the group.
        group: String,
        /// This process's rank in the group.
        rank: u32,
        /// Number of ranks in the group.
        size: u32,
        /// The cause.
        failure: CollectiveFailure,
    },
    /// Other ranks did not join the rendezvous, or this rank could not connect to the store or to a group. The text
    /// names this rank, and the missing ranks or the group.
    #[error("{0}")]
    Unreached(String),
    /// Invalid input on this rank: an impossible layout, a layout that differs from another rank's layout, a rank
    /// number that another process has taken, or gradients that are not in their buckets.
    #[error("{0}")]
    Bad(String),
}

impl HasExitCode for CommError {
    fn exit_code(&self) -> ExitCode {
        ExitCode::WorkerFailed
    }

    /// A failed collective or rendezvous counts as caused by a peer, unless the input of this rank was invalid.
    fn is_caused_by_peer(&self) -> bool {
        match self {
            Self::Collective { failure, .. } => !matches!(failure, CollectiveFailure::Refused { .. }),
            Self::Unreached(_) => true,
            Self::Bad(_) => false,
        }
    }
}

/// Why a collective failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveFailure {
    /// Some rank did not take part in time.
    #[error("timed out after {:.1} s: {text}", after.as_secs_f64())]
    TimedOut {
        /// The timeout of the collective.
        after: Duration,
        /// The error text of c10d.
        text: String,
    },
    /// The collective failed after [`super::Group::abort`] was called on this rank.
    #[error("aborted: {text}")]
    Aborted {
        /// The error text of c10d.
        text: String,
    },
    /// c10d reported another error. Usually a peer died, or closed its connections after an error.
    #[error("{text}")]
    Failed {
        /// The error text of c10d.
        text: String,
    },
    /// The collective was not started because this rank's arguments are invalid. The group can still be used.
    #[error("refused: {problem}")]
    Refused {
        /// Why the arguments are invalid.
        problem: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_operation_group_and_rank() {
        let failure = CollectiveFailure::TimedOut { after: Duration::from_secs(2), text: "no reply".to_owned() };
        let error =
            CommError::Collective { operation: "all_reduce", group: "data".to_owned(), rank: 1, size: 4, failure };
        assert_eq!(error.to_string(), "all_reduce of group data, rank 1 of 4: timed out after 2.0 s: no reply");
    }
}
