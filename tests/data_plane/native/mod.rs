//! The shim's safe face.

mod gemm;
mod optim;
mod random;
