//! CUDA events: marks in a stream for which the host can wait with a timeout.

use std::ffi::{c_int, c_void};
use std::time::{Duration, Instant};

use super::cuda_functions;
use super::stream::CudaStream;
use crate::native::error::{NativeError, check};

cuda_functions! {
    fn locdiff_cuda_event_new(out: *mut *mut c_void);
    fn locdiff_cuda_event_free(event: *mut c_void);
    fn locdiff_cuda_event_record(event: *mut c_void, id: i64, device: c_int);
    fn locdiff_cuda_event_block(event: *mut c_void, id: i64, device: c_int);
    fn locdiff_cuda_event_query(event: *const c_void, done: *mut c_int);
    fn locdiff_cuda_event_synchronize(event: *const c_void);
}

/// How long a wait polls without sleeping. A sleep on Linux takes about 50 µs longer than requested, which is too much
/// for a training step of 1 ms.
const SPIN: Duration = Duration::from_millis(2);
/// Once a wait has lasted for [`SPIN`], it sleeps between polls. Each sleep takes at most 1/100 of the time waited so
/// far, so that the wait becomes at most 1 % longer.
const SLEEP_SHARE: u32 = 100;
const SLEEP_MAX: Duration = Duration::from_millis(1);

/// A wait that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// The device did not reach the mark of the event within this time. The device may still be working.
    #[error("the device did not finish within {:.3} s", .0.as_secs_f64())]
    TimedOut(Duration),
    /// The device failed.
    #[error(transparent)]
    Native(#[from] NativeError),
}

/// A mark in a stream, which the device reaches when all earlier work of the stream is done.
#[derive(Debug)]
pub struct CudaEvent(*mut c_void);

// SAFETY: a CUDA event is not bound to a thread, and every method that changes it takes `&mut self`.
unsafe impl Send for CudaEvent {}
// SAFETY: methods that take `&self` only read the event, and the CUDA calls that read an event are thread-safe.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// Creates an event that is not recorded yet.
    pub fn new() -> Result<Self, NativeError> {
        let mut event = std::ptr::null_mut();
        // SAFETY: `event` has room for one pointer.
        check("new event", unsafe { locdiff_cuda_event_new(&raw mut event) })?;
        Ok(Self(event))
    }

    /// Places the mark after all work that is in `stream` at this moment.
    pub fn record(&mut self, stream: &CudaStream) -> Result<(), NativeError> {
        // SAFETY: the event is live, and the stream came from torch.
        check("event record", unsafe { locdiff_cuda_event_record(self.0, stream.id, stream.device) })
    }

    /// Makes `stream` wait until the device has reached the mark. The host does not wait.
    pub fn block(&self, stream: &CudaStream) -> Result<(), NativeError> {
        // SAFETY: the event is live, and the stream came from torch.
        check("wait of a stream", unsafe { locdiff_cuda_event_block(self.0, stream.id, stream.device) })
    }

    /// Whether the device has reached the mark. Also true if [`CudaEvent::record`] was never called.
    pub fn query(&self) -> Result<bool, NativeError> {
        let mut done = 0;
        // SAFETY: the event is live, and `done` has room for one integer.
        check("event query", unsafe { locdiff_cuda_event_query(self.0, &raw mut done) })?;
        Ok(done != 0)
    }

    /// Blocks until the device has reached the mark, without a timeout.
    pub fn synchronize(&self) -> Result<(), NativeError> {
        // SAFETY: the event is live.
        check("event synchronisation", unsafe { locdiff_cuda_event_synchronize(self.0) })
    }

    /// Blocks until the device has reached the mark, at most for `timeout`.
    pub fn wait_for(&self, timeout: Duration) -> Result<(), WaitError> {
        poll(timeout, || self.query())
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: the event is live, and nothing uses it afterwards.
        let status = unsafe { locdiff_cuda_event_free(self.0) };
        if let Err(error) = check("free an event", status) {
            tracing::error!(%error, "cannot free a CUDA event");
        }
    }
}

/// Calls `done` until it returns true or `timeout` has passed. If `done` stays false, its last call comes
/// after `timeout`, because the device may have finished while this thread was asleep.
fn poll(timeout: Duration, mut done: impl FnMut() -> Result<bool, NativeError>) -> Result<(), WaitError> {
    let start = Instant::now();
    loop {
        let waited = start.elapsed();
        if done()? {
            return Ok(());
        }
        if waited >= timeout {
            return Err(WaitError::TimedOut(timeout));
        }
        if waited < SPIN {
            std::hint::spin_loop();
        } else {
            std::thread::sleep((waited / SLEEP_SHARE).min(SLEEP_MAX).min(timeout - waited));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poll_ends_when_done_or_timed_out_or_failed() {
        let mut calls = 0;
        let third = || {
            calls += 1;
            Ok(calls == 3)
        };
        assert_eq!(poll(Duration::from_secs(60), third), Ok(()));
        assert_eq!(poll(Duration::ZERO, || Ok(true)), Ok(()), "the wait failed although the device had finished");
        let timeout = Duration::from_millis(5);
        assert_eq!(poll(timeout, || Ok(false)), Err(WaitError::TimedOut(timeout)));
        let error = NativeError { operation: "event query", text: "illegal address".to_owned() };
        assert_eq!(poll(timeout, || Err(error.clone())), Err(WaitError::Native(error.clone())));
    }
}
