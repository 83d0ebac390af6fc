//! Matrix products of bf16 factors with an f32 result: the sums are kept as they leave the tensor cores.
//!
//! On CUDA it is one kernel of cuBLAS. On the CPU, which has no such kernel, the factors are widened first: the same
//! numbers up to the order of the sums.

use std::ffi::{c_int, c_void};

use tch::Tensor;

use super::error::{NativeError, tensor_from};
use super::optim::pointer;

unsafe extern "C" {
    fn locdiff_mm_f32(a: *mut c_void, b: *mut c_void, out: *mut *mut c_void) -> c_int;
}

/// `a_mk` × `b_kn` in f32. Differentiable; the gradients have the kind of the factors.
pub fn mm_f32(a_mk: &Tensor, b_kn: &Tensor) -> Result<Tensor, NativeError> {
    // SAFETY: both factors are live tensors.
    let call = |out| unsafe { locdiff_mm_f32(pointer(a_mk), pointer(b_kn), out) };
    // SAFETY: the product is a new tensor.
    unsafe { tensor_from("matrix product with f32 result", call) }
}
