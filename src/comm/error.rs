//! What can go wrong between ranks. Every failed collective names operation, group and rank.

use std::time::Duration;

use locdiff_core::exit_code::{ExitCode, HasExitCode};

use crate::native::NativeError;

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
    /// Ranks that did not come to the rendezvous.
    #[error("rendezvous of rank {rank}: no sign of rank(s) {} after {:.1} s", join(missing), after.as_secs_f64())]
    Missing {
        /// This process's rank.
        rank: u32,
        /// Who is not there.
        missing: Vec<u32>,
        /// How long they were waited for.
        after: Duration,
    },
    /// Two ranks came to the rendezvous with different ideas of it.
    #[error("rendezvous of rank {rank}: {problem}")]
    Rendezvous {
        /// This process's rank.
        rank: u32,
        /// What does not fit.
        problem: String,
    },
    /// The store, or the connection of a group over it.
    #[error("rank {rank}, group {group}: {source}")]
    Connect {
        /// This process's rank.
        rank: u32,
        /// Which group, or `store`.
        group: String,
        /// What c10d says.
        source: NativeError,
    },
    /// A world that cannot be divided so.
    #[error("{world} ranks cannot be divided into tensor-parallel groups of {tensor_parallel}")]
    Layout {
        /// How many ranks there are.
        world: u32,
        /// How many were to form a group.
        tensor_parallel: u32,
    },
    /// A rank outside the world.
    #[error("rank {rank} is not one of {world}")]
    Rank {
        /// The rank.
        rank: u32,
        /// How many ranks there are.
        world: u32,
    },
    /// Gradients that cannot be put into buckets, or did not stay there.
    #[error("gradient buckets of group {group}: {problem}")]
    Buckets {
        /// The group that reduces them.
        group: String,
        /// What does not fit.
        problem: String,
    },
}

impl HasExitCode for CommError {
    fn exit_code(&self) -> ExitCode {
        ExitCode::WorkerFailed
    }

    /// A broken collective tells of a peer's failure, unless this worker's own call was refused.
    fn is_of_peer(&self) -> bool {
        match self {
            Self::Collective { failure, .. } => !matches!(failure, Failure::Refused { .. }),
            Self::Missing { .. } | Self::Connect { .. } => true,
            Self::Rendezvous { .. } | Self::Layout { .. } | Self::Rank { .. } | Self::Buckets { .. } => false,
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

fn join(ranks: &[u32]) -> String {
    ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
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
        let error = CommError::Missing { rank: 0, missing: vec![2, 3], after: Duration::from_millis(1500) };
        assert_eq!(error.to_string(), "rendezvous of rank 0: no sign of rank(s) 2, 3 after 1.5 s");
    }
}
