//! Tests of the safe wrappers around the C++ shim.

mod gemm;
mod optim;
mod random;
