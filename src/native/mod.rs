//! The C++ shim over libtorch and its safe Rust face. The only unsafe code of the project.
//!
//! Every function of the shim has a C ABI and catches all C++ exceptions; none unwinds into Rust.

pub mod cuda;
mod error;
pub mod gemm;
pub mod nvrtc;
pub mod optim;
pub mod philox;
pub mod random;
pub mod selftest;
mod version;

pub use error::NativeError;
pub use version::{Versions, versions};
