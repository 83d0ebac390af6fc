//! Collectives with a backward pass, for layers that are split across ranks.
//!
//! Each function applies one operation in the forward pass and another operation to the gradient in the backward pass.
//! The right function depends on what the ranks compute from its result. If all ranks compute the same value from the
//! result, each rank already has the whole gradient of the result. If the ranks compute different values, each rank has
//! only its share of the gradient, and the backward pass must add or concatenate the shares.
//!
//! A tensor is *replicated* if every rank has the same values.
//!
//! Example, after Megatron-LM (Shoeybi et al. 2019, section 3): rank r computes a column-parallel layer with its share
//! Aᵣ of the weights, and then a row-parallel layer with its share Bᵣ, as `reduce(gelu(copy(x)·Aᵣ)·Bᵣ)`. The bias of
//! the row-parallel layer is added after `reduce`.
//!
//! None of these functions can be differentiated twice. In a group of one rank, each function returns its input.

use std::time::Instant;

use tch::Tensor;

use super::error::CommError;
use super::group::Group;
use crate::native::autograd::{self, Function};

/// Returns the input. The backward pass sums the gradient over ranks. Use this for a replicated tensor from which the
/// ranks compute different values.
pub fn copy(group: &Group, input: &Tensor) -> Result<Tensor, CommError> {
    apply(group, "copy", input, Function::IdentityAllReduce, 0)
}

/// Sums the inputs of all ranks. The backward pass returns the gradient unchanged. Use this to turn partial sums into a
/// replicated tensor.
pub fn reduce(group: &Group, input: &Tensor) -> Result<Tensor, CommError> {
    apply(group, "reduce", input, Function::AllReduceIdentity, 0)
}

/// Concatenates the inputs of all ranks along `dim`. The backward pass keeps this rank's piece of the gradient. Use
/// this if all ranks compute the same value from the result. In this case each rank already has the whole gradient, and
/// a sum over ranks would count the gradient once per rank.
pub fn gather_replicated(group: &Group, input: &Tensor, dim: i64) -> Result<Tensor, CommError> {
    apply(group, "gather_replicated", input, Function::GatherSplit, dim)
}

/// Returns this rank's piece of the input along `dim`. The backward pass concatenates the gradients of all pieces. Use
/// this to divide a replicated tensor among ranks.
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
        return Err(group.refused(
            operation,
            format!("the input is undefined or on another device, wanted a tensor on {:?}", group.device()),
        ));
    }
    if group.size() == 1 {
        return Ok(input.shallow_clone());
    }
    let started = Instant::now();
    autograd::differentiable(group.process_group(), input, function, dim, group.timeout())
        .map_err(|error| group.failed(operation, started, error.text))
}
