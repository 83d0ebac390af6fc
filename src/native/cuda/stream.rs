//! Streams from torch's pool, and the current stream.

use std::ffi::c_int;

use super::cuda_functions;
use super::device::{current_device, index};
use crate::native::error::{NativeError, check};

cuda_functions! {
    fn locdiff_cuda_stream_from_pool(device: c_int, high_priority: c_int, out: *mut i64);
    fn locdiff_cuda_current_stream(device: c_int, out: *mut i64);
    fn locdiff_cuda_set_stream(id: i64, device: c_int);
}

/// Priority of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    /// The default priority.
    Normal,
    /// Kernels of a `High` stream start before kernels of a `Normal` stream, if both are ready.
    High,
}

/// A queue of work on one device. The pool of a device has 32 streams of each priority and hands them out in turn, so
/// several callers may receive the same stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaStream {
    pub(super) id: i64,
    pub(super) device: c_int,
}

impl CudaStream {
    /// Returns the next stream from the pool of the current device.
    pub fn from_pool(priority: Priority) -> Result<Self, NativeError> {
        let device = index(current_device()?);
        let mut id = 0;
        let high = c_int::from(priority == Priority::High);
        // SAFETY: `id` has room for one number.
        check("get a stream from the pool", unsafe { locdiff_cuda_stream_from_pool(device, high, &raw mut id) })?;
        Ok(Self { id, device })
    }

    /// This thread's current stream on the current device.
    pub fn current() -> Result<Self, NativeError> {
        Self::current_of(index(current_device()?))
    }

    pub(super) fn current_of(device: c_int) -> Result<Self, NativeError> {
        let mut id = 0;
        // SAFETY: `id` has room for one number.
        check("get the current stream", unsafe { locdiff_cuda_current_stream(device, &raw mut id) })?;
        Ok(Self { id, device })
    }

    fn make_current(self) -> Result<(), NativeError> {
        // SAFETY: both numbers came from torch, and torch's streams live as long as the process.
        check("set the stream", unsafe { locdiff_cuda_set_stream(self.id, self.device) })
    }
}

/// Makes `stream` the current stream of this thread, runs `body`, and makes the previous stream current again, even if
/// `body` panics. Does not synchronise the two streams.
pub fn with_stream<R>(stream: CudaStream, body: impl FnOnce() -> R) -> Result<R, NativeError> {
    struct Restore(CudaStream);
    impl Drop for Restore {
        fn drop(&mut self) {
            if let Err(error) = self.0.make_current() {
                tracing::error!(%error, "cannot restore the previous CUDA stream");
            }
        }
    }
    let restore = Restore(CudaStream::current_of(stream.device)?);
    stream.make_current()?;
    let result = body();
    drop(restore);
    Ok(result)
}
