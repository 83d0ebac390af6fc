//! Errors of the shim. A failed call returns a status code and stores the text of the C++ exception.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;

use tch::Tensor;

unsafe extern "C" {
    fn locdiff_last_error() -> *const c_char;
}

/// A failure of libtorch, c10d or CUDA, or arguments that these libraries do not accept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {text}")]
pub struct NativeError {
    /// Name of the operation that failed.
    pub operation: &'static str,
    /// Why the operation failed. For a C++ exception, its text without the stack trace.
    pub text: String,
}

/// Turns the status of a shim call into a result.
pub(super) fn check(operation: &'static str, status: c_int) -> Result<(), NativeError> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the function takes no arguments and reads a thread-local variable.
    let text = unsafe { locdiff_last_error() };
    // SAFETY: the shim returns a NUL-terminated string that lives until this thread's next failing call.
    let text = unsafe { CStr::from_ptr(text) };
    Err(NativeError { operation, text: without_stack_trace(&text.to_string_lossy()) })
}

/// Runs a shim call that returns a pointer through its last argument.
pub(super) fn out_pointer(
    operation: &'static str,
    call: impl FnOnce(*mut *mut c_void) -> c_int,
) -> Result<NonNull<c_void>, NativeError> {
    let mut out = std::ptr::null_mut();
    check(operation, call(&raw mut out))?;
    NonNull::new(out).ok_or_else(|| NativeError { operation, text: "the shim returned a null pointer".to_owned() })
}

/// Runs a shim call that returns a tensor through its last argument.
///
/// # Safety
/// If the call succeeds, it must hand over a new `at::Tensor` that nothing else frees.
pub(super) unsafe fn out_tensor(
    operation: &'static str,
    call: impl FnOnce(*mut *mut c_void) -> c_int,
) -> Result<Tensor, NativeError> {
    let out = out_pointer(operation, call)?;
    // SAFETY: the caller guarantees that `call` hands over a new `at::Tensor` that nothing else frees. `from_ptr` takes
    // such an `at::Tensor*`.
    Ok(unsafe { Tensor::from_ptr(out.as_ptr().cast()) })
}

impl From<tch::TchError> for NativeError {
    fn from(error: tch::TchError) -> Self {
        Self { operation: "libtorch", text: without_stack_trace(&error.to_string()) }
    }
}

/// Lets `?` convert a `tch::TchError` into an error type that implements `From<NativeError>`.
macro_rules! from_torch {
    ($error:ty) => {
        impl From<tch::TchError> for $error {
            fn from(error: tch::TchError) -> Self {
                crate::native::NativeError::from(error).into()
            }
        }
    };
}
pub(crate) use from_torch;

/// Removes the stack trace that libtorch appends to its error texts.
pub(super) fn without_stack_trace(text: &str) -> String {
    text.split("\nException raised from").next().unwrap_or(text).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stack_trace_is_removed() {
        assert_eq!(without_stack_trace("size mismatch\nException raised from x at y.cpp:1\nframe #0"), "size mismatch");
        assert_eq!(without_stack_trace("plain"), "plain");
    }
}
