//! What the shim reports: a status, and the text of the C++ exception behind it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;

use tch::Tensor;

unsafe extern "C" {
    fn locdiff_last_error() -> *const c_char;
}

/// A failure inside libtorch, c10d or CUDA.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {text}")]
pub struct NativeError {
    /// What was asked for.
    pub operation: &'static str,
    /// The text of the C++ exception, its stack trace cut off.
    pub text: String,
}

/// Turns the status of a shim call into a result.
pub(super) fn check(operation: &'static str, status: c_int) -> Result<(), NativeError> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: takes no arguments, reads a thread-local.
    let text = unsafe { locdiff_last_error() };
    // SAFETY: the shim returns a terminated string that lives until this thread's next failing call.
    let text = unsafe { CStr::from_ptr(text) };
    Err(NativeError { operation, text: first_lines(&text.to_string_lossy()) })
}

/// What a call of the shim hands over through its last argument.
pub(super) fn handed_over(
    operation: &'static str,
    call: impl FnOnce(*mut *mut c_void) -> c_int,
) -> Result<NonNull<c_void>, NativeError> {
    let mut out = std::ptr::null_mut();
    check(operation, call(&raw mut out))?;
    NonNull::new(out).ok_or_else(|| NativeError { operation, text: "nothing came back".to_owned() })
}

/// The tensor that a call of the shim hands over.
///
/// # Safety
/// Where the call succeeds, it hands over a new `at::Tensor` that nobody else frees.
pub(super) unsafe fn tensor_from(
    operation: &'static str,
    call: impl FnOnce(*mut *mut c_void) -> c_int,
) -> Result<Tensor, NativeError> {
    let out = handed_over(operation, call)?;
    // SAFETY: the caller says that it is a tensor, which is what tch's pointer is.
    Ok(unsafe { Tensor::from_ptr(out.as_ptr().cast()) })
}

impl From<tch::TchError> for NativeError {
    fn from(error: tch::TchError) -> Self {
        Self { operation: "libtorch", text: first_lines(&error.to_string()) }
    }
}

/// Lets `?` turn a failure of tch into an error that has a variant for [`NativeError`].
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

/// libtorch appends its own stack trace to what it throws; people need what stands before it.
pub(super) fn first_lines(text: &str) -> String {
    text.split("\nException raised from").next().unwrap_or(text).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stack_trace_is_cut_off() {
        assert_eq!(first_lines("size mismatch\nException raised from x at y.cpp:1\nframe #0"), "size mismatch");
        assert_eq!(first_lines("plain"), "plain");
    }
}
