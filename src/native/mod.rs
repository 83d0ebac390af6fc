//! The C++ shim over libtorch and its safe Rust face. The only unsafe code of the project.
//!
//! Every function of the shim has a C ABI and catches all C++ exceptions; none unwinds into Rust.
//! What needs CUDA is there in the CPU variant too, and says that it cannot work.

pub mod autograd;
pub mod c10d;
mod c10d_store;
pub mod cuda;
mod error;
pub mod finite;
pub mod gemm;
#[cfg(test)]
#[allow(clippy::print_stdout, reason = "tests print what they measured")]
mod gpu_tests;
pub mod harmonics;
pub mod host;
pub mod nvrtc;
pub mod optim;
pub mod places;
pub mod random;
mod version;

pub use c10d_store::Store;
pub use error::NativeError;
pub(crate) use error::from_torch;
pub use version::{Versions, versions};
