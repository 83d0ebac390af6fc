//! Matrix products of bf16 factors with an f32 result. The tensor cores sum in f32, and these sums are not rounded to
//! bf16.
//!
//! On CUDA, a product is one call of cuBLAS. libtorch has no such product for the CPU, so on the CPU the factors are
//! first converted to f32. The results on CUDA and on the CPU differ only in the order of summation.

use std::ffi::{c_int, c_void};

use tch::Tensor;

use super::error::{NativeError, out_tensor};
use super::optim::pointer;

unsafe extern "C" {
    fn locdiff_mm_f32(a: *mut c_void, b: *mut c_void, out: *mut *mut c_void) -> c_int;
}

/// The matrix product `a_mk` × `b_kn` in f32. It is differentiable, and the gradients have the dtype of the factors.
/// Both factors must have the same dtype.
pub fn mm_f32(a_mk: &Tensor, b_kn: &Tensor) -> Result<Tensor, NativeError> {
    // SAFETY: both factors are live tensors, and `out` has room for one pointer.
    let call = |out| unsafe { locdiff_mm_f32(pointer(a_mk), pointer(b_kn), out) };
    // SAFETY: on success the shim hands over a new tensor that nothing else frees.
    unsafe { out_tensor("matrix product with f32 result", call) }
}
