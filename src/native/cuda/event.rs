//! Marks in a stream, to wait for with a limit.

use std::ffi::{c_int, c_void};
use std::time::{Duration, Instant};

use super::cuda_functions;
use super::stream::Stream;
use crate::native::error::{NativeError, check};

cuda_functions! {
    fn locdiff_cuda_event_new(out: *mut *mut c_void);
    fn locdiff_cuda_event_free(event: *mut c_void);
    fn locdiff_cuda_event_record(event: *mut c_void, id: i64, device: c_int);
    fn locdiff_cuda_event_query(event: *const c_void, done: *mut c_int);
    fn locdiff_cuda_event_synchronize(event: *const c_void);
}

/// How long a wait polls without sleeping: a sleep on Linux lasts 50 µs longer than asked, too much for a step of 1 ms.
const SPIN: Duration = Duration::from_millis(2);
/// After that it sleeps for this share of the time waited so far, so that a wait is late by 1 % at most.
const SLEEP_SHARE: u32 = 100;
const SLEEP_MAX: Duration = Duration::from_millis(1);

/// A wait that did not end well.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// The device was not done in time. It may still be at work.
    #[error("the device was not done within {:.3} s", .0.as_secs_f64())]
    TimedOut(Duration),
    /// The device failed.
    #[error(transparent)]
    Native(#[from] NativeError),
}

/// A mark in a stream.
#[derive(Debug)]
pub struct Event(*mut c_void);

// SAFETY: a CUDA event belongs to no thread, and what changes it takes `&mut self`.
unsafe impl Send for Event {}
// SAFETY: through `&self` the event is only read, and CUDA's own calls are thread-safe.
unsafe impl Sync for Event {}

impl Event {
    /// A mark that no stream has passed yet.
    pub fn new() -> Result<Self, NativeError> {
        let mut event = std::ptr::null_mut();
        // SAFETY: `event` has room for one pointer.
        check("new event", unsafe { locdiff_cuda_event_new(&raw mut event) })?;
        Ok(Self(event))
    }

    /// Marks the end of what `stream` holds now.
    pub fn record(&mut self, stream: &Stream) -> Result<(), NativeError> {
        // SAFETY: the event is live, and the stream came from torch.
        check("event record", unsafe { locdiff_cuda_event_record(self.0, stream.id, stream.device) })
    }

    /// Whether the device has passed the mark; true before the first record.
    pub fn query(&self) -> Result<bool, NativeError> {
        let mut done = 0;
        // SAFETY: the event is live, and `done` has room for one integer.
        check("event query", unsafe { locdiff_cuda_event_query(self.0, &raw mut done) })?;
        Ok(done != 0)
    }

    /// The host waits for the mark, however long it takes.
    pub fn synchronize(&self) -> Result<(), NativeError> {
        // SAFETY: the event is live.
        check("event synchronisation", unsafe { locdiff_cuda_event_synchronize(self.0) })
    }

    /// The host waits for the mark, but no longer than `timeout`.
    pub fn wait_for(&self, timeout: Duration) -> Result<(), WaitError> {
        poll(timeout, || self.query())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is live, and nobody holds it any more.
        let status = unsafe { locdiff_cuda_event_free(self.0) };
        if let Err(error) = check("end of an event", status) {
            tracing::error!(%error, "an event is not freed");
        }
    }
}

/// Asks `done` until it says yes or the time is out. Asks at least once, and once more after the time is out, because
/// the thread may have been asleep when the device finished.
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
    fn poll_ends_with_the_device_the_time_or_the_error() {
        let mut asked = 0;
        let third = || {
            asked += 1;
            Ok(asked == 3)
        };
        assert_eq!(poll(Duration::from_secs(60), third), Ok(()));
        assert_eq!(poll(Duration::ZERO, || Ok(true)), Ok(()), "done counts even when the time is out");
        let timeout = Duration::from_millis(5);
        assert_eq!(poll(timeout, || Ok(false)), Err(WaitError::TimedOut(timeout)));
        let error = NativeError { operation: "event query", text: "illegal address".to_owned() };
        assert_eq!(poll(timeout, || Err(error.clone())), Err(WaitError::Native(error.clone())));
    }
}
