//! Runs numbered tasks on several threads and returns their results in order.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::error::ShardsError;

/// Runs `work` on each of `0..count` and returns the results in order. If any task fails, returns the error of the
/// failed task with the lowest number. This error does not depend on the number of threads: tasks start in order, and a
/// task that has started always finishes. No task starts after a failure.
pub(super) fn in_order<T: Send>(
    threads: usize,
    count: usize,
    work: impl Fn(usize) -> Result<T, ShardsError> + Sync,
) -> Result<Vec<T>, ShardsError> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let done: Mutex<BTreeMap<usize, Result<T, ShardsError>>> = Mutex::default();
    let run = || {
        while !failed.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                break;
            }
            let result = work(number);
            failed.fetch_or(result.is_err(), Ordering::Relaxed);
            done.lock().unwrap_or_else(PoisonError::into_inner).insert(number, result);
        }
    };
    std::thread::scope(|scope| {
        (1..threads.min(count)).for_each(|_| drop(scope.spawn(run)));
        run();
    });
    done.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect()
}
