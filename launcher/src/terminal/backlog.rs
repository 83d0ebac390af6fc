//! A queue between threads that must never wait and one thread that may have to wait, such as a thread that writes to a
//! terminal.
//!
//! There are two ways to add an item. [`Backlog::push`] never drops the item. If the queue is full, [`Backlog::offer`]
//! drops and counts the item and all items offered after it, until the queue is empty again.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A queue that never makes its producers wait.
#[derive(Debug)]
pub struct Backlog<T> {
    queue: Mutex<Queue<T>>,
    changed: Condvar,
    bytes_max: usize,
}

#[derive(Debug)]
struct Queue<T> {
    items: VecDeque<(T, usize)>,
    /// Total size of the items in the queue that were added with [`Backlog::offer`], bytes.
    bytes: usize,
    /// Number of items dropped since the queue was last empty.
    dropped: u64,
    /// Whether the consumer is handling an item.
    is_busy: bool,
    is_closed: bool,
}

/// The result of [`Backlog::next`].
#[derive(Debug, PartialEq, Eq)]
pub enum NextItem<T> {
    /// The oldest item.
    Item(T),
    /// The queue is empty, and this many items have been dropped since the previous `Dropped`.
    Dropped(u64),
    /// The queue is still empty at the deadline.
    Nothing,
    /// The queue is empty and closed.
    Closed,
}

impl<T> Backlog<T> {
    /// Creates an empty queue. Items that are added by [`Backlog::offer`] may take up to `bytes_max` bytes in total.
    pub const fn new(bytes_max: usize) -> Self {
        let queue = Queue { items: VecDeque::new(), bytes: 0, dropped: 0, is_busy: false, is_closed: false };
        Self { queue: Mutex::new(queue), changed: Condvar::new(), bytes_max }
    }

    /// Adds an item that must not be lost.
    pub fn push(&self, item: T) {
        self.lock().items.push_back((item, 0));
        self.changed.notify_all();
    }

    /// Adds an item of `bytes` bytes. If the queue is full, drops and counts the item instead, and also all items
    /// offered after it until the queue is empty.
    pub fn offer(&self, item: T, bytes: usize) {
        let mut queue = self.lock();
        // After an item was dropped, drop all further offered items until the queue is empty, so that the output has
        // one gap instead of many.
        if queue.dropped > 0 || queue.bytes + bytes > self.bytes_max {
            queue.dropped += 1;
        } else {
            queue.bytes += bytes;
            queue.items.push_back((item, bytes));
        }
        drop(queue);
        self.changed.notify_all();
    }

    /// Closes the queue, so that the consumer can end once the queue is empty.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Takes the next item. Waits for an item until `deadline`, or without a limit if `deadline` is `None`.
    pub fn next(&self, deadline: Option<Instant>) -> NextItem<T> {
        let mut queue = self.lock();
        queue.is_busy = false;
        self.changed.notify_all();
        loop {
            if let Some((item, bytes)) = queue.items.pop_front() {
                queue.bytes -= bytes;
                queue.is_busy = true;
                return NextItem::Item(item);
            }
            if queue.dropped > 0 {
                queue.is_busy = true;
                return NextItem::Dropped(std::mem::take(&mut queue.dropped));
            }
            if queue.is_closed {
                return NextItem::Closed;
            }
            queue = match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
                None => self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return NextItem::Nothing,
                Some(left) => self.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// Whether the consumer has handled all items.
    pub fn is_idle(&self) -> bool {
        self.lock().is_idle()
    }

    /// Waits until the consumer has handled all items, at most for `limit`. Returns whether all items were handled.
    pub fn wait_until_idle(&self, limit: Duration) -> bool {
        let is_behind = |queue: &mut Queue<T>| !queue.is_idle();
        let waited = self.changed.wait_timeout_while(self.lock(), limit, is_behind);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn lock(&self) -> MutexGuard<'_, Queue<T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Queue<T> {
    fn is_idle(&self) -> bool {
        self.items.is_empty() && self.dropped == 0 && !self.is_busy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offers_to_a_full_queue_are_dropped_and_counted_and_pushes_never() {
        let backlog = Backlog::new(10);
        backlog.offer("a", 6);
        backlog.offer("too long", 5);
        backlog.offer("short", 1);
        backlog.push("b");
        let taken = [(); 4].map(|()| backlog.next(Some(Instant::now())));
        assert_eq!(taken, [NextItem::Item("a"), NextItem::Item("b"), NextItem::Dropped(2), NextItem::Nothing]);
        backlog.offer("c", 10);
        assert_eq!(backlog.next(None), NextItem::Item("c"), "an item was dropped although the queue was empty");
        backlog.close();
        assert_eq!(backlog.next(None), NextItem::Closed);
    }

    #[test]
    fn queue_is_idle_once_its_last_item_was_handled() {
        let backlog = Backlog::new(10);
        assert!(backlog.wait_until_idle(Duration::ZERO));
        backlog.push(1);
        assert!(!backlog.wait_until_idle(Duration::ZERO));
        assert_eq!(backlog.next(None), NextItem::Item(1));
        assert!(!backlog.wait_until_idle(Duration::ZERO), "idle while the consumer works on the item");
        assert_eq!(backlog.next(Some(Instant::now())), NextItem::Nothing);
        assert!(backlog.wait_until_idle(Duration::ZERO));
    }
}
