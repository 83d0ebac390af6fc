//! Collectives that backward passes through, for layers split across ranks.
//!
//! Each is a pair: what forward does, and what backward does with the gradient. Which pair is right depends on what
//! comes after. *Replicated*: every rank goes on with the same values, and the loss that all of them compute counts
//! once. *Partial*: every rank goes on in its own way, and the loss is the sum over ranks.
//!
//! Column-parallel then row-parallel linear layers (Megatron-LM, Shoeybi et al. 2019, section 3):
//! `reduce(gelu(copy(x)·Aᵣ)·Bᵣ)`, with the row layer's bias after the reduce.
//!
//! None can be differentiated twice. In a group of one each returns its input.

use std::time::Instant;

use tch::Tensor;

use super::error::CommError;
use super::group::Group;
use crate::native::autograd::{self, Function};

/// Identity; backward sums the gradient over ranks. Where a replicated tensor enters parts that differ between ranks.
pub fn copy(group: &Group, input: &Tensor) -> Result<Tensor, CommError> {
    apply(group, "copy", input, Function::IdentityAllReduce, 0)
}

/// Sums over ranks; backward is the identity. Where partial sums become a replicated tensor.
pub fn reduce(group: &Group, input: &Tensor) -> Result<Tensor, CommError> {
    apply(group, "reduce", input, Function::AllReduceIdentity, 0)
}

/// Concatenates the ranks' pieces along `dim`; backward keeps this rank's piece of the gradient. Right where what comes
/// after is replicated: each rank already has the whole gradient, and a sum would count it `size` times.
pub fn gather_replicated(group: &Group, input: &Tensor, dim: i64) -> Result<Tensor, CommError> {
    apply(group, "gather_replicated", input, Function::GatherSplit, dim)
}

/// This rank's piece along `dim`; backward concatenates the pieces of the gradient. Where a replicated tensor is
/// divided among ranks.
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
