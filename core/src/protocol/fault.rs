//! Faults that `train --inject` requests, to test how a run recovers.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::pulse::WorkPhase;

/// Environment variable with the path of a fake `memory.events`. [`FaultKind::Oom`] increases the count of
/// out-of-memory kills in this file, and the launcher reads this file instead of the `memory.events` of its cgroup.
pub const MEMORY_EVENTS_VARIABLE: &str = "LOCDIFF_MEMORY_EVENTS";

/// A fault to inject.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct InjectedFault {
    /// What happens.
    pub kind: FaultKind,
    /// The rank in which the fault occurs.
    pub rank: u32,
    /// The fault occurs just before this step, counted from 1. In a message to a running worker, 0 stands for the next
    /// step.
    pub step: u64,
}

impl fmt::Display for InjectedFault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} in rank {} before step {}", self.kind.name(), self.rank, self.step)
    }
}

/// What happens when a fault is injected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// The rank sends itself SIGKILL.
    Kill,
    /// The rank sends itself SIGSTOP.
    Stop,
    /// The rank hangs.
    Hang {
        /// The phase in which the rank hangs.
        phase: WorkPhase,
    },
    /// The rank sends itself SIGSEGV.
    Segfault,
    /// The rank panics.
    Panic,
    /// The rank exits without a result.
    Exit {
        /// The exit code.
        code: i32,
    },
    /// The rank sleeps before this step and every later step of the attempt.
    Slow {
        /// The time that the rank sleeps.
        milliseconds: u64,
    },
    /// The rank increases the count of out-of-memory kills in a fake `memory.events` and sends itself SIGKILL.
    Oom,
    /// A kernel of the rank fails, so that CUDA reports an error. Needs a GPU.
    CudaError,
    /// The rank asks for more memory than its GPU has. Needs a GPU.
    GpuMemory,
    /// The rank fails just before the step, as if reading a shard had failed with EIO.
    Eio,
    /// The rank's next write of a checkpoint fails with ENOSPC.
    Enospc,
    /// The rank's next write of a checkpoint is delayed.
    SlowDisk {
        /// The delay.
        seconds: u64,
    },
    /// One bit of one weight of the rank flips.
    FlipWeight,
    /// One bit of the rank's gradient flips before the reduction.
    FlipGradient,
    /// One bit of the next checkpoint flips after the commit.
    CorruptCheckpoint,
    /// A write of TensorBoard events by the rank fails with EIO.
    TensorboardEio,
}

impl FaultKind {
    /// The name of the kind, such as `corrupt-checkpoint`.
    fn name(self) -> String {
        match serde_json::to_value(self) {
            Ok(Value::String(name)) => name,
            Ok(Value::Object(fields)) => fields.keys().next().cloned().unwrap_or_default(),
            _ => String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_is_described_in_plain_words() {
        let text = |kind| InjectedFault { kind, rank: 1, step: 7 }.to_string();
        assert_eq!(text(FaultKind::CorruptCheckpoint), "corrupt-checkpoint in rank 1 before step 7");
        assert_eq!(text(FaultKind::Exit { code: 3 }), "exit in rank 1 before step 7");
    }
}
