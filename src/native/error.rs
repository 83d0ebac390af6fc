//! What the shim reports: a status, and the text of the C++ exception behind it.

use std::ffi::{CStr, c_char, c_int};

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
