//! Collectives with a backward pass, for layers that are split across ranks.
//!
//! Each is a pair of a forward operation and the operation that backward applies to the gradient. Which pair is right
//! depends on what follows. *Replicated*: every rank continues with the same values, and the loss that all of them
//! compute counts once. *Partial*: each rank continues with its own values, and the loss is the sum over ranks.
//!
//! A column-parallel layer followed by a row-parallel one (Megatron-LM, Shoeybi et al. 2019, section 3):
//! `reduce(gelu(copy(x)·Aᵣ)·Bᵣ)`, with the bias of the row-parallel layer added after the reduce.
//!
//! None of them can be differentiated twice. In a group of one rank, each returns its input.

use std::time::Instant;

use tch::Tensor;

use super::error::CommError;
use super::group::Group;
use crate::native::autograd::{self, Function};

/// Identity; backward sums the gradient over ranks. For a replicated tensor that enters computations that differ
/// between ranks.
pub fn copy(group: &Group, input: &Tensor) -> Result<Tensor, CommError> {
    apply(group, "copy", input, Function::IdentityAllReduce, 0)
}

/// Sums over ranks; backward is the identity. For partial sums that become a replicated tensor.
pub fn reduce(group: &Group, input: &Tensor) -> Result<Tensor, CommError> {
    apply(group, "reduce", input, Function::AllReduceIdentity, 0)
}

/// Concatenates the ranks' pieces along `dim`; backward keeps this rank's piece of the gradient. For results whose
/// further use is replicated: each rank already has the whole gradient, and a sum would count it `size` times.
pub fn gather_replicated(group: &Group, input: &Tensor, dim: i64) -> Result<Tensor, CommError> {
    apply(group, "gather_replicated", input, Function::GatherSplit, dim)
}

/// Returns this rank's piece along `dim`; backward concatenates the pieces of the gradient. For a replicated tensor
/// that is divided among ranks.
pub fn split(group: &Group, input: &Tensor, dim: i64) -> Result<Tensor, CommError> {
    apply(group, "split", input, Function::SplitGather, dim)
}

fn apply(
    group: &Group,
    operation: &'static str,
    input: &Tensor,
    function: Function,
    dim: i64,
) -> Result<Tensor, CommError> {
    if !input.defined() || input.device() != group.device() {
        return Err(group.refused(operation, format!("the input must be a tensor on {:?}", group.device())));
    }
    if group.size() == 1 {
        return Ok(input.shallow_clone());
    }
    let started = Instant::now();
    autograd::differentiable(group.process_group(), input, function, dim, group.timeout())
        .map_err(|error| group.failed(operation, started, error.text))
}
