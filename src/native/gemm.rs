//! Matrix products of bf16 factors with an f32 result. The tensor cores sum in f32, and these sums are not rounded to
//! bf16.
//!
//! On CUDA, a product is one call of cuBLAS. libtorch has no such product for the CPU, so on the CPU the factors are
//! first converted to f32. The results on CUDA and on the CPU differ only in the order of summation.

use std::ffi::{c_int, c_void};

use tch::Tensor;

use super::error::{NativeError, check, out_tensor};
use super::optim::pointer;

unsafe extern "C" {
    fn locdiff_mm_f32(a: *mut c_void, b: *mut c_void, out: *mut *mut c_void) -> c_int;
    fn locdiff_mm_f32_out(out: *mut c_void, a: *mut c_void, b: *mut c_void) -> c_int;
}

/// The matrix product `a_mk` × `b_kn` in f32. It is differentiable, and the gradients have the dtype of the factors.
/// Both factors must have the same dtype.
pub fn mm_f32(a_mk: &Tensor, b_kn: &Tensor) -> Result<Tensor, NativeError> {
    // SAFETY: both factors are live tensors, and `out` has room for one pointer.
    let call = |out| unsafe { locdiff_mm_f32(pointer(a_mk), pointer(b_kn), out) };
    // SAFETY: on success the shim hands over a new tensor that nothing else frees.
    unsafe { out_tensor("matrix product with f32 result", call) }
}

/// Writes the matrix product `a_mk` × `b_kn` to the f32 matrix `out_mn`. The rows of `out_mn` may be further apart
/// than its width. The product is not differentiable.
pub fn mm_f32_out(out_mn: &Tensor, a_mk: &Tensor, b_kn: &Tensor) -> Result<(), NativeError> {
    // SAFETY: all three are live tensors, and the shim keeps no reference.
    let code = unsafe { locdiff_mm_f32_out(pointer(out_mn), pointer(a_mk), pointer(b_kn)) };
    check("matrix product with f32 result", code)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn product_fills_some_columns_of_a_matrix() {
        let matrix = |rows: i64, columns: i64| {
            Tensor::arange(rows * columns, (Kind::Float, Device::Cpu)).view([rows, columns]).to_kind(Kind::BFloat16)
        };
        let (a, b, all) = (matrix(2, 3), matrix(3, 4), Tensor::zeros([2, 9], (Kind::Float, Device::Cpu)));
        mm_f32_out(&all.narrow(1, 2, 4), &a, &b).expect("the shapes match");
        assert!(all.narrow(1, 2, 4).equal(&mm_f32(&a, &b).expect("the shapes match")));
        assert_eq!(all.count_nonzero(None::<i64>).int64_value(&[]), 8, "{all}");
    }
}
