//! `[parallel]`: the worker processes and their devices.

use serde::{Deserialize, Serialize};

use crate::config::AutoOr;
use crate::config::errors::Checker;

/// The device that workers compute on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// GPUs if the machine has any, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// GPUs.
    Cuda,
}

impl DeviceKind {
    /// Whether workers compute on GPUs; `any_gpu` says whether the machine has a GPU.
    pub fn on_cuda(self, any_gpu: bool) -> bool {
        match self {
            Self::Auto => any_gpu,
            Self::Cpu => false,
            Self::Cuda => true,
        }
    }
}

section! {
    /// Number of worker processes, their devices, and how the model is split over them.
    pub struct ParallelConfig {
        /// Worker processes per node (`--gpus`, `--workers`). "auto": one per visible GPU, or one on the CPU.
        pub workers: AutoOr<u32> = AutoOr::Auto,
        /// The device that workers compute on (`--device`).
        pub device: DeviceKind = DeviceKind::Auto,
        /// Allow several workers on one GPU, for tests (`--share-gpu`).
        pub share_gpu: bool = false,
        /// Number of workers over which one replica of the model is split (`--tensor-parallel`).
        pub tensor: u32 = 1,
        /// Number of nodes that run the command together (`--nnodes`).
        pub nodes: u32 = 1,
        /// The command goes on if at least this many nodes are left (`--nnodes MIN:MAX`). 0: it needs all nodes.
        pub nodes_min: u32 = 0,
        /// Number of this node, from 0 (`--node-rank`). Node 0 coordinates.
        pub node_rank: u32 = 0,
    }
}

impl ParallelConfig {
    /// Number of nodes without which training does not go on.
    pub fn nodes_needed(&self) -> u32 {
        if self.nodes_min == 0 { self.nodes } else { self.nodes_min }
    }

    pub(in crate::config) fn check(&self, checker: &mut Checker) {
        if let Some(workers) = self.workers.value() {
            checker.within("parallel.workers", workers, 1..=1024);
        }
        checker.within("parallel.tensor", self.tensor, 1..=1024);
        checker.within("parallel.nodes", self.nodes, 1..=4096);
        if self.nodes_min > self.nodes {
            checker.push(
                "parallel.nodes_min",
                format!("is {}, wanted at most parallel.nodes = {}", self.nodes_min, self.nodes),
            );
        }
        // A scheduler may number processes that do not work together, so the number of the only node does not matter.
        if self.nodes > 1 && self.node_rank >= self.nodes {
            checker.push(
                "parallel.node_rank",
                format!("is {}, wanted less than parallel.nodes = {}", self.node_rank, self.nodes),
            );
        }
    }
}
