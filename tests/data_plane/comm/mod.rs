//! Collectives, differentiable collectives and gradient buckets between real processes, over Gloo and, on a GPU, over
//! NCCL.

mod buckets;
mod collectives;
mod differentiable;
mod faults;
pub(crate) mod harness;
mod long;
mod nccl;
