//! The C++ shim over libtorch and its safe Rust wrapper. All unsafe code of this crate is in this module.
//!
//! Every function of the shim has a C ABI. Every function that can fail catches all C++ exceptions, so that no
//! exception unwinds into Rust. The Rust functions for CUDA also exist in the CPU variant, where each call returns an
//! error.

pub mod autograd;
pub mod backtrace;
pub mod c10d;
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
pub mod profiler;
pub mod random;
pub mod row_pool;
mod version;

use tch::{Device, Kind, Tensor};

pub use error::NativeError;
pub(crate) use error::from_torch;
pub use version::{Versions, versions};

/// Calls each vector function of MKL that the program uses. On a busy machine, the first call of a function rounded
/// differently than later ones in about one process of a hundred, but never after a call with a single number: see
/// "First calls" in docs/NUMERICS.md.
pub fn call_vector_functions_once() -> Result<(), NativeError> {
    for kind in [Kind::Float, Kind::Double] {
        let number = Tensor::f_zeros([1], (kind, Device::Cpu))?;
        let _ = [number.f_sin()?, number.f_cos()?, number.f_asin()?, number.f_exp()?];
    }
    Ok(())
}
