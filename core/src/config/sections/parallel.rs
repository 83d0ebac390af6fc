//! `[parallel]`: how many processes, and what each of them has.

use serde::{Deserialize, Serialize};

use crate::config::AutoOr;
use crate::config::errors::Checker;

/// Where a worker computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// On a GPU where there is one, else on the CPU.
    Auto,
    /// On the CPU.
    Cpu,
    /// On a GPU.
    Cuda,
}

impl DeviceKind {
    /// Whether workers compute on GPUs on a machine that has or has not any.
    pub fn on_cuda(self, any_gpu: bool) -> bool {
        match self {
            Self::Auto => any_gpu,
            Self::Cpu => false,
            Self::Cuda => true,
        }
    }
}

section! {
    /// How many processes, on what, and how the model is split over them.
    pub struct ParallelConfig {
        /// Worker processes on each node (`--gpus`, `--workers`); "auto": one per visible GPU, else one.
        pub workers: AutoOr<u32> = AutoOr::Auto,
        /// Where they compute (`--device`).
        pub device: DeviceKind = DeviceKind::Auto,
        /// Let several workers share one GPU, for tests (`--share-gpu`).
        pub share_gpu: bool = false,
        /// Processes that one replica of the model is split over (`--tensor-parallel`).
        pub tensor: u32 = 1,
        /// Nodes of the run (`--nnodes`).
        pub nodes: u32 = 1,
        /// Which of them this is, from 0 (`--node-rank`).
        pub node_rank: u32 = 0,
    }
}

impl ParallelConfig {
    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        if let Some(workers) = self.workers.value() {
            checker.within("parallel.workers", workers, 1..=1024);
        }
        checker.within("parallel.tensor", self.tensor, 1..=1024);
        checker.within("parallel.nodes", self.nodes, 1..=4096);
        if self.node_rank >= self.nodes {
            checker.push(
                "parallel.node_rank",
                format!("is {}, wanted less than parallel.nodes = {}", self.node_rank, self.nodes),
            );
        }
    }
}
