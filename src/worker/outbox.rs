//! Messages on their way to the launcher.
//!
//! A thread writes the messages to the control socket. If the launcher is stopped and its socket is full, the worker
//! goes on training instead of keeping its peers waiting.

use std::collections::VecDeque;
use std::io::{Error, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use locdiff_core::protocol::{ProtocolError, ToLauncher, write_message};

/// Longest time that a sender waits until the whole queue is written. If the launcher is reading, writing a message
/// takes microseconds.
const PATIENCE: Duration = Duration::from_secs(1);

/// If the messages that wait to be written exceed this size in bytes, further senders must wait.
const BYTES_MAX: usize = 64 << 20;

/// A queue of messages to the launcher.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    queue: Mutex<PendingFrames>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct PendingFrames {
    frames: VecDeque<Vec<u8>>,
    /// Size of all messages that are not written yet.
    bytes: usize,
    /// Whether a sender has waited for [`PATIENCE`] and given up. Becomes false when the queue is empty.
    is_behind: bool,
    /// The error of a failed write. After an error, nothing more is written.
    error: Option<String>,
}

impl PendingFrames {
    fn is_done(&self) -> bool {
        self.bytes == 0 || self.error.is_some()
    }
}

impl Outbox {
    /// Starts the thread that writes to `socket`.
    pub(super) fn start(mut socket: UnixStream) -> std::io::Result<Arc<Self>> {
        let outbox = Arc::new(Self::default());
        let shared = Arc::clone(&outbox);
        std::thread::Builder::new().name("outbox".into()).spawn(move || {
            loop {
                let mut queue = shared.lock();
                let frame = loop {
                    match queue.frames.pop_front() {
                        Some(frame) => break frame,
                        None => queue = shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
                    }
                };
                drop(queue);
                let written = socket.write_all(&frame);
                let mut queue = shared.lock();
                queue.bytes -= frame.len();
                queue.is_behind &= queue.bytes > 0;
                queue.error = written.err().map(|error| error.to_string());
                shared.changed.notify_all();
                if queue.error.is_some() {
                    return;
                }
            }
        })?;
        Ok(outbox)
    }

    /// Queues a message and waits until all messages are written, but not longer than [`PATIENCE`]. If messages are
    /// left after this wait, later calls queue their messages without waiting, until the queue is empty again.
    ///
    /// While the queue holds more than [`BYTES_MAX`] bytes, every call waits before it queues its message. This wait
    /// has no time limit.
    pub(super) fn send(&self, message: &ToLauncher) -> Result<(), ProtocolError> {
        let mut frame = Vec::new();
        write_message(&mut frame, message)?;
        let is_full = |queue: &mut PendingFrames| queue.bytes > BYTES_MAX && queue.error.is_none();
        let waited = self.changed.wait_while(self.lock(), is_full);
        let mut queue = waited.unwrap_or_else(PoisonError::into_inner);
        if queue.error.is_none() {
            queue.bytes += frame.len();
            queue.frames.push_back(frame);
            self.changed.notify_all();
        }
        if !queue.is_behind {
            let waited = self.changed.wait_timeout_while(queue, PATIENCE, |queue| !queue.is_done());
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
            queue.is_behind = !queue.is_done();
        }
        queue.error.clone().map_or(Ok(()), |error| Err(Error::other(error).into()))
    }

    /// Sends a heartbeat, unless earlier messages are still waiting.
    pub(super) fn send_beat(&self, beat: &ToLauncher) -> Result<(), ProtocolError> {
        let queue = self.lock();
        let is_waiting = queue.bytes > 0 && queue.error.is_none();
        drop(queue);
        if is_waiting { Ok(()) } else { self.send(beat) }
    }

    /// Waits until all messages are written, or until writing fails.
    pub(super) fn flush(&self) {
        let waited = self.changed.wait_while(self.lock(), |queue| !queue.is_done());
        drop(waited);
    }

    fn lock(&self) -> MutexGuard<'_, PendingFrames> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use locdiff_core::protocol::{StoreOperation, StoreRequest, read_message};

    use super::*;

    #[test]
    fn sender_does_not_wait_for_a_peer_that_does_not_read_and_no_message_is_lost() {
        let (socket, mut peer) = UnixStream::pair().expect("a socket pair can be created");
        let outbox = Outbox::start(socket).expect("a thread can be started");
        let question = |number: u32| StoreOperation::Contains(format!("{number:>1000}"));
        let message = |number: u32| ToLauncher::Store(StoreRequest { id: 0, operation: question(number) });
        let started = Instant::now();
        (0..2000).for_each(|number| outbox.send(&message(number)).expect("the socket is open"));
        assert!(started.elapsed() < 20 * PATIENCE, "the sender waited for {:?}", started.elapsed());
        outbox.send_beat(&message(9999)).expect("the socket is open");
        let reader = std::thread::spawn(move || {
            let next = |_| read_message::<ToLauncher>(&mut peer).expect("the bytes are messages").expect("it is open");
            (0..=2000).map(next).collect::<Vec<_>>()
        });
        outbox.flush();
        outbox.send(&message(2000)).expect("the socket is open");
        let received = reader.join().expect("the reader ends");
        assert!(received.into_iter().eq((0..=2000).map(message)), "a message is missing, or the heartbeat was queued");
        // The reader has closed its end of the socket, so sending must fail soon.
        let failed = (0..100).any(|number| outbox.send(&message(number)).is_err());
        assert!(failed, "the closed socket was not noticed");
    }
}
